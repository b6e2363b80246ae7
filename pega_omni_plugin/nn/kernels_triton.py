"""The operations of ``nn.kernels``, each as one Triton kernel.

A program reads what it needs once, holds it in registers and reduces in float32. Values are rounded where the plain
versions round them, so that both differ only by the order of sums. No row's result depends on another.

Importing this module imports Triton. With ``TRITON_INTERPRET=1`` set before, it runs on the CPU.
"""

# Triton has no types, and its kernels are no Python functions.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from pega_omni_plugin.nn.kernels import Kernels

Tensor = torch.Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MOST_HIDDEN = 8192
"""Values that a program of eight warps holds without spilling: 32 a thread."""

_TURN_VALUES = 1024
"""Values of heads in one program of ``turn``: few enough that one row's heads occupy several multiprocessors."""

_SILU_VALUES = 1024
"""Products made by one program of ``silu_mul``."""


def warps(values: int, itemsize: int) -> int:
    """Warps, 1 to 8, whose every thread moves 16 bytes of a block of ``values``, the most one instruction moves."""
    return max(1, min(8, values * itemsize // (16 * 32)))


def _check(*tensors: Tensor) -> None:
    """Raise ValueError where a kernel would read the wrong places or lose digits."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"expected contiguous tensors, all float32, bfloat16 or float16; got {tensor.dtype} beside {dtype}, "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}; use nn.kernels.PLAIN"
            )


def _block(hidden: int) -> int:
    if hidden > _MOST_HIDDEN:
        raise ValueError(f"hidden: expected at most {_MOST_HIDDEN}, got {hidden}; use nn.kernels.PLAIN")
    return triton.next_power_of_2(hidden)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    _check(x, *(() if weight is None else (weight,)))
    hidden = x.shape[-1]
    block = _block(hidden)
    normed = torch.empty_like(x)
    _norm_rows[(x.numel() // hidden,)](
        x, weight, normed, eps, HIDDEN=hidden, BLOCK=block, num_warps=warps(block, x.element_size())
    )
    return normed


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm takes the place of ``x``, the sum that of ``residual``."""
    _check(x, residual, weight)
    hidden = x.shape[-1]
    block = _block(hidden)
    _add_norm_rows[(x.numel() // hidden,)](
        x, residual, weight, eps, HIDDEN=hidden, BLOCK=block, num_warps=warps(block, x.element_size())
    )
    return x, residual


def _silu_mul(gate_up: Tensor) -> Tensor:
    _check(gate_up)
    inner = gate_up.shape[-1] // 2
    product = gate_up.new_empty((*gate_up.shape[:-1], inner))
    block = min(_SILU_VALUES, triton.next_power_of_2(inner))
    grid = (product.numel() // inner, triton.cdiv(inner, block))
    _silu_rows[grid](gate_up, product, INNER=inner, BLOCK=block, num_warps=warps(block, product.element_size()))
    return product


def _turn(heads: Tensor, weight: Tensor, positions: Tensor, table: Tensor, eps: float) -> Tensor:
    _check(heads, weight, table)
    rows, count, head_dim = heads.shape
    half = triton.next_power_of_2(head_dim // 2)
    block = min(max(1, _TURN_VALUES // (2 * half)), triton.next_power_of_2(count))
    turned = torch.empty_like(heads)
    _turn_heads[(rows, triton.cdiv(count, block))](
        heads,
        weight,
        positions,
        table,
        turned,
        eps,
        HEADS=count,
        HEAD_DIM=head_dim,
        BLOCK=block,
        HALF=half,
        num_warps=warps(block * half, heads.element_size()),
    )
    return turned


TRITON = Kernels(_rms_norm, _add_rms_norm, _silu_mul, _turn)
"""One launch for each operation, on CUDA; ``add_rms_norm`` works in place."""


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    """Float32 values that ``dtype`` holds."""
    return values.to(dtype).to(tl.float32)


@triton.jit
def _norm(values, weight, column, seen, eps, HIDDEN: tl.constexpr, dtype: tl.constexpr):
    """The norm of one row in float32, 0 beyond its end."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    normed = values * scale
    if weight is not None:
        normed = _rounded(normed, dtype) * tl.load(weight + column, mask=seen, other=0.0).to(tl.float32)
    return normed


@triton.jit
def _norm_rows(x, weight, normed, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    seen = column < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    values = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(normed + at, _norm(values, weight, column, seen, eps, HIDDEN, dtype).to(dtype), mask=seen)


@triton.jit
def _add_norm_rows(x, residual, weight, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    seen = column < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    added = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    total = _rounded(tl.load(residual + at, mask=seen, other=0.0).to(tl.float32) + added, dtype)
    tl.store(residual + at, total.to(dtype), mask=seen)
    tl.store(x + at, _norm(total, weight, column, seen, eps, HIDDEN, dtype).to(dtype), mask=seen)


@triton.jit
def _silu_rows(gate_up, product, INNER: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = product.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = column < INNER
    at = row * 2 * INNER + column
    gate = tl.load(gate_up + at, mask=seen, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + INNER, mask=seen, other=0.0).to(tl.float32)
    silu = _rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(product + row * INNER + column, (silu * up).to(dtype), mask=seen)


@triton.jit
def _turn_heads(
    heads,
    weight,
    positions,
    table,
    turned,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # heads of one program
    HALF: tl.constexpr,  # at least HEAD_DIM / 2
):
    """The two halves that the rotation pairs are tensors of their own, ``[BLOCK, HALF]``."""
    dtype: tl.constexpr = heads.dtype.element_ty
    half: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, HALF)
    seen = (head < HEADS)[:, None] & (dim < half)[None, :]
    at = head[:, None] * HEAD_DIM + dim[None, :]
    low = tl.load(heads + row * HEADS * HEAD_DIM + at, mask=seen, other=0.0).to(tl.float32)
    high = tl.load(heads + row * HEADS * HEAD_DIM + at + half, mask=seen, other=0.0).to(tl.float32)
    low_weight = tl.load(weight + at, mask=seen, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + at + half, mask=seen, other=0.0).to(tl.float32)
    angle = tl.load(positions + row).to(tl.int64) * HEAD_DIM + dim
    cos = tl.load(table + angle, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table + angle + half, mask=dim < half, other=0.0).to(tl.float32)[None, :]

    scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / HEAD_DIM + eps)[:, None]
    low = _rounded(_rounded(low * scale, dtype) * low_weight, dtype)
    high = _rounded(_rounded(high * scale, dtype) * high_weight, dtype)
    to_low = _rounded(low * cos, dtype) - _rounded(high * sin, dtype)
    to_high = _rounded(high * cos, dtype) + _rounded(low * sin, dtype)
    tl.store(turned + row * HEADS * HEAD_DIM + at, to_low.to(dtype), mask=seen)
    tl.store(turned + row * HEADS * HEAD_DIM + at + half, to_high.to(dtype), mask=seen)

"""The small operations between matrix products, each behind one function.

Models call what ``current`` gives for their device and never know which it is: plain PyTorch on the CPU, one Triton
kernel for each operation on CUDA, or what whoever runs a program puts in place with ``use``, as where vLLM's build has
fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

Tensor = torch.Tensor


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else weight * normed


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _turn(heads: Tensor, weight: Tensor, positions: Tensor, table: Tensor, eps: float) -> Tensor:
    return _rotate(weight * _rms_norm(heads, None, eps), positions, table)


def _rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    cos, sin = table[positions][:, None].chunk(2, dim=-1)  # [rows, 1, head_dim / 2]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation. All take contiguous tensors and may overwrite what they are given.

    * ``rms_norm(x, weight, eps)``: root mean square norm of the last dimension (arXiv 1910.07467), in float32; without
      a weight nothing is multiplied. Leaves ``x`` as it is.
    * ``add_rms_norm(x, residual, weight, eps)``: the norm of ``x + residual``, and that sum.
    * ``silu_mul(gate_up)``: SwiGLU's product (arXiv 2002.05202) of the two halves of the last dimension.
    * ``turn(heads, weight, positions, table, eps)``: every head of ``[rows, heads, head_dim]`` normed and multiplied by
      its row of ``weight`` ``[heads, head_dim]``, then the rotary embedding (arXiv 2104.09864) that pairs dimension
      ``i`` with ``i + head_dim / 2``; ``positions`` are ``[rows]``, ``table`` as ``transformer.rotary_table`` makes it.
      Leaves ``heads`` as it is.
    """

    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor] = _rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = _add_rms_norm
    silu_mul: Callable[[Tensor], Tensor] = _silu_mul
    turn: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = _turn


PLAIN = Kernels()
"""PyTorch's own operations."""

_used: Kernels | None = None


def use(kernels: Kernels) -> None:
    """Put ``kernels`` in place for programs loaded from now on, on every device."""
    global _used
    _used = kernels


def current(device: torch.device | str) -> Kernels:
    """What programs that are loaded now run with on ``device``."""
    if _used is not None:
        return _used
    if torch.device(device).type != "cuda":
        return PLAIN
    from pega_omni_plugin.nn.kernels_triton import TRITON

    return TRITON

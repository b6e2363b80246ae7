"""The draws of ``nn.sampling`` as one Triton kernel, alone or with what belongs to a frame's first code.

A program draws for one row and holds the row's whole vocabulary in registers. Nothing is sorted: both the logit down
to which top-k keeps codes and the weight down to which top-p does are found by bisection. Floats of one sign are
ordered as their bits are, so halving the range of the bits ends at the exact value, in at most 32 counts or sums over
the row. Everything is read on the device and no row's code depends on another, so a CUDA graph may hold the launch.

Importing this module imports Triton. With ``TRITON_INTERPRET=1`` set before, it runs on the CPU.
"""

# Triton has no types, and its kernels are no Python functions.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

MOST_CODES = 4096
"""Of a vocabulary: 16 values a thread for each of the few copies that a program keeps."""


def draw(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    most_k: int,
    nucleus: bool,
) -> Tensor:
    """``nn.sampling.draw`` in one launch: one code a row from ``logits`` ``[rows, vocabulary]``, int64 ``[rows]``.

    Codes as likely as the last that top-p keeps are kept too, where sorting keeps some of them. ``most_k`` and
    ``nucleus`` are taken for the common signature: a row does what its own settings ask, without a bound.

    Raises:
        ValueError: a vocabulary too large or tensors that are not dense.
    """
    del most_k, nucleus
    _check(logits, uniforms, temperature, top_k, top_p)
    rows, vocabulary = logits.shape
    codes = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(vocabulary)
    _draw[(rows,)](
        logits,
        uniforms,
        temperature,
        top_k,
        top_p,
        codes,
        logits.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=block,
        num_warps=warps(block),
    )
    return codes


def draw_first(
    logits: Tensor,
    seen: Tensor,
    slots: Tensor,
    penalty: Tensor,
    early: Tensor,
    uniforms: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """``draw`` of a frame's first code in one launch with what stands around it.

    The logits of codes that ``seen`` ``[slots + 1, vocabulary]`` (bool) has at the row's slot are lowered by
    ``penalty`` ``[rows]`` (see ``nn.sampling.penalise``); where ``early`` ``[rows]`` is not 0, the last code, the end,
    cannot come; the drawn code is marked in ``seen``. Rows of one slot, as padding has, should have a penalty of 1:
    what they see of each other's marks is a matter of chance.

    Raises:
        ValueError: a vocabulary too large or tensors that are not dense.
    """
    _check(logits, seen, slots, penalty, early, uniforms, temperature, top_k, top_p)
    rows, vocabulary = logits.shape
    if seen.dtype != torch.bool or seen.shape[1] != vocabulary:
        raise ValueError(f"seen: expected bool [slots + 1, {vocabulary}], got {seen.dtype} {tuple(seen.shape)}")
    codes = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(vocabulary)
    _draw_first[(rows,)](
        logits,
        seen,
        slots,
        penalty,
        early,
        uniforms,
        temperature,
        top_k,
        top_p,
        codes,
        logits.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=block,
        num_warps=warps(block),
    )
    return codes


def warps(block: int) -> int:
    """Warps of a program for ``block`` codes: 16 codes a thread."""
    return max(1, min(8, block // (16 * 32)))


def _check(logits: Tensor, *others: Tensor) -> None:
    if logits.shape[1] > MOST_CODES:
        raise ValueError(f"logits: expected at most {MOST_CODES} codes, got {logits.shape[1]}; use nn.sampling.draw")
    if logits.stride(1) != 1 or not all(other.is_contiguous() for other in others):
        raise ValueError("logits must lie dense in each row, everything else altogether; use nn.sampling.draw")


@triton.jit
def _reached(values, count):
    """Which of float32 ``values`` are at least the ``count``-th largest; at least ``count`` of them, without NaN."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # one zero
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the values
    above = tl.sum((keys >= 0).to(tl.int32), 0)
    limit = tl.where(above >= count, 0, -2147483648)
    step = tl.full([], 1 << 30, tl.int32)
    while (step > 0) & (above != count):  # just so many: a higher limit would keep the same
        higher = limit | step
        reach = tl.sum((keys >= higher).to(tl.int32), 0)
        if reach >= count:
            limit = higher
            above = reach
        step = step >> 1
    return keys >= limit


@triton.jit
def _nucleus(weights, top_p):
    """The weights, of which the largest is 1, without the small ones that hold at most ``1 - top_p`` of the sum."""
    bits = weights.to(tl.int32, bitcast=True)
    dropped = (1.0 - top_p) * tl.sum(weights, 0)
    limit = tl.full([], 0, tl.int32)
    step = tl.full([], 1 << 29, tl.int32)
    while step > 0:
        higher = limit | step
        if tl.sum(tl.where(bits < higher, weights, 0.0), 0) <= dropped:
            limit = higher
        step = step >> 1
    return tl.where(bits >= tl.minimum(limit, 0x3F800000), weights, 0.0)  # 1.0 stays, whatever top_p


@triton.jit
def _first(column, picked, VOCABULARY: tl.constexpr):
    """The first column that is picked; 0 if none is, as with logits that are no numbers."""
    first = tl.min(tl.where(picked, column, VOCABULARY), 0)
    return tl.where(first < VOCABULARY, first, 0)


@triton.jit
def _code(
    scores,  # float32, -inf beyond the vocabulary
    column,
    uniform,
    temperature,
    count,
    top_p,
    VOCABULARY: tl.constexpr,
):
    top = tl.max(scores, 0)
    code = _first(column, scores == top, VOCABULARY)
    if temperature > 0.0:
        weights = tl.exp((scores - top) / temperature)
        if (count > 0) & (count < VOCABULARY):
            weights = tl.where(_reached(scores, count), weights, 0.0)
        if top_p < 1.0:
            weights = _nucleus(weights, top_p)
        # Sums made in parallel may rise by a rounding where nothing is added: codes without weight are left out.
        total = tl.cumsum(weights, 0)
        whole = tl.max(tl.where(weights > 0.0, total, 0.0), 0)
        code = _first(column, (weights > 0.0) & (total > uniform * whole), VOCABULARY)
    return code


@triton.jit
def _draw(
    logits,
    uniforms,
    temperature,
    top_k,
    top_p,
    codes,
    row_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < VOCABULARY
    scores = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    code = _code(
        scores,
        column,
        tl.load(uniforms + row),
        tl.load(temperature + row),
        tl.load(top_k + row),
        tl.load(top_p + row),
        VOCABULARY,
    )
    tl.store(codes + row, code.to(tl.int64))


@triton.jit
def _draw_first(
    logits,
    seen,
    slots,
    penalty,
    early,
    uniforms,
    temperature,
    top_k,
    top_p,
    codes,
    row_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < VOCABULARY
    own = seen + tl.load(slots + row).to(tl.int64) * VOCABULARY
    scores = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    factor = tl.load(penalty + row)
    lowered = tl.where(scores > 0.0, scores / factor, scores * factor)
    scores = tl.where(tl.load(own + column, mask=inside, other=0) != 0, lowered, scores)
    shut = (tl.load(early + row) != 0) & (column == VOCABULARY - 1)
    scores = tl.where(shut, float("-inf"), scores)
    code = _code(
        scores,
        column,
        tl.load(uniforms + row),
        tl.load(temperature + row),
        tl.load(top_k + row),
        tl.load(top_p + row),
        VOCABULARY,
    )
    tl.store(codes + row, code.to(tl.int64))
    tl.store(own + code, 1)  # after every load: the code depends on all of them

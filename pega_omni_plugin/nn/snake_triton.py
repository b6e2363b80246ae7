"""``nn.conv.SnakeBeta`` as one Triton kernel: what it reads and writes is all that it costs, whatever is between.

The cosine is made here: the hardware's is not near enough to float32, and the library's has a branch for large angles
with memory of its own in every thread. A multiple of pi is taken off in three parts, the first two so short that the
products are exact (Cody and Waite 1980); what is left, at most pi / 2, goes through the Taylor series up to a term
whose next is below 7e-9. Angles up to 20,000 come out within 2e-7.

Importing this module imports Triton. With ``TRITON_INTERPRET=1`` set before, it runs on the CPU.
"""

# Triton has no types, and its kernels are no Python functions.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

_VALUES = 1024
"""Values of one program of four warps: eight a thread, 16 bytes of bfloat16."""


def snake(x: Tensor, magnitude: Tensor, frequency: Tensor | None, phase: Tensor | None, lift: Tensor | None) -> Tensor:
    """``x + magnitude cos(frequency x + phase) + lift``, computed in float32.

    Args:
        x: ``[rows, channels, steps]`` or ``[rows, steps, channels]``, dense, float32 or bfloat16.
        magnitude: float32, ``[channels, 1]`` or ``[channels]``, which says where channels are.
        frequency, phase, lift: like ``magnitude``; ``None`` stands for 1, 0 and 0.

    Returns:
        A new tensor like ``x``.

    Raises:
        ValueError: a tensor that is not dense or a parameter that is not float32.
    """
    parameters = [each for each in (magnitude, frequency, phase, lift) if each is not None]
    if not x.is_contiguous() or any(each.dtype != torch.float32 or not each.is_contiguous() for each in parameters):
        raise ValueError("x and parameters must lie dense, and parameters be float32")
    width, last = x.shape[-1], magnitude.dim() == 1
    lines = x.numel() // max(width, 1)  # what follows each other in memory along the last dimension
    columns = tile(width)
    tall = _VALUES // columns
    y = torch.empty_like(x)
    _snake[(triton.cdiv(lines, tall), triton.cdiv(width, columns))](
        x,
        magnitude,
        frequency,
        phase,
        lift,
        y,
        lines,
        width,
        len(magnitude),
        LAST=last,
        LINES=tall,
        COLUMNS=columns,
        num_warps=4,
    )
    return y


def tile(width: int) -> int:
    """Columns of a program's tile: those that divide ``width`` leave nothing over, if there are enough of them."""
    even = width & -width
    return min(even if even >= 32 else triton.next_power_of_2(max(width, 1)), 128)


@triton.jit
def _cos(angle):
    halves = tl.floor(angle * 0.3183098861837907 + 0.5)  # of turns, to the nearest
    rest = angle - halves * 3.140625
    rest = rest - halves * 0.0009675025939941406
    rest = rest - halves * 1.5099579909783765e-07
    square = rest * rest
    series = square * (1 / 479001600) - 1 / 3628800
    series = series * square + 1 / 40320
    series = series * square - 1 / 720
    series = series * square + 1 / 24
    series = series * square - 1 / 2
    series = series * square + 1
    return series * (1 - 2 * (halves - 2 * tl.floor(halves * 0.5)))  # odd halves turn the sign


@triton.jit
def _snake(
    x,
    magnitude,
    frequency,
    phase,
    lift,
    y,
    lines,
    width,
    channels,
    LAST: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (line < lines)[:, None] & (column < width)[None, :]
    if LAST:
        channel, known = column[None, :], (column < width)[None, :]
    else:
        channel, known = (line % channels)[:, None], (line < lines)[:, None]
    at = line.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    angle = values
    if frequency is not None:
        angle = angle * tl.load(frequency + channel, mask=known, other=0.0)
    if phase is not None:
        angle = angle + tl.load(phase + channel, mask=known, other=0.0)
    result = values + _cos(angle) * tl.load(magnitude + channel, mask=known, other=0.0)
    if lift is not None:
        result = result + tl.load(lift + channel, mask=known, other=0.0)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)

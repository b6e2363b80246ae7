"""Decode attention as two Triton kernels: partial softmax over parts of the past, then their sum.

The past of a row is divided as in FlashDecoding (Dao and others, 2023), the softmax kept running as in FlashAttention
(arXiv 2205.14135): every program holds the maximum, the sum and the weighted values of the positions that it saw.

Launch: one program for each (row, key head, split). A program serves all query heads of its key head, so that keys and
values are read once; the heads are padded to 16, the least that a tensor core multiplies, which costs nothing where
memory is the limit. Slot and length are read on the device and the grid depends on neither, so a CUDA graph may hold
the launch. Splits take tiles in turns: whatever the length, the work is even, and no row's result depends on another.
Eight warps or deeper pipelines would serve long pasts; speech has hundreds of positions, a few tiles a program.

Importing this module imports Triton. With ``TRITON_INTERPRET=1`` set before, it runs on the CPU.
"""

# Triton has no types, and its kernels are no Python functions.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

PROGRAMS = 256
"""Programs that keep a large device busy: two for each of about 130 multiprocessors."""

MOST_SPLITS = 16


def splits(rows: int, kv_heads: int, positions: int, tile: int) -> int:
    """Into how many parts a past is divided: a power of two, 1 where rows and heads alone fill the device.

    A function of shapes only, so that it is fixed for a bucket.
    """
    most = min(MOST_SPLITS, -(-positions // tile), max(1, PROGRAMS // (rows * kv_heads)))
    return 1 << (most.bit_length() - 1)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query a row, ``[rows, heads, head_dim]``, against the first ``lengths[row]`` positions of ``slots[row]``.

    ``keys`` and ``values`` are caches ``[slots, positions, kv_heads, head_dim]`` with the same strides; lengths are at
    least 1. Sums are float32; products of float32 inputs are too (no TF32). Returns ``[rows, heads, head_dim]``.

    Raises:
        ValueError: a shape or stride that the kernel does not serve.
    """
    rows, heads, head_dim = query.shape
    positions, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim: expected a power of two from 16 to 256, got {head_dim}; use sdpa_decode")
    if heads % kv_heads or group > 16:
        raise ValueError(f"heads: expected 1 to 16 for each of {kv_heads} key heads, got {heads}; use sdpa_decode")
    if keys.stride() != values.stride() or keys.stride(3) != 1 or query.stride()[1:] != (head_dim, 1):
        raise ValueError("keys, values, query: head_dim must lie dense, and keys and values alike")
    tile = 64 if keys.element_size() == 2 else 32  # two stages of keys and values of 128: 64 KiB of shared memory
    parts = splits(rows, kv_heads, positions, tile)
    output = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    if parts == 1:
        sums = totals = output  # not written
    else:
        sums = torch.empty((rows, heads, parts, head_dim), dtype=torch.float32, device=query.device)
        totals = torch.empty((2, rows, heads, parts), dtype=torch.float32, device=query.device)  # maxima, sums
    _attend[(rows, kv_heads, parts)](
        query,
        keys,
        values,
        slots,
        lengths,
        output,
        sums,
        totals,
        scale * math.log2(math.e),
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        SPLITS=parts,
        GROUP=group,
        HEAD_DIM=head_dim,
        TILE=tile,
        num_warps=4,
        num_stages=2,
    )
    if parts > 1:
        _combine[(rows, heads)](sums, totals, output, SPLITS=parts, HEAD_DIM=head_dim, num_warps=1)
    return output


@triton.jit
def _attend(
    query,
    keys,
    values,
    slots,
    lengths,
    output,
    sums,
    totals,
    scale,  # times log2(e): powers of two are what the hardware computes
    query_stride,
    slot_stride,
    position_stride,
    head_stride,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    past = tl.load(slots + row).to(tl.int64) * slot_stride + kv_head * head_stride
    member = tl.arange(0, 16)
    dim = tl.arange(0, HEAD_DIM)
    real = member[:, None] < GROUP
    head = kv_head * GROUP + member
    q = tl.load(query + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=real, other=0.0)

    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    weighted = tl.zeros([16, HEAD_DIM], tl.float32)
    for start in range(split * TILE, length, SPLITS * TILE):
        position = start + tl.arange(0, TILE)
        seen = position < length
        at = past + position[:, None] * position_stride + dim[None, :]
        key = tl.load(keys + at, mask=seen[:, None], other=0.0)  # [TILE, HEAD_DIM]
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale  # [16, TILE]
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))  # finite: a tile's first position is always seen
        shrink = tl.exp2(top - higher)
        weight = tl.exp2(score - higher[:, None])
        value = tl.load(values + at, mask=seen[:, None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        weighted = weighted * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher

    heads = tl.num_programs(1) * GROUP
    place = row * heads + head  # [16]
    if SPLITS == 1:
        result = weighted / total[:, None]
        tl.store(output + place[:, None] * HEAD_DIM + dim[None, :], result.to(output.dtype.element_ty), mask=real)
    else:
        part = place * SPLITS + split
        tl.store(sums + part[:, None] * HEAD_DIM + dim[None, :], weighted, mask=real)
        tl.store(totals + part, top, mask=member < GROUP)
        tl.store(totals + tl.num_programs(0) * heads * SPLITS + part, total, mask=member < GROUP)


@triton.jit
def _combine(sums, totals, output, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    every = tl.num_programs(0) * tl.num_programs(1)
    part = place * SPLITS + tl.arange(0, SPLITS)
    dim = tl.arange(0, HEAD_DIM)
    top = tl.load(totals + part)
    weight = tl.exp2(top - tl.max(top, 0))  # 0 for a split that saw nothing; the first always sees something
    total = tl.sum(tl.load(totals + every * SPLITS + part) * weight, 0)
    weighted = tl.sum(tl.load(sums + part[:, None] * HEAD_DIM + dim[None, :]) * weight[:, None], 0)
    tl.store(output + place * HEAD_DIM + dim, (weighted / total).to(output.dtype.element_ty))

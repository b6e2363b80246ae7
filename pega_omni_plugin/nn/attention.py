"""Grouped-query attention over caches that are indexed by slot, and over whole prompts.

A cache of one layer is ``[slots + 1, positions, kv_heads, head_dim]``; slot 0 is scratch for padding rows. A step has
one query a row. What its rows read is worked out once, in ``DecodeRows``, and shared by all layers. What computes it
is one of three: ``triton_decode`` on CUDA, ``sdpa_decode`` elsewhere, or what was put in place with ``use``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch.nn import functional

Tensor = torch.Tensor

READ_POSITIONS = 32
"""``sdpa_decode`` reads so many positions at a time: with whole vectors of a CPU (16 of float32, 32 of bfloat16 with
AVX-512), the order in which a row's numbers are added does not depend on how many positions longer rows have. Give
caches a multiple of it."""


@dataclass(frozen=True)
class DecodeRows:
    """What the rows of a step attend to. Make it with ``prepare`` or ``on_device``.

    ``slots`` and ``lengths`` are ``[rows]``, int64: row ``r`` attends to the first ``lengths[r]`` positions of
    ``slots[r]``, its own included, which is already written.

    The rest serves ``sdpa_decode``. It reads the first ``longest`` positions of consecutive slots from ``first`` on as
    they lie, or copies the rows' slots out where ``first`` is None. ``place_lengths`` are the lengths in the order of
    reading; ``order`` is the row that each place serves, ``back`` the place of each row (any for padding), and both are
    None where rows and places are the same.
    """

    slots: Tensor
    lengths: Tensor
    longest: int
    place_lengths: Tensor
    first: int | None = None
    order: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def prepare(cls, slots: Sequence[int], lengths: Sequence[int], device: torch.device | str) -> Self:
        """Rows known on the host, at least one; lengths from 1. No slot may repeat but 0: those rows are padding, whose
        output is some finite number.

        Copying keys and values out of their slots costs a third to a half of attention on a CPU. Slots that lie close
        together are therefore read where they lie, with those between them, and queries and outputs are put in order
        instead.
        """
        longest = -(-max(lengths) // READ_POSITIONS) * READ_POSITIONS
        index, length = _upload(slots, device), _upload(lengths, device)
        used = [slot for slot in slots if slot] or [0]
        first, places = min(used), max(used) - min(used) + 1
        if list(slots) == list(range(first, first + places)):
            return cls(index, length, longest, length, first)
        if 2 * places > 3 * len(slots):
            return cls(index, length, longest, length)
        order = [0] * places
        place_lengths = [1] * places  # what lies between is read too, and its output is dropped
        for row, slot in enumerate(slots):
            if slot >= first:
                order[slot - first] = row
                place_lengths[slot - first] = lengths[row]
        back = [max(slot - first, 0) for slot in slots]
        read = (_upload(numbers, device) for numbers in (order, back))
        return cls(index, length, longest, _upload(place_lengths, device), first, *read)

    @classmethod
    def on_device(cls, slots: Tensor, lengths: Tensor, longest: int) -> Self:
        """Rows known only on the device, as in a CUDA graph; ``longest`` bounds their lengths, say a cache's positions.

        ``triton_decode`` reads the lengths and no more than they say; ``sdpa_decode`` reads ``longest`` of every row.
        """
        return cls(slots, lengths, longest, lengths)

    @cached_property
    def mask(self) -> Tensor:
        """What is added to the scores: 0 where a place attends, else minus infinity, ``[places, 1, 1, longest]``."""
        seen = torch.arange(self.longest, device=self.lengths.device) < self.place_lengths.view(-1, 1, 1, 1)
        return torch.where(seen, 0.0, -torch.inf)

    def read(self, cache: Tensor) -> Tensor:
        """Keys or values of every place, ``[places, kv_heads, longest or the cache's positions, head_dim]``."""
        positions, kv_heads, head_dim = cache.shape[1:]
        longest = min(self.longest, positions)
        if self.first is None:
            return cache[:, :longest].index_select(0, self.slots).transpose(1, 2)
        # One view in place of three: this runs twice a layer.
        by_slot, by_position, by_head, by_dim = cache.stride()
        return cache.as_strided(
            (self.place_lengths.shape[0], kv_heads, longest, head_dim),
            (by_slot, by_head, by_position, by_dim),
            cache.storage_offset() + self.first * by_slot,
        )


def _upload(numbers: Sequence[int], device: torch.device | str) -> Tensor:
    # Through numpy: torch.tensor takes five times as long for a list.
    return torch.from_numpy(np.array(numbers, np.int64)).to(device)


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float) -> Tensor:
    """One query a row against its slot's past.

    ``query`` is ``[rows, heads, head_dim]``; ``keys`` and ``values`` are a layer's caches; ``heads`` is a multiple of
    their ``kv_heads``, and consecutive heads share keys (arXiv 2305.13245). Scores are multiplied by ``scale``. Returns
    ``[rows, heads, head_dim]``.
    """
    return (triton_decode if query.is_cuda else sdpa_decode)(query, keys, values, rows, scale)


def sdpa_decode(query: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float) -> Tensor:
    """``decode_attention`` by PyTorch's ``scaled_dot_product_attention``.

    On a CPU, a row's output is bit for bit the same whatever else is in the batch and wherever the row stands, if a
    key head serves an even number of heads and the cache's positions are a multiple of ``READ_POSITIONS`` (the tests
    hold it to that, for float32 and bfloat16). For this the mask is never left out, and heads are computed two by two:
    one alone is divided among threads by the longest row, and the library's products of three and more rows are too.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[2]
    if rows.order is not None:
        query = query.index_select(0, rows.order)
    places = query.shape[0]
    key, value = rows.read(keys), rows.read(values)
    mask = rows.mask.to(query.dtype)
    if key.shape[2] < rows.longest:  # the cache ends within what is read at a time
        mask = mask[..., : key.shape[2]]
    # Heads that share keys stand where queries of several positions would: keys and values are read once for them.
    group = heads // kv_heads
    together = group if query.is_cuda else 2 - group % 2
    packed = query.view(places, heads // together, together, head_dim)
    output = functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, scale=scale, enable_gqa=together < group
    )
    output = output.reshape(places, heads, head_dim)
    return output if rows.back is None else output.index_select(0, rows.back)


def triton_decode(query: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float) -> Tensor:
    """``decode_attention`` by a kernel of ours, which reads each row's length from the device: see
    ``attention_triton``."""
    from pega_omni_plugin.nn.attention_triton import decode

    return decode(query, keys, values, rows.slots, rows.lengths, scale)


def prefill_attention(
    query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[tuple[int, int]], scale: float
) -> Tensor:
    """Causal attention of whole prompts that lie one after the other.

    ``query`` is ``[tokens, heads, head_dim]``, ``keys`` and ``values`` ``[tokens, kv_heads, head_dim]``. ``spans`` are
    ``(start, length)`` of each prompt, in order and without gaps. Every prompt is computed alone. Returns
    ``[tokens, heads, head_dim]``.
    """
    outputs = []
    for start, length in spans:
        # [1, heads, length, head_dim]
        one, key, value = (part[start : start + length].transpose(0, 1)[None] for part in (query, keys, values))
        output = functional.scaled_dot_product_attention(
            one, key, value, is_causal=True, scale=scale, enable_gqa=one.shape[1] != key.shape[1]
        )
        outputs.append(output[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

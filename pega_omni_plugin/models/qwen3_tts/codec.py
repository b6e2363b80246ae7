"""The code predictor: a frame's first code and the talker's hidden state to its other codes, one after another.

It is a small transformer that starts anew with every frame: position 0 holds the hidden state, position ``g`` the code
of group ``g - 1``, whose output gives group ``g``. Its keys and values are kept for the frame only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from pega_omni_plugin.models.qwen3_tts.config import TalkerConfig
from pega_omni_plugin.nn.checkpoint import Weights
from pega_omni_plugin.nn.transformer import Stack, rotary_table

Tensor = torch.Tensor

Draw = Callable[[int, Tensor], Tensor]
"""``(group, logits [rows, code_vocab])`` to the codes drawn, ``[rows]``."""


class CodePredictor:
    """Weights and scratch space for up to ``rows`` frames at a time."""

    def __init__(self, config: TalkerConfig, weights: Weights, rows: int) -> None:
        dims, prefix = config.predictor, "talker.code_predictor"
        self.config = config
        self.stack = Stack(dims, weights, f"{prefix}.model")
        self._projection: tuple[Tensor, Tensor] | None = None
        if dims.hidden != config.stack.hidden:
            name = f"{prefix}.small_to_mtp_projection"
            matrix = weights.take(f"{name}.weight", dims.hidden, config.stack.hidden)
            self._projection = matrix, weights.take(f"{name}.bias", dims.hidden)
        # What enters at position g >= 1: the embedding of a code of group g - 1, projected once and for all.
        sizes = [("talker.model.codec_embedding.weight", config.vocab)]
        sizes += [(f"{prefix}.model.codec_embedding.{g}.weight", config.code_vocab) for g in range(config.groups - 2)]
        self._inputs = [self._project(weights.take(name, size, config.stack.hidden)) for name, size in sizes]
        self._heads = [
            weights.take(f"{prefix}.lm_head.{g}.weight", config.code_vocab, dims.hidden).t().contiguous()
            for g in range(config.groups - 1)
        ]
        self._rotary = rotary_table(dims, config.groups, weights)
        self._positions = torch.arange(config.groups, device=weights.device)[:, None].repeat(1, rows)
        self._first_positions = torch.arange(2, device=weights.device).repeat(rows)
        shape = (dims.layers, rows, dims.kv_heads, config.groups, dims.head_dim)
        self._keys = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        self._values = torch.zeros_like(self._keys)
        self._scale = dims.head_dim**-0.5
        self._nothing = torch.zeros((1, 1, 1), dtype=weights.dtype, device=weights.device)
        self._views: dict[int, list[list[_Views]]] = {}

    def frame(self, hidden: Tensor, first: Tensor, draw: Draw) -> list[Tensor]:
        """The codes of one frame for every row, group by group.

        ``hidden`` is ``[rows, talker hidden]``, ``first`` the codes of group 0, ``[rows]``; ``draw`` chooses the
        others.
        """
        codes = [first]
        for group in range(1, self.config.groups):
            entering = functional.embedding(codes[-1], self._inputs[group - 1])
            if group == 1:
                pair = torch.stack((self._project(hidden), entering), dim=1)  # [rows, 2, hidden]
                state = self._pass_first(pair)
            else:
                state = self._pass(entering, group)
            codes.append(draw(group, torch.mm(state, self._heads[group - 1])))
        return codes

    def _project(self, x: Tensor) -> Tensor:
        return x if self._projection is None else functional.linear(x, *self._projection)

    def _pass_first(self, pair: Tensor) -> Tensor:
        """Positions 0 and 1 at once; returns the state at position 1."""
        rows = pair.shape[0]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (one.reshape(rows, 2, *one.shape[1:]).transpose(1, 2) for one in (query, key, value))
            self._keys[layer, :rows, :, :2] = key
            self._values[layer, :rows, :, :2] = value
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return seen.transpose(1, 2).flatten(2).flatten(0, 1)

        state = self.stack.forward(pair.flatten(0, 1), self._first_positions[: 2 * rows], self._rotary, attend)
        return state.view(rows, 2, -1)[:, 1]

    def _pass(self, x: Tensor, position: int) -> Tensor:
        rows = x.shape[0]
        views = self._rows_views(rows)[position]
        dims = self.config.predictor
        group = dims.heads // dims.kv_heads

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            view = views[layer]
            view.key.copy_(key)
            view.value.copy_(value)
            packed = query.reshape(rows * dims.kv_heads, group, dims.head_dim)
            # A product of a few keys each: PyTorch's fused attention takes longer to begin than this takes.
            scores = torch.baddbmm(self._nothing, packed, view.keys, beta=0, alpha=self._scale)
            return torch.bmm(scores.softmax(dim=-1), view.values).view(rows, -1)

        return self.stack.forward(x, self._positions[position, :rows], self._rotary, attend)

    def _rows_views(self, rows: int) -> list[list[_Views]]:
        """By position and layer. They are the same in every frame, and making them takes longer than using them."""
        if rows not in self._views:
            layers = [(keys[:rows], values[:rows]) for keys, values in zip(self._keys, self._values, strict=True)]
            self._views[rows] = [
                [_Views(keys, values, position) for keys, values in layers] for position in range(self.config.groups)
            ]
        return self._views[rows]


class _Views:
    """Of one layer's keys and values, each ``[rows, kv_heads, groups, head_dim]``: where those of ``position`` go, and
    all up to it, as products want them."""

    def __init__(self, keys: Tensor, values: Tensor, position: int) -> None:
        self.key, self.value = keys[:, :, position], values[:, :, position]
        self.keys = keys.flatten(0, 1)[:, : position + 1].transpose(1, 2)  # [rows * kv_heads, head_dim, seen]
        self.values = values.flatten(0, 1)[:, : position + 1]  # [rows * kv_heads, seen, head_dim]

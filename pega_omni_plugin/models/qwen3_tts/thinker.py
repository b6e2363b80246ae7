"""The talker: text and past codes to the hidden state from which a frame's codes are drawn.

Every position of the sequence is a sum of a text embedding (projected to the talker's width) and of code embeddings. A
prompt is prefilled once; each frame then adds one position. Keys and values live in caches indexed by slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from pega_omni_plugin.models.qwen3_tts.config import TalkerConfig
from pega_omni_plugin.models.qwen3_tts.prompt import REFERENCE, SPEAKER, TalkerPrompt
from pega_omni_plugin.nn.attention import DecodeRows, decode_attention, prefill_attention
from pega_omni_plugin.nn.checkpoint import Weights
from pega_omni_plugin.nn.transformer import Stack, rotary_table

Tensor = torch.Tensor


class Talker:
    """Weights, caches and the two ways through them: ``prefill`` and ``step``."""

    def __init__(self, config: TalkerConfig, weights: Weights, slots: int, positions: int) -> None:
        self.config = config
        self.stack = Stack(config.stack, weights, "talker.model")
        dims, hidden, text = config.stack, config.stack.hidden, config.text_hidden
        self._text = weights.take("talker.model.text_embedding.weight", config.text_vocab, text)
        projection = "talker.text_projection"
        self._text_in = weights.take(f"{projection}.linear_fc1.weight", text, text)
        self._text_in_bias = weights.take(f"{projection}.linear_fc1.bias", text)
        self._text_out = weights.take(f"{projection}.linear_fc2.weight", hidden, text)
        self._text_out_bias = weights.take(f"{projection}.linear_fc2.bias", hidden)
        tables = [weights.take("talker.model.codec_embedding.weight", config.vocab, hidden)]
        for group in range(config.groups - 1):
            name = f"talker.code_predictor.model.codec_embedding.{group}.weight"
            tables.append(weights.take(name, config.code_vocab, hidden))
        self.codes = torch.cat(tables)  # [vocab + (groups - 1) * code_vocab, hidden]
        starts = [0, *(config.vocab + group * config.code_vocab for group in range(config.groups - 1))]
        self.code_starts = torch.tensor(starts, device=weights.device)  # where each group's table begins
        # Codes that may be drawn: all but the special ones in the last 1024, of which the end is kept, at last.
        self.allowed = config.vocab - 1024
        head = weights.take("talker.codec_head.weight", config.vocab, hidden)
        self._head = torch.cat((head[: self.allowed], head[config.eos, None])).t().contiguous()
        self._rotary = rotary_table(dims, positions, weights)
        shape = (slots + 1, positions, dims.kv_heads, dims.head_dim)
        self._keys = [torch.zeros(shape, dtype=weights.dtype, device=weights.device) for _ in range(dims.layers)]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self.positions = positions
        self._attention_scale = dims.head_dim**-0.5

    def embed_text(self, ids: Tensor) -> Tensor:
        """Text ids ``[tokens]`` to ``[tokens, hidden]``."""
        inner = functional.linear(functional.embedding(ids, self._text), self._text_in, self._text_in_bias)
        return functional.linear(functional.silu(inner), self._text_out, self._text_out_bias)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Whole frames ``[frames, groups]`` to the sums of their embeddings, ``[frames, hidden]``."""
        return functional.embedding(codes + self.code_starts, self.codes).sum(dim=1, dtype=torch.float32).to(self.codes)

    def embed_prompt(self, prompt: TalkerPrompt) -> Tensor:
        """Every position of a prompt, ``[positions, hidden]``."""
        device = self.codes.device
        embedded = self.embed_text(torch.tensor(prompt.text, device=device))
        track = torch.tensor(prompt.codec, device=device)
        places = (track >= 0).nonzero()[:, 0]
        embedded[places] += functional.embedding(track[places], self.codes)
        if prompt.speaker is not None:
            embedded[track == SPEAKER] += torch.from_numpy(prompt.speaker).to(self.codes)
        if prompt.reference is not None:
            embedded[track == REFERENCE] += self.embed_codes(torch.from_numpy(prompt.reference).to(device).long())
        return embedded

    def prefill(self, embedded: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
        """Run prompts, each ``[positions, hidden]``, into their slots; returns their last hidden states,
        ``[prompts, hidden]``."""
        lengths = [len(one) for one in embedded]
        spans: list[tuple[int, int]] = []
        for length in lengths:
            spans.append((sum(length for _, length in spans), length))
        device = self.codes.device
        position = torch.cat([torch.arange(length) for length in lengths]).to(device)
        place = torch.cat(
            [torch.arange(length) + slot * self.positions for length, slot in zip(lengths, slots, strict=True)]
        ).to(device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._keys[layer].flatten(0, 1).index_copy_(0, place, key)
            self._values[layer].flatten(0, 1).index_copy_(0, place, value)
            return prefill_attention(query, key, value, spans, self._attention_scale).flatten(1)

        x = embedded[0].clone() if len(embedded) == 1 else torch.cat(list(embedded))
        hidden = self.stack.forward(x, position, self._rotary, attend)
        return hidden[torch.tensor([start + length - 1 for start, length in spans], device=device)]

    def step(self, x: Tensor, position: Tensor, rows: DecodeRows) -> Tensor:
        """One more position for every row.

        ``x`` is ``[rows, hidden]``, ``position`` ``[rows]`` where each goes; returns the hidden states.
        """
        place = rows.slots * self.positions + position

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys.flatten(0, 1).index_copy_(0, place, key)
            values.flatten(0, 1).index_copy_(0, place, value)
            return decode_attention(query, keys, values, rows, self._attention_scale).flatten(1)

        return self.stack.forward(x, position, self._rotary, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the codes that may be drawn: ``0 … allowed - 1``, and at last the end; float32."""
        return torch.mm(hidden, self._head).float()

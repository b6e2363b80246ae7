"""Decoder-only transformer layers in the form of Qwen3 (arXiv 2505.09388): RMS norms, grouped queries with a norm per
head, half-split rotary embedding, SwiGLU.

What is kept of the past, and how it is attended to, is the caller's: ``Stack.forward`` hands every layer's queries,
keys and values to a function. The same layers so serve whole prompts, single steps over slots, and the code predictor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pega_omni_plugin.nn import kernels
from pega_omni_plugin.nn.checkpoint import Weights

Tensor = torch.Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, query, key, value)`` to ``[rows, heads * head_dim]``; query ``[rows, heads, head_dim]``, key and value
``[rows, kv_heads, head_dim]``, rotated."""


@dataclass(frozen=True, slots=True)
class StackDims:
    """Dimensions of a transformer stack. ``rope_theta`` is the base of the rotary embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim]
    head_norm: Tensor  # [heads + 2 * kv_heads, head_dim]; ones for the values, whose norm nobody reads
    out: Tensor  # [heads * head_dim, hidden]
    post_norm: Tensor
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]


class Stack:
    """``layers`` decoder layers and a final norm. Matrices are kept transposed, as a product of rows wants them."""

    def __init__(self, dims: StackDims, weights: Weights, prefix: str) -> None:
        self.dims = dims
        self.kernels = kernels.current(weights.device)
        self._layers = [_read_layer(dims, weights, f"{prefix}.layers.{number}") for number in range(dims.layers)]
        self._norm = weights.take(f"{prefix}.norm.weight", dims.hidden)

    def forward(self, x: Tensor, positions: Tensor, table: Tensor, attend: Attend) -> Tensor:
        """``x`` ``[rows, hidden]`` through every layer and the final norm; same shape. May overwrite ``x``.

        ``positions`` ``[rows]`` are looked up in ``table``, see ``rotary_table``.
        """
        dims, ops = self.dims, self.kernels
        rows, heads, both = x.shape[0], dims.heads, dims.heads + dims.kv_heads
        residual = x
        normed = ops.rms_norm(x, self._layers[0].input_norm, dims.eps)
        for number, layer in enumerate(self._layers):
            if number:
                normed, residual = ops.add_rms_norm(x, residual, layer.input_norm, dims.eps)
            qkv = torch.mm(normed, layer.qkv).view(rows, both + dims.kv_heads, dims.head_dim)
            # Values are normed and rotated along, in vain: cheaper than taking queries and keys apart from them.
            turned = ops.turn(qkv, layer.head_norm, positions, table, dims.eps)
            attended = attend(number, turned[:, :heads], turned[:, heads:both], qkv[:, both:])
            x = torch.mm(attended, layer.out)
            normed, residual = ops.add_rms_norm(x, residual, layer.post_norm, dims.eps)
            x = torch.mm(ops.silu_mul(torch.mm(normed, layer.gate_up)), layer.down)
        return ops.add_rms_norm(x, residual, self._norm, dims.eps)[0]


def rotary_table(dims: StackDims, positions: int, weights: Weights) -> Tensor:
    """Cosines and then sines for positions ``0 … positions - 1``, ``[positions, head_dim]``, made in float32."""
    exponents = torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / dims.rope_theta**exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(weights.device, weights.dtype)


def _read_layer(dims: StackDims, weights: Weights, prefix: str) -> _Layer:
    hidden, inner = dims.hidden, dims.intermediate
    queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim

    def matrix(*parts: tuple[str, int], inputs: int) -> Tensor:
        read = [weights.take(f"{prefix}.{name}.weight", outputs, inputs) for name, outputs in parts]
        return torch.cat(read).t().contiguous()

    q_norm = weights.take(f"{prefix}.self_attn.q_norm.weight", dims.head_dim)
    k_norm = weights.take(f"{prefix}.self_attn.k_norm.weight", dims.head_dim)
    return _Layer(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=matrix(
            ("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys), inputs=hidden
        ),
        head_norm=torch.cat(
            [norm.expand(heads, -1) for norm, heads in ((q_norm, dims.heads), (k_norm, dims.kv_heads))]
            + [torch.ones_like(k_norm).expand(dims.kv_heads, -1)]
        ),
        out=matrix(("self_attn.o_proj", hidden), inputs=queries),
        post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=matrix(("mlp.gate_proj", inner), ("mlp.up_proj", inner), inputs=hidden),
        down=matrix(("mlp.down_proj", hidden), inputs=inner),
    )

"""Codes to waveform: the decoder of the 12 Hz speech tokenizer, streamed exactly.

Every layer looks at the past only, so a frame's samples are final as soon as its codes are known: what a layer needs of
the past is kept per slot, and nothing is computed twice or ahead. Cut into calls in any way, the samples are those of
the decoder run over all frames at once (``Qwen3TTSTokenizerV2Decoder.forward`` of the official package ``qwen-tts``).

What is constant is folded into weights when they are read, in float32, and rounded once.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from pega_omni_plugin.models.qwen3_tts.config import CodecConfig
from pega_omni_plugin.nn import kernels
from pega_omni_plugin.nn.checkpoint import CheckpointError, Weights
from pega_omni_plugin.nn.conv import (
    CausalConv,
    CausalConvLast,
    CausalUpsampling,
    CausalUpsamplingLast,
    Histories,
    Pasts,
    SnakeBeta,
)

_DILATIONS = (1, 3, 9)  # of a block's residual units; in the official source, not in its configuration


class CodecDecoder:
    """Waveforms of up to ``slots`` streams at once; slot 0 is scratch, for rows of a batch that are padding.

    Raises:
        CheckpointError: a tensor is missing or has another shape than ``config`` says; names it.
    """

    @torch.inference_mode()
    def __init__(self, config: CodecConfig, weights: Weights, slots: int) -> None:
        self.device = weights.device
        if not (config.upsampling_ratios and config.upsample_rates):
            raise CheckpointError("decoder_config: upsampling_ratios, upsample_rates: expected at least one of each")
        exact = copy.copy(weights)
        exact.dtype = torch.promote_types(weights.dtype, torch.float32)
        self._window = config.window
        self._histories = Histories(slots, weights.dtype, weights.device)
        self._quantizer = _Quantizer(config, exact, weights.dtype)
        self._transformer = _Transformer(config, exact, weights.dtype, self._histories, slots)
        self._upsampling: list[_ConvNeXt] = []
        offset = None
        for number in range(len(config.upsampling_ratios)):
            block = _ConvNeXt(config, exact, number, self._histories, offset)
            offset = block.offset
            self._upsampling.append(block)
        self._vocoder = _Vocoder(config, exact, self._histories, offset)

    @torch.inference_mode()
    def reset(self, slots: Tensor) -> None:
        """Put ``slots`` ``[rows]`` (int64) at the start of a stream."""
        self._histories.reset(slots)
        self._transformer.reset(slots)

    @torch.inference_mode()
    def save(self, slot: int) -> list[Tensor]:
        """Where the stream in ``slot`` stands, for ``resume``."""
        return [state[slot].clone() for state in self._states]

    @torch.inference_mode()
    def resume(self, slot: int, saved: list[Tensor]) -> None:
        """Go on in ``slot`` from where ``save`` was."""
        for state, kept in zip(self._states, saved, strict=True):
            state[slot].copy_(kept)

    @property
    def _states(self) -> list[Tensor]:
        return [*self._histories.states, *self._transformer.states]

    @torch.inference_mode()
    def decode(self, codes: Tensor, slots: Tensor) -> Tensor:
        """The samples of the next frames.

        Args:
            codes: ``[rows, frames, groups]``, int64. One that is no code, which the talker's own ids are, is read as 0.
            slots: ``[rows]``, int64, whose streams these are; each at most once, but for 0.

        Returns:
            ``[rows, frames * frame_samples]`` in [-1, 1], in the dtype of the weights.
        """
        if codes.shape[1] <= self._window:
            return self._decode(codes, slots)
        return torch.cat([self._decode(piece, slots) for piece in torch.split(codes, self._window, 1)], 1)

    def _decode(self, codes: Tensor, slots: Tensor) -> Tensor:
        pasts = self._histories.read(slots)
        x = self._quantizer(codes)  # [rows, frames, codebook_dim]
        x = self._transformer(x, slots, pasts)  # [rows, frames, hidden]
        for block in self._upsampling:
            x = block(x, pasts)  # [rows, steps, latent]
        samples = self._vocoder(x, pasts)
        self._histories.write(slots, pasts)
        return samples


class _Quantizer:
    """The sum of one table row per codebook: codebooks through their group's output projection."""

    def __init__(self, config: CodecConfig, weights: Weights, dtype: torch.dtype) -> None:
        size, width = config.codebook_size, config.codebook_dim
        tables = []
        for group, books in (("rvq_first", 1), ("rvq_rest", config.quantizers - 1)):
            name = f"decoder.quantizer.{group}"
            projection = weights.take(f"{name}.output_proj.weight", width, width // 2, 1)[:, :, 0]
            for book in range(books):
                layer = f"{name}.vq.layers.{book}._codebook"
                usage = weights.take(f"{layer}.cluster_usage", size).clamp(min=1e-5)
                vectors = weights.take(f"{layer}.embedding_sum", size, width // 2) / usage[:, None]
                tables.append(vectors @ projection.T)
        self._size = size
        self._table = torch.cat(tables).to(dtype)  # [groups * codebook_size, codebook_dim]
        self._starts = torch.arange(0, config.quantizers * size, size, device=weights.device)

    def __call__(self, codes: Tensor) -> Tensor:
        rows = torch.addcmul(self._starts, codes, codes < self._size)
        return F.embedding(rows, self._table).sum(2)


class _Transformer:
    """A convolution over the frames, then layers of attention over a sliding window of frames.

    Keys and values of the last ``window`` frames lie in a ring per slot, that of frame ``n`` at ``n % window``.
    """

    def __init__(
        self, config: CodecConfig, weights: Weights, dtype: torch.dtype, histories: Histories, slots: int
    ) -> None:
        dims = config.transformer
        name = "decoder.pre_transformer"
        hidden, latent, width = dims.hidden, config.latent, config.codebook_dim
        # The convolution and the projection after it are one convolution.
        conv = weights.take("decoder.pre_conv.conv.weight", latent, width, 3)
        bias = weights.take("decoder.pre_conv.conv.bias", latent)
        inner = weights.take(f"{name}.input_proj.weight", hidden, latent)
        inner_bias = weights.take(f"{name}.input_proj.bias", hidden)
        self._conv = CausalConvLast(histories, torch.einsum("hl,lwk->hwk", inner, conv), inner @ bias + inner_bias)
        self._layers = [_Layer(config, weights, number, dtype) for number in range(dims.layers)]
        # The projection after the last norm and the first upsampling, whose kernel is its stride, are one projection.
        norm = weights.take(f"{name}.norm.weight", hidden)
        outer = weights.take(f"{name}.output_proj.weight", latent, hidden) * norm
        outer_bias = weights.take(f"{name}.output_proj.bias", latent)
        first, first_bias = _upsampling(config, weights, 0)
        self._ratio = config.upsampling_ratios[0]
        self._out = (first @ outer).to(dtype).T
        self._out_bias = (first @ outer_bias + first_bias).to(dtype)

        self._hidden, self._latent, self._eps = hidden, latent, dims.eps
        ops = kernels.current(weights.device)
        self._rms_norm, self._silu_mul = ops.rms_norm, ops.silu_mul
        self._window = config.window
        self._heads, self._kv_heads, self._head_dim = dims.heads, dims.kv_heads, dims.head_dim
        device, exact = weights.device, weights.dtype
        even = torch.arange(0, dims.head_dim, 2, dtype=torch.float32, device=device)
        # Values are turned by nothing, so that one product turns all heads.
        self._frequencies = torch.zeros(dims.heads + 2 * dims.kv_heads, dims.head_dim // 2, dtype=exact, device=device)
        self._frequencies[: dims.heads + dims.kv_heads] = 1.0 / dims.rope_theta ** (even / dims.head_dim)
        self._one = torch.ones((), dtype=exact, device=device)
        self._open = torch.zeros((), dtype=dtype, device=device)
        self._shut = torch.full((), -torch.inf, dtype=dtype, device=device)
        self._steps = torch.arange(1 - self._window, self._window, device=device)
        self._position = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._ring = torch.zeros(
            dims.layers, (slots + 1) * self._window, 2 * dims.kv_heads, dims.head_dim, dtype=dtype, device=device
        )

    @property
    def states(self) -> list[Tensor]:
        """All that is kept, ``[slots + 1, …]`` each."""
        layers, _, heads, dim = self._ring.shape
        return [self._position, self._ring.view(layers, -1, self._window, heads, dim).transpose(0, 1)]

    def reset(self, slots: Tensor) -> None:
        self._position.index_fill_(0, slots, 0)
        # The mask keeps old entries out unless they are not finite: nothing weighs those away.
        layers, _, heads, dim = self._ring.shape
        self._ring.view(layers, -1, self._window * heads, dim).index_fill_(1, slots, 0)

    def __call__(self, x: Tensor, slots: Tensor, pasts: Pasts) -> Tensor:
        """``[rows, frames, codebook_dim]`` to ``[rows, frames * ratio, latent]``, at most ``window`` frames."""
        rows, frames, _ = x.shape
        window, keys = self._window, self._window - 1 + frames
        start = self._position.index_select(0, slots)  # [rows]
        # Of the frames that the first query sees, oldest first, and of the new ones.
        positions = start.unsqueeze(1) + self._steps.narrow(0, 0, keys)  # [rows, keys]
        places = positions.remainder(window).add_(slots.unsqueeze(1), alpha=window)
        memory = self._ring.index_select(1, places.view(-1)).view(-1, rows, keys, 2 * self._kv_heads, self._head_dim)
        new = memory.narrow(2, window - 1, frames)  # overwritten layer by layer
        mask = self._mask(positions, frames)  # [rows, 1, frames, keys]
        angles = positions.narrow(1, window - 1, frames).to(self._frequencies.dtype).view(rows, frames, 1, 1)
        angles = angles * self._frequencies
        turn = torch.polar(self._one.expand_as(angles), angles)  # [rows, frames, heads + 2 kv_heads, head_dim / 2]

        x = self._conv(x, pasts).view(rows * frames, self._hidden)
        split = memory.transpose(2, 3)
        for layer, k, v, fresh in zip(
            self._layers,
            split[:, :, : self._kv_heads].unbind(),
            split[:, :, self._kv_heads :].unbind(),
            new.unbind(),
            strict=True,
        ):
            heads = torch.mm(self._norm(x), layer.qkv).to(angles.dtype)
            turned = torch.view_as_complex(heads.view(*turn.shape, 2)) * turn
            qkv = torch.view_as_real(turned).view(rows, frames, -1, self._head_dim)
            fresh.copy_(qkv[:, :, self._heads :])
            q = qkv[:, :, : self._heads].transpose(1, 2).to(k.dtype)
            # Queries carry the scale.
            if frames == 1 and not q.is_cuda:
                # Twice: the library adds up for a single query in an order that depends on the thread.
                q = q.repeat(1, 1, 2, 1)
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=self._heads != self._kv_heads)
            y = y[:, :, :frames]
            x = torch.addmm(x, y.transpose(1, 2).reshape(rows * frames, -1), layer.o)
            x = torch.addmm(x, self._silu_mul(torch.mm(self._norm(x), layer.gate_up)), layer.down)
        self._ring.index_copy_(1, places.narrow(1, window - 1, frames).reshape(-1), new.flatten(1, 2))
        self._position.index_copy_(0, slots, start + frames)
        return torch.addmm(self._out_bias, self._norm(x), self._out).view(rows, frames * self._ratio, self._latent)

    def _mask(self, positions: Tensor, frames: int) -> Tensor:
        """What is added to scores: nothing for the ``window`` positions up to a frame's own, from 0 on."""
        visible = (positions >= 0).view(len(positions), 1, 1, -1)
        if frames > 1:
            after = torch.arange(frames, device=positions.device)[:, None]
            age = torch.arange(positions.shape[1], device=positions.device) - after
            visible = visible & (age >= 0) & (age < self._window)
        return torch.where(visible, self._open, self._shut)

    def _norm(self, x: Tensor) -> Tensor:
        """RMS norm; its weight is in the product that follows."""
        if x.dtype == torch.float64:  # which the kernels do not keep
            return F.rms_norm(x, (self._hidden,), None, self._eps)
        return self._rms_norm(x, None, self._eps)


class _Layer:
    """Matrices ``[in, out]`` of a layer: norms, layer scales and the scale of queries are in them.

    In the heads of queries and keys the two halves that a rotation pairs are interleaved, so that a pair is a complex
    number; scores do not change, since both are.
    """

    def __init__(self, config: CodecConfig, weights: Weights, number: int, dtype: torch.dtype) -> None:
        dims = config.transformer
        name = f"decoder.pre_transformer.layers.{number}"
        hidden, inner, queries = dims.hidden, dims.intermediate, dims.heads * dims.head_dim
        keys = dims.kv_heads * dims.head_dim

        def interleaved(weight: Tensor) -> Tensor:
            return weight.view(-1, 2, dims.head_dim // 2, hidden).transpose(1, 2).reshape(-1, hidden)

        q = weights.take(f"{name}.self_attn.q_proj.weight", queries, hidden) * dims.head_dim**-0.5
        k = weights.take(f"{name}.self_attn.k_proj.weight", keys, hidden)
        v = weights.take(f"{name}.self_attn.v_proj.weight", keys, hidden)
        o = weights.take(f"{name}.self_attn.o_proj.weight", hidden, queries)
        gate = weights.take(f"{name}.mlp.gate_proj.weight", inner, hidden)
        up = weights.take(f"{name}.mlp.up_proj.weight", inner, hidden)
        down = weights.take(f"{name}.mlp.down_proj.weight", hidden, inner)
        before = weights.take(f"{name}.input_layernorm.weight", hidden)
        between = weights.take(f"{name}.post_attention_layernorm.weight", hidden)
        attention_scale = weights.take(f"{name}.self_attn_layer_scale.scale", hidden)
        mlp_scale = weights.take(f"{name}.mlp_layer_scale.scale", hidden)
        self.qkv = (torch.cat((interleaved(q), interleaved(k), v)) * before).to(dtype).T
        self.o = (o * attention_scale[:, None]).to(dtype).T
        self.gate_up = (torch.cat((gate, up)) * between).to(dtype).T
        self.down = (down * mlp_scale[:, None]).to(dtype).T


def _upsampling(config: CodecConfig, weights: Weights, number: int) -> tuple[Tensor, Tensor]:
    """A transposed convolution whose kernel is its stride, as a matrix ``[ratio * latent, latent]`` and a bias."""
    ratio, latent = config.upsampling_ratios[number], config.latent
    name = f"decoder.upsample.{number}.0.conv"
    weight = weights.take(f"{name}.weight", latent, latent, ratio)
    bias = weights.take(f"{name}.bias", latent)
    return weight.permute(2, 1, 0).reshape(ratio * latent, latent), bias.repeat(ratio)


class _ConvNeXt:
    """A ConvNeXt block (arXiv 2201.03545) on ``[rows, steps, latent]``, after the upsampling if it is not the first.

    The first upsampling is part of the transformer's last projection.
    """

    def __init__(
        self, config: CodecConfig, weights: Weights, number: int, histories: Histories, offset: Tensor | None
    ) -> None:
        latent, dtype = config.latent, histories.dtype
        name = f"decoder.upsample.{number}.1"
        self._latent = latent
        self._up: tuple[Tensor, Tensor] | None = None
        if number:
            weight, bias = _upsampling(config, weights, number)
            if offset is not None:
                bias = bias + weight @ offset
            self._up = bias.to(dtype), weight.to(dtype).T
        depthwise = weights.take(f"{name}.dwconv.conv.weight", latent, 1, 7)
        self._place, _ = histories.reserve(latent, 6)
        self._taps = depthwise[:, 0].T.contiguous().to(dtype)  # [kernel, latent]
        self._taps_bias = weights.take(f"{name}.dwconv.conv.bias", latent).to(dtype)
        scale = weights.take(f"{name}.norm.weight", latent)
        shift = weights.take(f"{name}.norm.bias", latent)
        wide = weights.take(f"{name}.pwconv1.weight", 4 * latent, latent)
        wide_bias = weights.take(f"{name}.pwconv1.bias", 4 * latent)
        gamma = weights.take(f"{name}.gamma", latent)
        narrow = weights.take(f"{name}.pwconv2.weight", latent, 4 * latent)
        narrow_bias = weights.take(f"{name}.pwconv2.bias", latent)
        self._wide = (wide * scale).to(dtype).T
        self._wide_bias = (wide @ shift + wide_bias).to(dtype)
        self._narrow = (narrow * gamma[:, None]).to(dtype).T
        self.offset = gamma * narrow_bias

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        rows, latent = x.shape[0], self._latent
        if self._up is not None:
            x = torch.addmm(self._up[0], x.reshape(-1, latent), self._up[1]).view(rows, -1, latent)
        joined = pasts.join_last(self._place, x)  # [rows, 6 + steps, latent]
        windows = joined.as_strided((rows, x.shape[1], 7, latent), (joined.stride(0), latent, latent, 1))
        y = (windows * self._taps).sum(2).add_(self._taps_bias)
        y = F.layer_norm(y, (latent,), eps=1e-6).view(-1, latent)
        y = F.gelu(torch.addmm(self._wide_bias, y, self._wide))
        return torch.addmm(x.reshape(-1, latent), y, self._narrow).view(rows, -1, latent)


class _Vocoder:
    """``[rows, steps, latent]`` to samples: for each rate, upsample and refine.

    Up to the first upsampling, channels are last.
    """

    def __init__(self, config: CodecConfig, weights: Weights, histories: Histories, offset: Tensor | None) -> None:
        channels, name = config.channels, "decoder.decoder"
        self._first = CausalConvLast(
            histories, *_conv(weights, f"{name}.0.conv", channels, config.latent, 7), offset=offset
        )
        self._stages: list[tuple[SnakeBeta, CausalUpsampling | CausalUpsamplingLast, list[_Unit]]] = []
        offset = None
        for number, rate in enumerate(config.upsample_rates, start=1):
            block = f"{name}.{number}.block"
            snake = _snake(weights, histories, f"{block}.0", channels, offset=offset, last=number == 1)
            narrower = channels // 2
            up = (CausalUpsamplingLast if number == 1 else CausalUpsampling)(
                histories,
                weights.take(f"{block}.1.conv.weight", channels, narrower, 2 * rate),
                weights.take(f"{block}.1.conv.bias", narrower),
                offset=snake.offset,
            )
            channels, offset = narrower, None
            units = []
            for place, dilation in enumerate(_DILATIONS, start=2):
                unit = _Unit(weights, histories, f"{block}.{place}", channels, dilation, offset)
                offset = unit.offset
                units.append(unit)
            self._stages.append((snake, up, units))
        last = len(config.upsample_rates) + 1
        self._snake = _snake(weights, histories, f"{name}.{last}", channels, offset=offset)
        self._last = CausalConv(
            histories, *_conv(weights, f"{name}.{last + 1}.conv", 1, channels, 7), offset=self._snake.offset
        )

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        x = self._first(x, pasts)
        for snake, up, units in self._stages:
            x = up(snake(x), pasts)
            if isinstance(up, CausalUpsamplingLast):
                x = x.transpose(1, 2).contiguous()
            for unit in units:
                x = unit(x, pasts)
        return self._last(self._snake(x), pasts).clamp_(-1, 1).flatten(1)


class _Unit:
    """``x`` plus snake, dilated convolution, snake, product, in place."""

    def __init__(
        self,
        weights: Weights,
        histories: Histories,
        name: str,
        channels: int,
        dilation: int,
        offset: Tensor | None,
    ) -> None:
        self._before = _snake(weights, histories, f"{name}.act1", channels, offset=offset)
        # What the second snake multiplies its input by is in the convolution's weights.
        self._between = _snake(weights, histories, f"{name}.act2", channels, scaled=True)
        factor = self._between.factor
        weight, bias = _conv(weights, f"{name}.conv1.conv", channels, channels, 7)
        self._conv = CausalConv(
            histories,
            weight * factor[:, None, None],
            bias * factor,
            dilation=dilation,
            offset=self._before.offset,
        )
        weight, added = _conv(weights, f"{name}.conv2.conv", channels, channels, 1)
        product = weight[:, :, 0] / factor
        self._product = product.to(histories.dtype)[None]
        if self._between.offset is not None:
            added = added + product @ self._between.offset
        self.offset = added if offset is None else added + offset

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        y = self._between(self._conv(self._before(x), pasts))
        rows = x.shape[0]
        return x.baddbmm_(self._product if rows == 1 else self._product.expand(rows, -1, -1), y)


def _snake(
    weights: Weights,
    histories: Histories,
    name: str,
    channels: int,
    *,
    offset: Tensor | None = None,
    last: bool = False,
    scaled: bool = False,
) -> SnakeBeta:
    alpha, beta = weights.take(f"{name}.alpha", channels), weights.take(f"{name}.beta", channels)
    return SnakeBeta(alpha, beta, histories.dtype, offset=offset, last=last, scaled=scaled)


def _conv(weights: Weights, name: str, outputs: int, inputs: int, kernel: int) -> tuple[Tensor, Tensor]:
    return weights.take(f"{name}.weight", outputs, inputs, kernel), weights.take(f"{name}.bias", outputs)

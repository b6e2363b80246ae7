"""The codec's encoder: a recording to frames of codes.

It is the encoder of Mimi (arXiv 2410.00037) as transformers' ``MimiModel`` has it: causal convolutions from samples to
two steps a frame, a transformer, one more convolution to frames, and a residual quantizer in two parts, semantic and
acoustic, which both start from the same vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from pega_omni_plugin.models.qwen3_tts.config import Section
from pega_omni_plugin.nn.checkpoint import Weights

_STEPS = 2
"""Steps of the transformer in a frame. Mimi's last convolution has this stride and twice this kernel."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Dimensions. ``strides`` are in the order that audio meets them; ``window`` is in steps, the current one included.

    ``quantizers`` of them are trained to be decoded, of which the first ``semantic`` are the semantic part.
    """

    sample_rate: int
    frame_samples: int
    filters: int
    strides: tuple[int, ...]
    kernel: int
    residual_kernel: int
    last_kernel: int
    residual_layers: int
    dilation_growth: int
    compress: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    window: int
    semantic: int
    quantizers: int
    codebook_size: int
    codebook_dim: int


def read_encoder_config(path: Path) -> EncoderConfig:
    """Dimensions from ``speech_tokenizer/config.json``.

    Keys left out have the defaults of the official ``Qwen3TTSTokenizerV2Config`` and transformers' ``MimiConfig``.

    Raises:
        CheckpointError: the file is missing, or a value does not fit; names it.
    """
    root = Section(path)
    section = root.section("encoder_config")
    for key, only in (
        ("use_causal_conv", True),
        ("use_conv_shortcut", False),
        ("attention_bias", False),
        ("audio_channels", 1),
        ("pad_mode", "constant"),
        ("hidden_act", "gelu"),
    ):
        if section.optional(key) not in (None, only):
            raise section.wrong(key, f"only {only!r} is supported, got {section.optional(key)!r}")
    sample_rate = root.integer("input_sample_rate", 24000)
    if section.integer("sampling_rate", 24000) != sample_rate:
        raise section.wrong("sampling_rate", f"expected input_sample_rate, {sample_rate}")
    frame_samples = root.integer("encode_downsample_rate", 1920)
    ratios = (
        (8, 6, 5, 4) if section.optional("upsampling_ratios") is None else section.integer_list("upsampling_ratios")
    )
    if _STEPS * math.prod(ratios) != frame_samples:
        raise section.wrong("upsampling_ratios", f"these and {_STEPS} do not multiply to {frame_samples}")
    hidden, heads = section.integer("hidden_size", 512), section.integer("num_attention_heads", 8)
    if section.integer("num_key_value_heads", 8) != heads:
        raise section.wrong("num_key_value_heads", f"expected num_attention_heads, {heads}")
    codebook_dim = section.integer("codebook_dim", 256)
    if section.integer("vector_quantization_hidden_dimension", 256) != codebook_dim or codebook_dim == hidden:
        raise section.wrong("codebook_dim", "expected vector_quantization_hidden_dimension, and not hidden_size")
    quantizers, semantic = (
        root.integer("encoder_valid_num_quantizers", 16),
        section.integer("num_semantic_quantizers", 1),
    )
    if not 0 < semantic < quantizers <= section.integer("num_quantizers", 32):
        raise root.wrong("encoder_valid_num_quantizers", f"{quantizers} is more than there are, or all are semantic")
    return EncoderConfig(
        sample_rate=sample_rate,
        frame_samples=frame_samples,
        filters=section.integer("num_filters", 64),
        strides=ratios[::-1],
        kernel=section.integer("kernel_size", 7),
        residual_kernel=section.integer("residual_kernel_size", 3),
        last_kernel=section.integer("last_kernel_size", 3),
        residual_layers=section.integer("num_residual_layers", 1),
        dilation_growth=section.integer("dilation_growth_rate", 2),
        compress=section.integer("compress", 2),
        hidden=hidden,
        layers=section.integer("num_hidden_layers", 8),
        heads=heads,
        head_dim=hidden // heads if section.optional("head_dim") is None else section.integer("head_dim"),
        intermediate=section.integer("intermediate_size", 2048),
        eps=section.number("norm_eps", 1e-5),
        rope_theta=section.number("rope_theta", 10000.0),
        window=section.integer("sliding_window", 250),
        semantic=semantic,
        quantizers=quantizers,
        codebook_size=section.integer("codebook_size", 2048),
        codebook_dim=codebook_dim,
    )


class CodecEncoder:
    """The first ``groups`` codes of every frame. Nothing in it changes after it is built, so any thread may call it.

    Args:
        groups: more than ``config.semantic``, at most ``config.quantizers``

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """

    def __init__(self, config: EncoderConfig, weights: Weights, groups: int) -> None:
        self._config = config
        self._convolutions = _convolutions(config, weights)
        self._layers = [_Layer(config, weights, number) for number in range(config.layers)]
        self._downsample = weights.take("encoder.downsample.conv.weight", config.hidden, config.hidden, 2 * _STEPS)
        self._semantic = _Quantizer(config, weights, "semantic", config.semantic)
        self._acoustic = _Quantizer(config, weights, "acoustic", groups - config.semantic)

    def __call__(self, pcm: torch.Tensor) -> torch.Tensor:
        """Encode ``pcm`` [samples], at least 1; gives int64 [ceil(samples / frame_samples), groups].

        A frame depends on nothing after it, so codes of a prefix of whole frames are a prefix of the codes. What a last
        frame lacks is filled up by each convolution for itself, with zeros.
        """
        x = pcm[None, None]  # [1, channels, time]
        for convolution in self._convolutions:
            x = convolution(x)
        x = x.transpose(1, 2)  # [1, steps, hidden]
        rotation = _rotation(self._config, x.shape[1])
        mask = _window_mask(x.shape[1], self._config.window)
        for layer in self._layers:
            x = layer(x, rotation, mask)
        x = x.transpose(1, 2)
        # Here, unlike elsewhere, the edges are repeated: a stride before the start, a step that an odd number lacks.
        x = F.pad(x, (_STEPS, x.shape[-1] % _STEPS), mode="replicate")
        frames = F.conv1d(x, self._downsample, stride=_STEPS)[0].T  # [frames, hidden]
        return torch.cat([self._semantic(frames), self._acoustic(frames)], dim=1)


def _convolutions(config: EncoderConfig, weights: Weights) -> list[_Conv | _Residual]:
    """The way from samples to steps. Activations have numbers of their own among the names of the weights."""
    width, place = config.filters, 1
    stack: list[_Conv | _Residual] = [_Conv(weights, "0", width, 1, config.kernel)]
    for stride in config.strides:
        for number in range(config.residual_layers):
            stack.append(_Residual(config, weights, place, width, config.dilation_growth**number))
            place += 1
        stack.append(_Conv(weights, f"{place + 1}", 2 * width, width, 2 * stride, stride=stride, activate=True))
        width, place = 2 * width, place + 2
    stack.append(_Conv(weights, f"{place + 1}", config.hidden, width, config.last_kernel, activate=True))
    return stack


class _Conv:
    """A causal convolution, of ``ELU(x)`` if it activates: [1, inputs, time] to [1, outputs, ceil(time / stride)]."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        outputs: int,
        inputs: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        activate: bool = False,
    ) -> None:
        self._weight = weights.take(f"encoder.encoder.layers.{name}.conv.weight", outputs, inputs, kernel)
        self._bias = weights.take(f"encoder.encoder.layers.{name}.conv.bias", outputs)
        self._stride, self._dilation, self._activate = stride, dilation, activate
        self._padding = (kernel - 1) * dilation + 1 - stride

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._activate:
            x = F.elu(x)
        # All of the padding belongs on the left. conv1d adds as much on the right, where a last step that is not whole
        # needs some of it; cutting the steps that are too many is cheaper than padding a copy of x.
        y = F.conv1d(x, self._weight, self._bias, self._stride, self._padding, self._dilation)
        return y[..., : -(-x.shape[-1] // self._stride)]


class _Residual:
    """Two convolutions, the first over time to fewer channels, beside a shortcut."""

    def __init__(self, config: EncoderConfig, weights: Weights, place: int, width: int, dilation: int) -> None:
        inner, kernel = width // config.compress, config.residual_kernel
        self._over_time = _Conv(weights, f"{place}.block.1", inner, width, kernel, dilation=dilation, activate=True)
        self._pointwise = _Conv(weights, f"{place}.block.3", width, inner, 1, activate=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._pointwise(self._over_time(x))


def _rotation(config: EncoderConfig, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, each [steps, head_dim]; channel i turns with i + head_dim / 2."""
    turns = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.outer(torch.arange(steps), turns).repeat(1, 2)
    return angles.cos(), angles.sin()


def _window_mask(steps: int, window: int) -> torch.Tensor:
    """Which step (row) sees which: itself and the ``window - 1`` before it. [steps, steps]

    transformers 4 leaves the window out unless it runs FlashAttention; transformers 5 and Mimi's own code keep it.
    """
    ago = torch.arange(steps)[:, None] - torch.arange(steps)
    return (ago >= 0) & (ago < window)


class _Layer:
    """Attention and a GELU network, each after a layer norm, times a scale, beside a shortcut."""

    def __init__(self, config: EncoderConfig, weights: Weights, number: int) -> None:
        hidden, inner, heads = config.hidden, config.intermediate, config.heads * config.head_dim

        def take(name: str, *shape: int) -> torch.Tensor:
            return weights.take(f"encoder.encoder_transformer.layers.{number}.{name}", *shape)

        def norm(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            return take(f"{name}.weight", hidden), take(f"{name}.bias", hidden)

        self._config = config
        self._attention_norm = norm("input_layernorm")
        self._in = torch.cat([take(f"self_attn.{name}_proj.weight", heads, hidden) for name in "qkv"])
        self._out = take("self_attn.o_proj.weight", hidden, heads)
        self._attention_scale = take("self_attn_layer_scale.scale", hidden)
        self._network_norm = norm("post_attention_layernorm")
        self._up = take("mlp.fc1.weight", inner, hidden)
        self._down = take("mlp.fc2.weight", hidden, inner)
        self._network_scale = take("mlp_layer_scale.scale", hidden)

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        config, steps = self._config, x.shape[1]
        y = F.layer_norm(x, (config.hidden,), *self._attention_norm, config.eps)
        q, k, v = F.linear(y, self._in).view(1, steps, 3, config.heads, config.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_rotate(q, *rotation), _rotate(k, *rotation), v, mask)
        y = y.transpose(1, 2).reshape(1, steps, -1)  # [1, steps, heads * head_dim]
        x = x + self._attention_scale * F.linear(y, self._out)
        y = F.layer_norm(x, (config.hidden,), *self._network_norm, config.eps)
        return x + self._network_scale * F.linear(F.gelu(F.linear(y, self._up)), self._down)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn pairs of channels of [1, heads, steps, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


class _Quantizer:
    """A residual quantizer: each codebook gives the entry nearest to what the ones before it left."""

    def __init__(self, config: EncoderConfig, weights: Weights, part: str, books: int) -> None:
        name, width = f"encoder.quantizer.{part}_residual_vector_quantizer", config.codebook_dim
        self._project = weights.take(f"{name}.input_proj.weight", width, config.hidden, 1)[..., 0]
        self._books = []
        for number in range(books):
            book = f"{name}.layers.{number}.codebook"
            usage = weights.take(f"{book}.cluster_usage", config.codebook_size)
            total = weights.take(f"{book}.embed_sum", config.codebook_size, width)
            self._books.append(total / usage.clamp(min=1e-5)[:, None])  # an entry is the mean of its cluster

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        """Codes of ``frames`` [frames, hidden]: int64 [frames, books]."""
        rest = F.linear(frames, self._project)
        codes = []
        for book in self._books:
            nearest = torch.cdist(rest, book).argmin(dim=-1)
            codes.append(nearest)
            rest = rest - book[nearest]
        return torch.stack(codes, dim=1)

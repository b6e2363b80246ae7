"""From a recording to the embedding of its speaker: log mel spectrogram and ECAPA-TDNN.

The network is that of arXiv 2005.07143 as ``Qwen3TTSSpeakerEncoder`` of the official package has it: no batch norms,
reflecting padding everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from pega_omni_plugin.models.qwen3_tts.config import Section
from pega_omni_plugin.nn.checkpoint import Weights

SAMPLE_RATE = 24000
"""In Hz. The official package's spectrogram has this and the three below fixed (``extract_speaker_embedding``)."""

FFT_SAMPLES = 1024
HOP_SAMPLES = 256
TOP_HZ = 12000.0
_EDGE_SAMPLES = (FFT_SAMPLES - HOP_SAMPLES) // 2


@dataclass(frozen=True, slots=True)
class SpeakerConfig:
    """Dimensions. ``channels``, ``kernels`` and ``dilations`` run from the first block to the aggregation."""

    embedding: int
    mels: int
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    attention: int
    squeeze: int
    parts: int


def read_speaker_config(section: Section) -> SpeakerConfig:
    """Dimensions from ``speaker_encoder_config``; keys left out have ``Qwen3TTSSpeakerEncoderConfig``'s defaults.

    Raises:
        CheckpointError: a value does not fit; names it.
    """
    if section.integer("sample_rate", SAMPLE_RATE) != SAMPLE_RATE:
        raise section.wrong("sample_rate", f"only {SAMPLE_RATE} Hz is supported")

    def per_block(key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return default if section.optional(key) is None else section.integer_list(key)

    config = SpeakerConfig(
        embedding=section.integer("enc_dim", 1024),
        mels=section.integer("mel_dim", 128),
        channels=per_block("enc_channels", (512, 512, 512, 512, 1536)),
        kernels=per_block("enc_kernel_sizes", (5, 3, 3, 3, 1)),
        dilations=per_block("enc_dilations", (1, 2, 3, 4, 1)),
        attention=section.integer("enc_attention_channels", 128),
        squeeze=section.integer("enc_se_channels", 128),
        parts=section.integer("enc_res2net_scale", 8),
    )
    if not len(config.channels) == len(config.kernels) == len(config.dilations) >= 3:
        raise section.wrong("enc_channels", "expected at least 3, and as many enc_kernel_sizes and enc_dilations")
    first, *middle, last = config.channels
    if any(width != first or width % config.parts for width in middle):
        raise section.wrong("enc_channels", f"all but the last must be equal and divisible by {config.parts}")
    if sum(middle) != last:
        raise section.wrong("enc_channels", f"the last must be the sum of the blocks' widths, {sum(middle)}")
    return config


def mel_filters(mels: int) -> torch.Tensor:
    """Triangles of equal area, evenly spaced on Slaney's mel scale between 0 Hz and ``TOP_HZ``.

    They are librosa's default filters (Auditory Toolbox, Slaney 1998): the scale is linear up to 1000 Hz, which is
    15 mel, and logarithmic above, with 27 mel for a factor of 6.4.

    Returns:
        [mels, FFT_SAMPLES // 2 + 1], float32
    """
    per_e = 27 / np.log(6.4)
    steps = np.linspace(0, 15 + per_e * np.log(TOP_HZ / 1000), mels + 2)
    corners = np.where(steps < 15, steps * 1000 / 15, 1000 * np.exp((steps - 15) / per_e))[:, None]  # [mels + 2, 1], Hz
    bins = np.linspace(0, SAMPLE_RATE / 2, FFT_SAMPLES // 2 + 1)
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    slopes = np.minimum((bins - low) / (peak - low), (high - bins) / (high - peak))
    return torch.from_numpy((2 / (high - low) * slopes.clip(0)).astype(np.float32))


def log_mel(pcm: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of magnitudes in mel bands, one column per ``HOP_SAMPLES`` whole samples.

    The constants under root and logarithm are those of the official ``mel_spectrogram``.

    Args:
        pcm: [samples] at ``SAMPLE_RATE``, at least ``2 * HOP_SAMPLES`` of them
        filters: from ``mel_filters``

    Returns:
        [mels, samples // HOP_SAMPLES]
    """
    edged = F.pad(pcm[None], (_EDGE_SAMPLES, _EDGE_SAMPLES), mode="reflect")[0]
    window = torch.hann_window(FFT_SAMPLES)
    spectrum = torch.stft(edged, FFT_SAMPLES, HOP_SAMPLES, window=window, center=False, return_complex=True)
    magnitude = torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-9)  # [bins, frames]
    return torch.log((filters @ magnitude).clamp(min=1e-5))


class SpeakerEncoder:
    """The speaker's embedding. Nothing in it changes after it is built, so any thread may call it.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """

    def __init__(self, config: SpeakerConfig, weights: Weights) -> None:
        first, *middle, last = config.channels
        kernel, *kernels, last_kernel = config.kernels
        dilation, *dilations, last_dilation = config.dilations
        self._filters = mel_filters(config.mels)
        self._first = _Conv(weights, "blocks.0.conv", first, config.mels, kernel, dilation)
        self._blocks = [
            _Block(weights, f"blocks.{number}", width, config, *shape)
            for number, (width, *shape) in enumerate(zip(middle, kernels, dilations, strict=True), start=1)
        ]
        self._aggregate = _Conv(weights, "mfa.conv", last, last, last_kernel, last_dilation)
        self._attention = _Conv(weights, "asp.tdnn.conv", config.attention, 3 * last)
        self._score = _Conv(weights, "asp.conv", last, config.attention)
        self._embed = _Conv(weights, "fc", config.embedding, 2 * last)
        # Padding that reflects needs one frame more than it adds on a side.
        spans = [(size - 1) * step for size, step in zip(config.kernels, config.dilations, strict=True)]
        self.min_samples = HOP_SAMPLES * max(2, 1 + max(span - span // 2 for span in spans))

    def __call__(self, pcm: torch.Tensor) -> torch.Tensor:
        """Embed ``pcm`` [samples], at least ``min_samples`` of them at ``SAMPLE_RATE``; gives [embedding]."""
        x = F.relu(self._first(log_mel(pcm, self._filters)[None]))  # [1, channels, frames], as is every x here
        outputs = []
        for block in self._blocks:
            x = block(x)
            outputs.append(x)
        x = F.relu(self._aggregate(torch.cat(outputs, dim=1)))

        frames = x.shape[-1]
        even = [moment.expand(-1, -1, frames) for moment in _moments(x, torch.full_like(x, 1 / frames))]
        scores = self._score(torch.tanh(F.relu(self._attention(torch.cat([x, *even], dim=1)))))
        pooled = torch.cat(_moments(x, scores.softmax(dim=-1)), dim=1)  # [1, 2 * channels, 1]
        return self._embed(pooled)[0, :, 0]


def _moments(x: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation over time, each [1, channels, 1]; ``shares`` add up to 1."""
    mean = (shares * x).sum(dim=-1, keepdim=True)
    variance = (shares * (x - mean).square()).sum(dim=-1, keepdim=True)
    return mean, variance.clamp(min=1e-12).sqrt()


class _Conv:
    """A convolution that keeps the number of frames, the edges reflected."""

    def __init__(
        self, weights: Weights, name: str, outputs: int, inputs: int, kernel: int = 1, dilation: int = 1
    ) -> None:
        self._weight = weights.take(f"speaker_encoder.{name}.weight", outputs, inputs, kernel)
        self._bias = weights.take(f"speaker_encoder.{name}.bias", outputs)
        self._dilation = dilation
        span = (kernel - 1) * dilation
        self._edges = (span // 2, span - span // 2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.pad(x, self._edges, mode="reflect"), self._weight, self._bias, dilation=self._dilation)


class _Block:
    """Res2Net between two pointwise layers, then a gain per channel from the mean over time, all beside a shortcut."""

    def __init__(
        self, weights: Weights, name: str, width: int, config: SpeakerConfig, kernel: int, dilation: int
    ) -> None:
        part = width // config.parts
        self._enter = _Conv(weights, f"{name}.tdnn1.conv", width, width)
        self._parts = [
            _Conv(weights, f"{name}.res2net_block.blocks.{number}.conv", part, part, kernel, dilation)
            for number in range(config.parts - 1)
        ]
        self._leave = _Conv(weights, f"{name}.tdnn2.conv", width, width)
        self._squeeze = _Conv(weights, f"{name}.se_block.conv1", config.squeeze, width)
        self._gain = _Conv(weights, f"{name}.se_block.conv2", width, config.squeeze)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        untouched, *rest = F.relu(self._enter(x)).chunk(len(self._parts) + 1, dim=1)
        done = [untouched]
        for number, (conv, part) in enumerate(zip(self._parts, rest, strict=True)):
            done.append(F.relu(conv(part + done[-1] if number else part)))
        y = F.relu(self._leave(torch.cat(done, dim=1)))
        gain = torch.sigmoid(self._gain(F.relu(self._squeeze(y.mean(dim=-1, keepdim=True)))))
        return x + y * gain

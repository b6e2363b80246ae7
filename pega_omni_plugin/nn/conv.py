"""Causal convolutions that stream: each call gets new steps only, and what came before is kept per slot.

Tensors are ``[rows, channels, steps]``; a row is one stream, whose state lies in a *slot*. A convolution asks
``Histories`` for room when it is built. In a call, ``Histories.read`` gathers the past of the rows' slots, each
convolution joins it to its input with ``Pasts.join``, and ``Histories.write`` puts the new past back. However a stream
is cut into calls, the results are those of one convolution with zeros on its left.

*Offsets.* Adding a constant to each channel costs a pass over memory. A layer may leave it out and say so in
``offset``: what it returns plus ``offset`` is what it means. The next convolution counts it into its bias, and its
padding, zero as meant, is ``-offset`` as given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class Histories:
    """The last steps of every convolution's input, for slots 0 to ``slots``.

    Inputs of which the same number of steps is kept share one tensor ``[slots + 1, channels, steps]``, so that reading
    and writing are a few operations however many convolutions there are.
    """

    def __init__(self, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = slots
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.dtype = dtype
        self._banks: list[_Bank] = []
        self._places = 0

    def reserve(self, channels: int, steps: int, padding: Tensor | None = None) -> int:
        """Keep ``steps`` steps of an input; returns its place. ``padding`` ``[channels]`` (zeros) is a fresh past."""
        bank = next((bank for bank in self._banks if bank.steps == steps), None)
        if bank is None:
            empty = self._like.new_empty(self._slots + 1, 0, steps)
            bank = _Bank(steps, [], [], empty, empty[0])
            self._banks.append(bank)
        fresh = self._like.new_zeros(channels, steps)
        if padding is not None:
            fresh += padding.to(fresh)[:, None]
        bank.places.append(self._places)
        bank.channels.append(channels)
        bank.fresh = torch.cat((bank.fresh, fresh))
        bank.state = bank.fresh.repeat(self._slots + 1, 1, 1)
        self._places += 1
        return self._places - 1

    def reset(self, slots: Tensor) -> None:
        """Make the past of ``slots`` ``[rows]`` that of a stream's start."""
        for bank in self._banks:
            bank.state.index_copy_(0, slots, bank.fresh.expand(len(slots), -1, -1))

    def read(self, slots: Tensor) -> Pasts:
        """The past of ``slots`` ``[rows]``."""
        pasts: list[Tensor] = [self._like] * self._places
        for bank in self._banks:
            gathered = bank.state.index_select(0, slots).split_with_sizes(bank.channels, 1)
            for place, past in zip(bank.places, gathered, strict=True):
                pasts[place] = past
        return Pasts(pasts)

    def write(self, slots: Tensor, pasts: Pasts) -> None:
        """Keep what the joins of one call left as the past of ``slots``; each place was joined once."""
        for bank in self._banks:
            bank.state.index_copy_(0, slots, torch.cat([pasts.steps[place] for place in bank.places], 1))


@dataclass(slots=True)
class _Bank:
    steps: int
    places: list[int]
    channels: list[int]
    state: Tensor  # [slots + 1, all channels, steps]
    fresh: Tensor  # [all channels, steps]


@dataclass(slots=True)
class Pasts:
    """The past of some rows by place, ``[rows, channels, steps]`` each; the new one after ``join``."""

    steps: list[Tensor]

    def join(self, place: int, x: Tensor) -> Tensor:
        """``x`` with its past on the left: ``[rows, channels, kept + steps]``, contiguous."""
        past = self.steps[place]
        joined = torch.cat((past, x), 2)
        rows, channels, kept = past.shape
        length = joined.shape[2]
        self.steps[place] = joined.as_strided((rows, channels, kept), (channels * length, length, 1), length - kept)
        return joined


class CausalConv:
    """A convolution of stride 1, ``[rows, in, steps]`` to ``[rows, out, steps]``; its past is of span - 1 steps.

    Args:
        weight: ``[out, in, kernel]``, as ``torch.nn.Conv1d`` has it.
        bias: ``[out]``.
        offset: ``[in]``, of the input (see the module).
    """

    def __init__(
        self, histories: Histories, weight: Tensor, bias: Tensor, *, dilation: int = 1, offset: Tensor | None = None
    ) -> None:
        outputs, inputs, self._kernel = weight.shape
        self._dilation = dilation
        if offset is not None:
            bias = bias + weight.sum(2) @ offset
        dtype = histories.dtype
        self._weight = weight.to(dtype).contiguous()
        self._flat = self._weight.view(1, outputs, inputs * self._kernel)
        self._bias = bias.to(dtype)
        self._column = self._bias[None, :, None]
        padding = None if offset is None else -offset
        self._place = histories.reserve(inputs, (self._kernel - 1) * dilation, padding)

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        joined = pasts.join(self._place, x)
        if x.is_cuda:
            return F.conv1d(joined, self._weight, self._bias, dilation=self._dilation)
        # On CPU one product over explicit windows takes a third of the time of conv1d.
        rows, inputs, length = joined.shape
        kernel, steps = self._kernel, x.shape[2]
        windows = joined.as_strided(
            (rows, inputs, kernel, steps), (inputs * length, length, self._dilation, 1)
        ).reshape(rows, inputs * kernel, steps)
        return torch.baddbmm(self._column, self._flat.expand(rows, -1, -1), windows)


class CausalUpsampling:
    """A transposed convolution of kernel 2 * stride, ``[rows, in, steps]`` to ``[rows, out, steps * stride]``.

    Trimmed by one stride on the right, it is causal: the outputs from ``t * stride`` to ``(t + 1) * stride - 1`` depend
    on the inputs ``t`` and ``t - 1``. So it is a convolution of kernel 2 with ``stride`` times the channels, which are
    then laid out in time; its past is one step.

    Args:
        weight: ``[in, out, 2 * stride]``, as ``torch.nn.ConvTranspose1d`` has it.
        bias: ``[out]``.
        offset: ``[in]``, of the input (see the module).
    """

    def __init__(self, histories: Histories, weight: Tensor, bias: Tensor, *, offset: Tensor | None = None) -> None:
        inputs, self._outputs, kernel = weight.shape
        self._stride = kernel // 2
        # The first half of the kernel belongs to the step itself, the second to the one before: [in, out, age, stride].
        by_age = weight.view(inputs, self._outputs, 2, self._stride).flip(2)
        # [out, stride, in, age]
        taps = by_age.permute(1, 3, 0, 2).reshape(self._outputs * self._stride, inputs, 2)
        self._conv = CausalConv(histories, taps, bias.repeat_interleave(self._stride), offset=offset)

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        y = self._conv(x, pasts)
        rows, _, steps = y.shape
        by_step = y.view(rows, self._outputs, self._stride, steps).transpose(2, 3)
        return by_step.reshape(rows, self._outputs, steps * self._stride)


class SnakeBeta:
    """``x + sin²(e^alpha x) / (e^beta + 1e-9)`` per channel (arXiv 2006.08195; a magnitude of its own as in BigVGAN).

    Computed as ``x - h cos(f x) + h`` with ``f = 2 e^alpha`` and ``h = 1 / (2 (e^beta + 1e-9))``; the last ``h`` is
    left to ``offset``. In a dtype narrower than the parameters' it is added, since rounding beside a large ``h`` would
    take the small values.

    Args:
        alpha, beta: ``[channels]``, in the dtype of the inside: float32, or float64.
        dtype: of input and result.
        offset: ``[channels]``, of the input (see the module).
        scaled: input and result are ``factor`` (``f``, ``[channels]``) times what they mean, which the products before
            and after can have in their weights.
    """

    def __init__(
        self, alpha: Tensor, beta: Tensor, dtype: torch.dtype, *, offset: Tensor | None = None, scaled: bool = False
    ) -> None:
        half = 0.5 / (beta.exp() + 1e-9)
        self.factor = 2 * alpha.exp()
        self._dtype = dtype
        self._frequency = None if scaled else self.factor[:, None]
        self._phase = None if offset is None else (self.factor * offset)[:, None]
        if scaled:
            half = half * self.factor
        self._magnitude = -half[:, None]
        lift = half if offset is None else half + offset
        exact = dtype == alpha.dtype
        self._lift = None if exact else lift[:, None]
        self.offset = lift if exact else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._frequency is None:
            wave = torch.cos(x.to(self._magnitude.dtype))
        else:
            wave = x * self._frequency
            if self._phase is not None:
                wave += self._phase
            wave = wave.cos_()
        y = torch.addcmul(x, wave, self._magnitude)
        return y if self._lift is None else y.add_(self._lift).to(self._dtype)

"""Causal convolutions that stream: each call gets new steps only, and what came before is kept per slot.

A row is one stream, whose state lies in a *slot*. A convolution asks ``Histories`` for room when it is built. In a
call, ``Histories.read`` gathers the past of the rows' slots, each convolution joins it to its input, and
``Histories.write`` puts the new past back. However a stream is cut into calls, the results are those of one convolution
with zeros on its left.

Tensors are ``[rows, channels, steps]``, which suits many steps of few channels. Where there are many channels and a few
steps a call, ``[rows, steps, channels]`` makes larger products: the classes whose names end in ``Last``.

*Offsets.* Adding a constant to each channel costs a pass over memory. A layer may leave it out and say so in
``offset``: what it returns plus ``offset`` is what it means. The next convolution counts it into its bias, and its
padding, zero as meant, is ``-offset`` as given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_KEPT = 6
"""Steps kept of an input that needs fewer, so that short pasts share a tensor with those of kernel 7."""


class Histories:
    """The last steps of every convolution's input, for slots 0 to ``slots``.

    Inputs of which as many steps are kept share one tensor ``[slots + 1, channels, steps]``, so that reading and
    writing are a few operations however many convolutions there are.
    """

    def __init__(self, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = slots
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.dtype = dtype
        self._banks: list[_Bank] = []
        self._places = 0

    def reserve(self, channels: int, steps: int, padding: Tensor | None = None) -> tuple[int, int]:
        """Keep at least ``steps`` steps of an input; returns its place and how many are kept.

        ``padding`` ``[channels]`` is what a fresh past is full of, zeros if None.
        """
        steps = max(steps, _LEAST_KEPT)
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
        return self._places - 1, steps

    @property
    def states(self) -> list[Tensor]:
        """All that is kept, ``[slots + 1, …]`` each."""
        return [bank.state for bank in self._banks]

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

    def join_last(self, place: int, x: Tensor) -> Tensor:
        """``join`` for ``x`` ``[rows, steps, channels]``: ``[rows, kept + steps, channels]``."""
        past = self.steps[place]
        joined = torch.cat((past.transpose(1, 2), x), 1)
        rows, channels, kept = past.shape
        length = joined.shape[1]
        self.steps[place] = joined.as_strided(
            (rows, channels, kept), (channels * length, 1, channels), (length - kept) * channels
        )
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
        needed = (self._kernel - 1) * dilation
        self._place, kept = histories.reserve(inputs, needed, padding)
        self._skip = kept - needed

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        joined = pasts.join(self._place, x)
        if x.is_cuda:
            return F.conv1d(joined[:, :, self._skip :], self._weight, self._bias, dilation=self._dilation)
        # On CPU one product over explicit windows takes a third of the time of conv1d.
        rows, inputs, length = joined.shape
        kernel, steps = self._kernel, x.shape[2]
        windows = joined.as_strided(
            (rows, inputs, kernel, steps), (inputs * length, length, self._dilation, 1), self._skip
        ).reshape(rows, inputs * kernel, steps)
        weight = self._flat if rows == 1 else self._flat.expand(rows, -1, -1)
        return torch.baddbmm(self._column, weight, windows)


class CausalConvLast:
    """``CausalConv`` without dilation for ``[rows, steps, in]``."""

    def __init__(self, histories: Histories, weight: Tensor, bias: Tensor, *, offset: Tensor | None = None) -> None:
        self._outputs, inputs, kernel = weight.shape
        if offset is not None:
            bias = bias + weight.sum(2) @ offset
        self._width = kernel * inputs
        self._weight = weight.permute(2, 1, 0).reshape(self._width, self._outputs).to(histories.dtype)
        self._bias = bias.to(histories.dtype)
        self._place, kept = histories.reserve(inputs, kernel - 1, None if offset is None else -offset)
        self._skip = (kept - kernel + 1) * inputs

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        joined = pasts.join_last(self._place, x)
        rows, steps, inputs = x.shape
        windows = joined.as_strided((rows, steps, self._width), (joined.stride(0), inputs, 1), self._skip)
        y = torch.addmm(self._bias, windows.reshape(rows * steps, self._width), self._weight)
        return y.view(rows, steps, self._outputs)


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
        taps = _by_age(weight).permute(1, 3, 0, 2).reshape(self._outputs * self._stride, inputs, 2)
        self._conv = CausalConv(histories, taps, bias.repeat_interleave(self._stride), offset=offset)

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        y = self._conv(x, pasts)
        rows, _, steps = y.shape
        by_step = y.view(rows, self._outputs, self._stride, steps).transpose(2, 3)
        return by_step.reshape(rows, self._outputs, steps * self._stride)


class CausalUpsamplingLast:
    """``CausalUpsampling`` for ``[rows, steps, in]``."""

    def __init__(self, histories: Histories, weight: Tensor, bias: Tensor, *, offset: Tensor | None = None) -> None:
        inputs, self._outputs, kernel = weight.shape
        taps = _by_age(weight).permute(3, 1, 0, 2).reshape(-1, inputs, 2)
        self._conv = CausalConvLast(histories, taps, bias.repeat(kernel // 2), offset=offset)

    def __call__(self, x: Tensor, pasts: Pasts) -> Tensor:
        return self._conv(x, pasts).view(x.shape[0], -1, self._outputs)


def _by_age(weight: Tensor) -> Tensor:
    """A transposed convolution's weight as ``[in, out, tap, stride]``, the older step's tap first.

    The first half of its kernel belongs to the step itself, the second to the step before.
    """
    inputs, outputs, kernel = weight.shape
    return weight.view(inputs, outputs, 2, kernel // 2).flip(2)


class SnakeBeta:
    """``x + sin²(e^alpha x) / (e^beta + 1e-9)`` per channel (arXiv 2006.08195; a magnitude of its own as in BigVGAN).

    Computed as ``x - h cos(f x) + h`` with ``f = 2 e^alpha`` and ``h = 1 / (2 (e^beta + 1e-9))``; the last ``h`` is
    left to ``offset``. In a dtype narrower than the parameters' it is added, since rounding beside a large ``h`` would
    take the small values.

    Args:
        alpha, beta: ``[channels]``, in the dtype of the inside: float32, or float64.
        dtype: of input and result.
        offset: ``[channels]``, of the input (see the module).
        last: channels are the last dimension, not the last but one.
        scaled: input and result are ``factor`` (``f``, ``[channels]``) times what they mean, which the products before
            and after can have in their weights.
    """

    def __init__(
        self,
        alpha: Tensor,
        beta: Tensor,
        dtype: torch.dtype,
        *,
        offset: Tensor | None = None,
        last: bool = False,
        scaled: bool = False,
    ) -> None:
        def placed(values: Tensor) -> Tensor:
            return values if last else values[:, None]

        exact = dtype == alpha.dtype
        half = 0.5 / (beta.exp() + 1e-9)
        self.factor = 2 * alpha.exp()
        self._dtype = dtype
        self._inside = None if exact else alpha.dtype
        self._frequency = None if scaled else placed(self.factor)
        self._phase = None if offset is None else placed(self.factor * offset)
        if scaled:
            half = half * self.factor
        self._magnitude = -placed(half)
        lift = half if offset is None else half + offset
        self._lift = None if exact else placed(lift)
        self.offset = lift if exact else None

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and self._magnitude.dtype == torch.float32:
            return self.fused(x)
        if self._frequency is None:
            wave = torch.cos(x if self._inside is None else x.to(self._inside))
        elif self._phase is None:
            wave = (x * self._frequency).cos_()
        else:  # two operations that are vectorised take less time than one that is not
            wave = (x * self._frequency).add_(self._phase).cos_()
        y = torch.addcmul(x, wave, self._magnitude)
        return y if self._lift is None else y.add_(self._lift).to(self._dtype)

    def fused(self, x: Tensor) -> Tensor:
        """The call as one kernel, for CUDA and parameters in float32; ``x`` is contiguous."""
        from pega_omni_plugin.nn.snake_triton import snake

        return snake(x, self._magnitude, self._frequency, self._phase, self._lift)

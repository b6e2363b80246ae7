"""Streamed convolutions give what one convolution over everything gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pega_omni_plugin.nn.conv import (
    CausalConv,
    CausalConvLast,
    CausalUpsampling,
    CausalUpsamplingLast,
    Histories,
    SnakeBeta,
)

INPUTS, OUTPUTS = 3, 5
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
TIGHT = {"rtol": 0, "atol": 1e-12}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def histories(slots: int = 2) -> Histories:
    return Histories(slots, torch.float64, torch.device("cpu"))


Layer = CausalConv | CausalConvLast | CausalUpsampling | CausalUpsamplingLast


def stream(layer: Layer, past: Histories, x: Tensor, cuts: list[int], slots: Tensor) -> Tensor:
    """``[rows, in, steps]`` through ``layer`` in pieces, as ``[rows, out, steps]``."""
    last = isinstance(layer, (CausalConvLast, CausalUpsamplingLast))
    pieces = []
    for piece in x.split(cuts, 2):
        pasts = past.read(slots)
        y = layer(piece.transpose(1, 2) if last else piece, pasts)
        pieces.append(y.transpose(1, 2) if last else y)
        past.write(slots, pasts)
    return torch.cat(pieces, 2)


@given(cuts=CUTS, dilation=st.sampled_from([1, 3, 9]), kernel=st.sampled_from([1, 2, 7]), last=st.booleans())
@settings(deadline=None, max_examples=40)
def test_any_cut_gives_the_convolution_padded_on_the_left(
    cuts: list[int], dilation: int, kernel: int, last: bool
) -> None:
    weight, bias, x = draw(OUTPUTS, INPUTS, kernel), draw(OUTPUTS, seed=1), draw(2, INPUTS, sum(cuts), seed=2)
    past = histories()
    dilation = 1 if last else dilation
    layer = CausalConvLast(past, weight, bias) if last else CausalConv(past, weight, bias, dilation=dilation)

    streamed = stream(layer, past, x, cuts, torch.tensor([2, 1]))

    whole = F.conv1d(F.pad(x, (dilation * (kernel - 1), 0)), weight, bias, dilation=dilation)
    torch.testing.assert_close(streamed, whole, **TIGHT)


@given(cuts=CUTS, stride=st.integers(1, 5), last=st.booleans())
@settings(deadline=None, max_examples=30)
def test_any_cut_gives_the_transposed_convolution_trimmed_on_the_right(
    cuts: list[int], stride: int, last: bool
) -> None:
    weight, bias = draw(INPUTS, OUTPUTS, 2 * stride), draw(OUTPUTS, seed=1)
    x = draw(2, INPUTS, sum(cuts), seed=2)
    past = histories()
    layer = (CausalUpsamplingLast if last else CausalUpsampling)(past, weight, bias)

    streamed = stream(layer, past, x, cuts, torch.tensor([1, 2]))

    whole = F.conv_transpose1d(x, weight, bias, stride=stride)[:, :, :-stride]
    torch.testing.assert_close(streamed, whole, **TIGHT)


@pytest.mark.parametrize("kind", [CausalConv, CausalConvLast, CausalUpsampling, CausalUpsamplingLast])
def test_an_offset_means_an_input_that_much_larger_except_in_the_padding(kind: type[Layer]) -> None:
    offset, x = draw(INPUTS, seed=3), draw(1, INPUTS, 7, seed=2)
    weight = draw(OUTPUTS, INPUTS, 7) if kind in (CausalConv, CausalConvLast) else draw(INPUTS, OUTPUTS, 6)

    def run(offset: Tensor | None, x: Tensor) -> Tensor:
        past = histories()
        layer = kind(past, weight, draw(OUTPUTS, seed=1), offset=offset)
        return stream(layer, past, x, [3, 4], torch.tensor([1]))

    torch.testing.assert_close(run(offset, x), run(None, x + offset[:, None]), **TIGHT)


def test_a_slot_reset_starts_anew_and_no_other_does() -> None:
    past = histories()
    layers = [
        CausalConv(past, draw(OUTPUTS, INPUTS, kernel), draw(OUTPUTS, seed=1), offset=draw(INPUTS, seed=4))
        for kernel in (7, 7, 3)
    ]
    x, both = draw(2, INPUTS, 4, seed=2), torch.tensor([1, 2])

    def step() -> list[Tensor]:
        pasts = past.read(both)
        y = [layer(x, pasts) for layer in layers]
        past.write(both, pasts)
        return y

    first, second = step(), step()
    past.reset(both)
    step()
    past.reset(torch.tensor([2]))
    for fresh, warm, y in zip(first, second, step(), strict=True):
        torch.testing.assert_close(y[0], warm[0], **TIGHT)
        torch.testing.assert_close(y[1], fresh[1], **TIGHT)
        assert not torch.allclose(warm, fresh)


def test_a_call_that_is_never_written_changes_nothing() -> None:
    past = histories()
    layer = CausalConv(past, draw(OUTPUTS, INPUTS, 7), draw(OUTPUTS, seed=1))
    slots, x = torch.tensor([1]), draw(1, INPUTS, 4, seed=2)

    first = layer(x, past.read(slots))

    torch.testing.assert_close(layer(x, past.read(slots)), first, **TIGHT)


def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    a, b = alpha.exp()[:, None], beta.exp()[:, None]
    return x + torch.sin(a * x) ** 2 / (b + 1e-9)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_snake_and_its_offset_make_the_function(scaled: bool, shifted: bool, last: bool) -> None:
    alpha, beta, x = draw(INPUTS), draw(INPUTS, seed=1), draw(2, INPUTS, 9, seed=2)
    offset = draw(INPUTS, seed=3) if shifted and not scaled else None
    layer = SnakeBeta(alpha, beta, torch.float64, offset=offset, last=last, scaled=scaled)
    factor = layer.factor[:, None] if scaled else 1

    assert layer.offset is not None
    given = x * factor
    y = layer(given.transpose(1, 2)).transpose(1, 2) if last else layer(given)
    y = (y + layer.offset[:, None]) / factor

    torch.testing.assert_close(y, snake(x if offset is None else x + offset[:, None], alpha, beta), **TIGHT)


@pytest.mark.parametrize("scaled", [False, True])
def test_snake_in_bfloat16_has_no_offset_and_keeps_small_values(scaled: bool) -> None:
    alpha, beta = torch.tensor([0.0, 0.5]), torch.tensor([-6.0, 0.5])
    layer = SnakeBeta(alpha, beta, torch.bfloat16, scaled=scaled)
    factor = layer.factor[:, None] if scaled else torch.ones(1)
    x = (torch.linspace(-0.05, 3, 200).repeat(1, 2, 1) * factor).bfloat16()

    y = layer(x)

    assert y.dtype == torch.bfloat16
    assert layer.offset is None
    expected = snake(x.float() / factor, alpha, beta) * factor
    torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=1e-4)

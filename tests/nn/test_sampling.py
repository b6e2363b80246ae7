"""Draws: what Hugging Face's processors keep, with the right frequencies, alike in NumPy and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pega_omni_plugin.nn.sampling import RowSettings, Uniforms, draw, draw_numpy, penalise, penalise_numpy

Floats = np.ndarray
Draw = Callable[..., np.ndarray]


def by_numpy(logits: Floats, uniforms: Floats, temperature: Floats, top_k: Floats, top_p: Floats) -> np.ndarray:
    return draw_numpy(logits, uniforms, RowSettings(temperature, top_k, top_p))


def by_torch(logits: Floats, uniforms: Floats, temperature: Floats, top_k: Floats, top_p: Floats) -> np.ndarray:
    """With the least work that serves these rows, as a step would choose it."""
    most_k = logits.shape[1] if (top_k <= 0).any() else min(int(top_k.max()), logits.shape[1])
    arrays = (torch.from_numpy(array) for array in (logits, uniforms, temperature, top_k, top_p))
    return draw(*arrays, most_k=most_k, nucleus=bool((top_p < 1).any())).numpy()


BOTH = pytest.mark.parametrize("drawn", [by_numpy, by_torch])


def rows(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> dict[str, np.ndarray]:
    """The same settings for so many rows."""
    return {
        "temperature": np.full(count, temperature, np.float32),
        "top_k": np.full(count, top_k, np.int64),
        "top_p": np.full(count, top_p, np.float32),
    }


def numbers(seed: int, count: int) -> np.ndarray:
    return Uniforms(seed, 4).frames(0, -(-count // 4)).ravel()[:count]


# --- Which codes may come ---


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of any settings; logits with ties, some of them impossible."""
    count, vocabulary = draw(st.integers(1, 6)), draw(st.sampled_from([5, 50, 60, 300]))
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    logits = generator.normal(0, draw(st.sampled_from([0.5, 3.0])), (count, vocabulary)).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits * 4) / 4  # many ties
    if draw(st.booleans()):
        logits[:, vocabulary - 1] = -np.inf

    def column(values: list[float], kind: type) -> np.ndarray:
        one = draw(st.booleans())
        chosen = [draw(st.sampled_from(values)) for _ in range(1 if one else count)]
        return np.array(chosen * (count if one else 1), kind)

    return {
        "logits": logits,
        "uniforms": generator.random(count, np.float32),
        "temperature": column([0.0, 0.3, 0.9, 2.0], np.float32),
        "top_k": column([0, 1, 3, 50, 5000], np.int64),
        "top_p": column([1.0, 0.95, 0.5, 0.0], np.float32),
    }


def probabilities(logits: Floats, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """What Hugging Face's processors leave of one row, in their order; in float64, so that edges can be told."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    scores = torch.from_numpy(logits).double()[None]
    return processors(torch.zeros((1, 0), dtype=torch.int64), scores)[0].softmax(0).numpy()


@BOTH
@settings(max_examples=80, deadline=None)
@given(batches())
def test_the_code_is_where_hugging_faces_probabilities_pass_the_number(drawn: Draw, batch: dict[str, Any]) -> None:
    codes = drawn(**batch)
    assert codes.dtype == np.int64
    for row, code in enumerate(codes.tolist()):
        logits, number = batch["logits"][row], float(batch["uniforms"][row])
        temperature, top_k, top_p = (batch[name][row].item() for name in ("temperature", "top_k", "top_p"))
        if temperature == 0:
            assert code == logits.argmax()
            continue
        # What is kept may change within rounding of top_p, where codes are equally likely above all.
        options = {round(p, 9): probabilities(logits, temperature, top_k, p) for p in _around(top_p)}
        ties_cut = len({int((found > 0).sum()) for found in options.values()}) > 1
        if ties_cut or _cuts_a_tie(logits, options[round(top_p, 9)]):
            assert any(found[code] > 0 or _as_likely(logits, found, code) for found in options.values())
            continue
        total = np.cumsum(options[round(top_p, 9)])
        below = total[code - 1] if code else 0.0
        assert below - 1e-5 <= number <= total[code] + 1e-5
        assert options[round(top_p, 9)][code] > 0


def _around(top_p: float) -> list[float]:
    return [top_p] if top_p in (0.0, 1.0) else [top_p - 1e-5, top_p, top_p + 1e-5]


def _cuts_a_tie(logits: Floats, kept: np.ndarray) -> bool:
    """Whether a code is left out that is as likely as one that is kept: which one, sorting decides."""
    return bool(np.isin(logits[kept == 0], logits[kept > 0]).any())


def _as_likely(logits: Floats, kept: np.ndarray, code: int) -> bool:
    return bool((logits[kept > 0] == logits[code]).any())


@BOTH
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (20, 0.8), (0, 0.6), (1, 1.0), (5000, 1.0)])
def test_what_is_kept_and_how_often_it_comes_is_hugging_faces(drawn: Draw, top_k: int, top_p: float) -> None:
    """Numbers on a fine grid measure every code's share."""
    logits = np.random.default_rng(1).normal(0, 2, 200).astype(np.float32)
    grid = 20_000
    uniforms = ((np.arange(grid) + 0.5) / grid).astype(np.float32)
    codes = drawn(np.tile(logits, (grid, 1)), uniforms, **rows(grid, 0.7, top_k, top_p))
    shares = np.bincount(codes, minlength=200) / grid
    wanted = probabilities(logits, 0.7, top_k, top_p)
    np.testing.assert_allclose(shares, wanted, rtol=0, atol=1.1 / grid)
    assert not shares[wanted == 0].any()


@BOTH
def test_draws_have_the_frequencies_of_the_softmax(drawn: Draw) -> None:
    logits = np.random.default_rng(2).normal(0, 1, 40).astype(np.float32)
    count = 100_000
    codes = drawn(np.broadcast_to(logits, (count, 40)).copy(), numbers(7, count), **rows(count, 0.9))
    expected = np.exp(logits / 0.9) / np.exp(logits / 0.9).sum() * count
    assert expected.min() > 100
    chi_square = ((np.bincount(codes, minlength=40) - expected) ** 2 / expected).sum()
    assert _survival(chi_square, 39) > 1e-3
    skewed = np.roll(expected, 1)
    assert _survival(((np.bincount(codes, minlength=40) - skewed) ** 2 / skewed).sum(), 39) < 1e-3


def _survival(chi_square: float, freedom: int) -> float:
    """The upper tail of the chi-square distribution: the regularised upper incomplete gamma function."""
    halves = (torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, chi_square))
    return float(torch.special.gammaincc(*halves))


@BOTH
def test_codes_as_likely_as_the_last_that_is_kept_are_kept(drawn: Draw) -> None:
    logits = np.array([[3.0, 1.0, 2.0, 1.0, 1.0, 0.0]] * 1000, np.float32)
    codes = drawn(logits, numbers(0, 1000), **rows(1000, 1.0, 3))
    assert set(codes.tolist()) == {0, 1, 2, 3, 4}
    kept = TopKLogitsWarper(3)(None, torch.from_numpy(logits[:1]))
    assert set(kept[0].isfinite().nonzero()[:, 0].tolist()) == {0, 1, 2, 3, 4}


@BOTH
def test_ties_in_one_row_change_no_other_row(drawn: Draw) -> None:
    logits = np.random.default_rng(3).normal(0, 1, (2, 30)).astype(np.float32)
    tied = np.stack((np.zeros(30, np.float32), logits[1]))
    for number in numbers(1, 50):
        uniforms = np.array([0.5, number], np.float32)
        assert drawn(logits, uniforms, **rows(2, 1.0, 5))[1] == drawn(tied, uniforms, **rows(2, 1.0, 5))[1]


@BOTH
@pytest.mark.parametrize("number", [0.0, 2.0**-24, 1 - 2.0**-24])
def test_the_ends_of_the_numbers_give_codes_that_can_come(drawn: Draw, number: float) -> None:
    logits = np.random.default_rng(4).normal(0, 3, (500, 64)).astype(np.float32)
    logits[:, [0, 63]] = -np.inf
    codes = drawn(logits, np.full(500, number, np.float32), **rows(500, 0.9, 10))
    assert np.isfinite(logits[np.arange(500), codes]).all()
    kept = logits >= np.sort(logits, axis=1)[:, -10, None]
    assert kept[np.arange(500), codes].all()
    if number == 0.0:
        assert np.array_equal(codes, kept.argmax(axis=1))  # the first that is kept


@BOTH
def test_temperature_zero_takes_the_likeliest_beside_rows_that_draw(drawn: Draw) -> None:
    logits = np.random.default_rng(5).normal(0, 0.1, (200, 20)).astype(np.float32)
    settings = rows(200, 1.5)
    settings["temperature"][::2] = 0
    codes = drawn(logits, numbers(2, 200), **settings)
    assert np.array_equal(codes[::2], logits[::2].argmax(axis=1))
    assert not np.array_equal(codes[1::2], logits[1::2].argmax(axis=1))


@settings(max_examples=80, deadline=None)
@given(batches())
def test_numpy_and_pytorch_draw_the_same(batch: dict[str, Any]) -> None:
    """But where a number lies on the edge between two codes, or top_p within a tie."""
    for row in range(len(batch["logits"])):
        if batch["temperature"][row] > 0:
            found = probabilities(
                batch["logits"][row], *(batch[n][row].item() for n in ("temperature", "top_k", "top_p"))
            )
            assume(np.abs(np.cumsum(found) - float(batch["uniforms"][row])).min() > 1e-5)
            assume(batch["top_p"][row] == 1 or not _cuts_a_tie(batch["logits"][row], found))
            assume(batch["top_p"][row] in (0, 1) or _far_from_edge(batch, row))
    assert np.array_equal(by_numpy(**batch), by_torch(**batch))


def _far_from_edge(batch: dict[str, Any], row: int) -> bool:
    temperature, top_k, top_p = (batch[name][row].item() for name in ("temperature", "top_k", "top_p"))
    counts = {int((probabilities(batch["logits"][row], temperature, top_k, p) > 0).sum()) for p in _around(top_p)}
    return len(counts) == 1


@BOTH
def test_a_row_is_drawn_as_if_it_were_alone(drawn: Draw) -> None:
    generator = np.random.default_rng(6)
    logits = generator.normal(0, 2, (12, 100)).astype(np.float32)
    uniforms = generator.random(12, np.float32)
    settings = {
        "temperature": np.array([0.0, 0.5, 0.9, 1.5] * 3, np.float32),
        "top_k": np.array([0, 1, 50, 7, 100, 50, 50, 3, 0, 2, 5, 60], np.int64),
        "top_p": np.array([1.0, 1.0, 0.9, 0.5, 1.0, 0.2] * 2, np.float32),
    }
    together = drawn(logits, uniforms, **settings)
    for row in range(12):
        one = {name: column[row : row + 1] for name, column in settings.items()}
        assert drawn(logits[row : row + 1], uniforms[row : row + 1], **one)[0] == together[row]


# --- Repetition penalty ---


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.5, 1.0, 1.05, 2.0]))
def test_the_penalty_is_hugging_faces(seed: int, penalty: float) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 3, (1, 30)).astype(np.float32)
    drawn_before = generator.integers(0, 30, (1, 12))
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(drawn_before), torch.from_numpy(logits.copy()))
    seen = np.zeros((1, 30), np.bool_)
    seen[0, drawn_before[0]] = True
    factor = np.array([penalty], np.float32)
    np.testing.assert_array_equal(penalise_numpy(logits, seen, factor), wanted.numpy())
    tensors = (torch.from_numpy(array) for array in (logits, seen, factor))
    np.testing.assert_array_equal(penalise(*tensors).numpy(), wanted.numpy())


def test_each_row_has_its_own_penalty() -> None:
    logits = np.array([[2.0, -2.0, 4.0]] * 2, np.float32)
    seen = np.array([[True, True, False]] * 2)
    lowered = penalise_numpy(logits, seen, np.array([1.0, 2.0], np.float32))
    assert lowered.tolist() == [[2.0, -2.0, 4.0], [1.0, -4.0, 4.0]]
    assert logits.tolist() == [[2.0, -2.0, 4.0]] * 2


# --- Random numbers ---


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.integers(1, 70), st.integers(0, 69))
def test_numbers_depend_on_seed_and_frame_whatever_block_is_asked(seed: int, first: int, frames: int, at: int) -> None:
    block = Uniforms(seed, 16).frames(first, frames)
    assert block.shape == (frames, 16)
    assert block.dtype == np.float32
    assert (block >= 0).all() and (block < 1).all()
    frame = at % frames
    np.testing.assert_array_equal(Uniforms(seed, 16).frames(first + frame, 1)[0], block[frame])


def test_numbers_differ_by_seed_frame_and_place() -> None:
    first, second = (Uniforms(seed, 16).frames(0, 500) for seed in (1, 2))
    assert len(np.unique(np.concatenate((first, second)))) > 15_990  # 16,000 of 2**24 seldom meet
    assert abs(first.mean() - 0.5) < 4 * math.sqrt(1 / 12 / first.size)


def test_the_numbers_never_change() -> None:
    """A seed that somebody keeps gives the same speech in years."""
    found = (Uniforms(42, 4).frames(3, 2) * 2**24).astype(np.int64)
    assert found.tolist() == [[1114110, 9367292, 12224288, 6660815], [16551681, 14146663, 9672099, 11955297]]


def test_a_count_that_cuts_a_step_of_the_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="count must be a multiple of 4"):
        Uniforms(0, 15)

"""Endings that are not the model's own: found when they are there, and never in speech."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pega_omni_plugin.engine.program import FinishReason
from pega_omni_plugin.models.qwen3_tts.ending import (
    FRAMES_AT_LEAST,
    FRAMES_PER_BYTE,
    LOOP_FRAMES,
    LOOP_PERIODS,
    SILENCE_FRAMES,
    SILENCE_PEAK,
    Watch,
    fade_out,
    frame_limit,
    frames_needed,
)

LOUD = np.array([[0, SILENCE_PEAK + 1, 0, 0]], np.int16)
QUIET = np.array([[0, SILENCE_PEAK, -SILENCE_PEAK, 0]], np.int16)


def look(watch: Watch, code: int, pcm: np.ndarray = LOUD, slot: int = 1) -> FinishReason | None:
    return watch.look([slot], np.array([code]), pcm).get(0)


def until_ended(codes: Iterable[int]) -> tuple[int, FinishReason | None]:
    """How many codes a new request had when it was ended, and why; all of them and None if it was not."""
    watch, count = Watch(1), 0
    for count, code in enumerate(codes, start=1):
        reason = look(watch, code)
        if reason is not None:
            return count, reason
    return count, None


def test_the_limit_grows_with_the_bytes_of_the_text() -> None:
    assert frame_limit("") == FRAMES_AT_LEAST
    assert frame_limit("abc") == FRAMES_AT_LEAST + 3 * FRAMES_PER_BYTE
    assert frame_limit("你好") == frame_limit("abcdef")


@given(st.text(max_size=200))
def test_what_a_text_needs_is_within_its_limit(text: str) -> None:
    assert 0 <= frames_needed(text) < frame_limit(text)


@pytest.mark.parametrize("period", range(1, LOOP_PERIODS + 1))
def test_a_loop_ends_after_its_frames_and_not_before(period: int) -> None:
    cycle = [100 + place for place in range(period)]
    # The first cycle repeats nothing; LOOP_FRAMES follow.
    codes = (cycle * (LOOP_FRAMES + 2))[: LOOP_FRAMES + period]
    assert until_ended(codes) == (LOOP_FRAMES + period, "repetition")
    assert until_ended(codes[:-1]) == (LOOP_FRAMES + period - 1, None)


@pytest.mark.parametrize("period", [LOOP_PERIODS + 1, 25])
def test_a_longer_period_is_no_loop(period: int) -> None:
    assert until_ended([place % period for place in range(3 * LOOP_FRAMES)])[1] is None


@pytest.mark.parametrize("period", [1, 3, 8])
def test_one_other_code_begins_the_count_anew(period: int) -> None:
    codes = [place % period for place in range(LOOP_FRAMES + period - 1)]
    codes[-1] = 999
    assert until_ended(codes + [place % period for place in range(LOOP_FRAMES - 1)])[1] is None


def test_a_loop_after_speech_is_found() -> None:
    speech = np.random.default_rng(0).integers(0, 2048, 200).tolist()
    assert until_ended([*speech, *[7, 8] * LOOP_FRAMES]) == (200 + LOOP_FRAMES + 2, "repetition")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40))
def test_speech_of_whatever_codes_is_never_ended(seed: int, codes: int) -> None:
    """Even if it knows two codes only: what repeats is not followed by so much of the same."""
    drawn = np.random.default_rng(seed).integers(0, codes, 400).tolist()
    assert until_ended(drawn) == (400, None)


def test_silence_is_ended_after_its_frames_and_not_before() -> None:
    watch = Watch(1)
    found = [look(watch, frame, QUIET) for frame in range(SILENCE_FRAMES)]
    assert found == [None] * (SILENCE_FRAMES - 1) + ["silence"]


@pytest.mark.parametrize("sample", [SILENCE_PEAK + 1, -SILENCE_PEAK - 1, -32768, 32767])
def test_one_sample_that_is_heard_begins_the_count_anew(sample: int) -> None:
    watch = Watch(1)
    heard = QUIET.copy()
    heard[0, 1] = sample
    frames = [QUIET] * (SILENCE_FRAMES - 1) + [heard] + [QUIET] * (SILENCE_FRAMES - 1)
    assert [look(watch, frame, pcm) for frame, pcm in enumerate(frames)] == [None] * len(frames)


def test_silence_of_one_code_is_silence() -> None:
    """Where both are found with one frame, the plainer reason is given."""
    watch = Watch(1)
    for frame in range(SILENCE_FRAMES - LOOP_FRAMES - 1):
        look(watch, frame, QUIET)
    assert [look(watch, 5, QUIET) for _ in range(LOOP_FRAMES + 1)][-1] == "silence"


def test_a_new_request_is_watched_from_its_beginning() -> None:
    watch = Watch(2)
    for _ in range(LOOP_FRAMES):
        assert look(watch, 5, QUIET) is None
    watch.admit(1)
    assert look(watch, 5, QUIET) is None
    for frame in range(SILENCE_FRAMES - 2):
        assert look(watch, frame * 2 + frame % 3, QUIET) is None


def test_rows_are_watched_by_slot() -> None:
    """In whatever order and company they come."""
    watch = Watch(3)
    generator = np.random.default_rng(1)
    for frame in range(LOOP_FRAMES + 1):
        codes = {1: frame, 2: 7, 3: int(generator.integers(0, 2048))}
        slots = generator.permutation([1, 2, 3]).tolist()
        ended = watch.look(slots, np.array([codes[slot] for slot in slots]), np.repeat(LOUD, 3, axis=0))
        assert ended == ({slots.index(2): "repetition"} if frame == LOOP_FRAMES else {})


@given(st.lists(st.integers(-32768, 32767), min_size=2, max_size=300))
def test_a_frame_fades_from_its_own_level_to_nothing(samples: list[int]) -> None:
    pcm = np.array(samples, np.int16)
    faded = fade_out(pcm)
    assert faded.dtype == np.int16
    assert faded.shape == pcm.shape
    assert faded[0] == pcm[0]
    assert faded[-1] == 0
    assert (np.abs(faded.astype(int)) <= np.abs(pcm.astype(int))).all()


def test_the_fade_is_a_straight_line() -> None:
    faded = fade_out(np.full(1921, 10_000, np.int16))
    assert np.abs(np.diff(faded.astype(int)) + 10_000 / 1920).max() < 1

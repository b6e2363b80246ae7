from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.bench.playback import Playback
from tests.bench.virtual_time import MS

RATE = 48_000
BYTES_PER_MS = 48

# (gap since the last arrival in ms, audio in ms)
arrivals = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 400)), min_size=1, max_size=40)


def play(pieces: list[tuple[int, int]]) -> Playback:
    """Feed (arrival ms, audio ms) pieces."""
    playback = Playback(RATE)
    for at_ms, audio_ms in pieces:
        playback.feed(at_ms * MS, audio_ms * BYTES_PER_MS)
    return playback


def at_times(gaps: list[tuple[int, int]], start_ms: int = 1000) -> list[tuple[int, int]]:
    pieces, now = [], start_ms
    for gap, audio in gaps:
        now += gap
        pieces.append((now, audio))
    return pieces


def test_audio_in_time_never_stalls() -> None:
    assert play([(0, 80), (80, 80), (100, 80), (240, 80)]).stall_ns == 0


def test_a_late_piece_stalls_for_as_long_as_it_is_late() -> None:
    assert play([(0, 80), (100, 80)]).stall_ns == 20 * MS


def test_after_a_stall_the_player_goes_on_from_the_late_arrival() -> None:
    # 80 ms runs dry at 80, resumes at 100, lasts to 180, resumes at 185; the last comes in time.
    assert play([(0, 80), (100, 80), (185, 80), (260, 80)]).stall_ns == 25 * MS


def test_a_buffer_built_early_covers_a_later_gap() -> None:
    assert play([(0, 80), (5, 320), (300, 80)]).stall_ns == 0
    assert play([(0, 80), (5, 320), (1000, 80)]).stall_ns == 600 * MS


def test_nothing_has_started_before_the_first_audio() -> None:
    playback = Playback(RATE)
    assert (playback.started_ns, playback.dry_ns, playback.audio_ns) == (None, None, 0)


def test_time_before_the_first_audio_is_no_stall() -> None:
    playback = play([(5000, 80)])
    assert (playback.started_ns, playback.stall_ns) == (5000 * MS, 0)


@given(arrivals)
def test_playing_ends_after_start_audio_and_stalls_together(gaps: list[tuple[int, int]]) -> None:
    pieces = at_times(gaps)
    playback = play(pieces)
    assert playback.audio_ns == sum(audio for _, audio in pieces) * MS
    assert playback.dry_ns == pieces[0][0] * MS + playback.audio_ns + playback.stall_ns


@given(arrivals)
def test_stalls_are_the_least_delay_with_which_no_piece_would_be_late(gaps: list[tuple[int, int]]) -> None:
    pieces = at_times(gaps)
    before, lateness = 0, [0]
    for at_ms, audio_ms in pieces:
        lateness.append(at_ms - pieces[0][0] - before)
        before += audio_ms
    assert play(pieces).stall_ns == max(lateness) * MS


@given(arrivals, st.data())
def test_cutting_a_piece_in_two_changes_nothing(gaps: list[tuple[int, int]], data: st.DataObject) -> None:
    pieces = at_times(gaps)
    index = data.draw(st.integers(0, len(pieces) - 1))
    at_ms, audio_ms = pieces[index]
    first = data.draw(st.integers(0, audio_ms))
    cut = [*pieces[:index], (at_ms, first), (at_ms, audio_ms - first), *pieces[index + 1 :]]
    assert play(cut).stall_ns == play(pieces).stall_ns


@given(st.integers(8000, 48_000), st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_rounding_does_not_add_up(sample_rate: int, sizes: list[int]) -> None:
    playback = Playback(sample_rate * 2)
    for size in sizes:
        playback.feed(playback.dry_ns or 0, size)  # always in the last possible nanosecond
    assert playback.stall_ns == 0
    assert abs(playback.audio_ns - sum(sizes) * 1e9 / (sample_rate * 2)) < 2

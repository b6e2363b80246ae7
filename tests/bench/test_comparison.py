from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pega_omni_plugin.bench.comparison import (
    ATTEMPTS,
    WAITS_MS,
    Search,
    level_ratios,
    remarks,
    slow_machine,
    table,
)
from pega_omni_plugin.bench.playback import Playback
from pega_omni_plugin.bench.report import Measured, Summary
from pega_omni_plugin.bench.requests import Record

AT_ONCE, LATER = WAITS_MS.values()


def measured(*, ttfp_ms: float = 60.0, e2e_ms: float = 1280.0, gaps_ms: float = 0.0, count: int = 4) -> Measured:
    record = Record(True, None, 0.0, ttfp_ms, e2e_ms, 5.12, gaps_ms)
    return Measured([record] * count, round(count * e2e_ms * 1e6), 0)


def summary(**figures: float) -> Summary:
    return measured(**figures).summary  # type: ignore[arg-type]


class FakeServer:
    """Plays up to ``capacity`` streams; ``bad_luck`` levels fail whatever they are."""

    def __init__(self, capacity: int, gaps_ms: float = 50.0, bad_luck: int = 0) -> None:
        self.capacity, self.gaps_ms, self.bad_luck = capacity, gaps_ms, bad_luck
        self.levels: list[int] = []

    async def level(self, streams: int) -> Measured:
        self.levels.append(streams)
        self.bad_luck -= 1
        good = streams <= self.capacity and self.bad_luck < 0
        return measured(gaps_ms=0.0 if good else self.gaps_ms, count=3 * streams)


def most(server: FakeServer, limit: int = 64, wait_ms: float = AT_ONCE) -> int:
    return asyncio.run(Search(server.level).most(limit, wait_ms))


@given(st.integers(0, 80), st.integers(1, 64))
def test_the_search_finds_the_capacity_within_an_eighth_and_never_more(capacity: int, limit: int) -> None:
    server = FakeServer(capacity)
    found, true = most(server, limit), min(capacity, limit)
    assert true - true // 8 <= found <= true
    assert max(server.levels) <= limit


def test_small_capacities_are_found_exactly() -> None:
    assert [most(FakeServer(capacity)) for capacity in range(8)] == list(range(8))


def test_a_server_that_plays_everything_is_asked_for_the_doubles_only() -> None:
    server = FakeServer(100)
    assert most(server) == 64
    assert server.levels == [1, 2, 4, 8, 16, 32, 64]


def test_one_pause_of_the_machine_is_forgiven_and_no_more() -> None:
    assert most(FakeServer(5, bad_luck=ATTEMPTS - 1)) == 5
    assert most(FakeServer(5, bad_luck=ATTEMPTS)) == 0


def test_listeners_who_start_later_hear_no_gap_that_their_wait_covers() -> None:
    server = FakeServer(0, gaps_ms=1999.0)
    search = Search(server.level)

    async def both() -> tuple[int, int]:
        return await search.most(4, AT_ONCE), await search.most(4, LATER)

    assert asyncio.run(both()) == (0, 4)
    # Levels that the first listener had are not run again for the second.
    assert server.levels == [1, 1, 2, 4]
    assert most(FakeServer(0, gaps_ms=2001.0), wait_ms=LATER) == 0


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=20), st.integers(0, 5000))
def test_the_sum_of_gaps_is_the_wait_that_avoids_them(pieces: list[tuple[int, int]], wait_ms: int) -> None:
    """What the search takes for granted, for arrivals (ms after the one before, ms of audio)."""
    playback, at_ms, played_ms, first_ms, late = Playback(1000), 0, 0, pieces[0][0], False
    for gap_ms, audio_ms in pieces:
        at_ms += gap_ms
        playback.feed(at_ms * 1_000_000, audio_ms)
        late = late or at_ms > first_ms + wait_ms + played_ms
        played_ms += audio_ms
    assert late == (playback.stall_ns > wait_ms * 1_000_000)


def test_a_failed_request_is_no_playing_stream() -> None:
    async def level(streams: int) -> Measured:
        return Measured([Record(False, "HTTP 429: full", 0.0)], 1, 0)

    assert asyncio.run(Search(level).most(64, LATER)) == 0


@pytest.mark.parametrize(
    ("ttfp_ms", "e2e_ms", "named"),
    [
        (67.0, 64 * 21.0, []),
        (1.5 * 67.0, 64 * 31.5, []),
        (101.0, 64 * 21.0, ["first audio"]),
        (67.0, 64 * 31.6, ["a frame"]),
        (200.0, 64 * 75.0, ["first audio", "a frame"]),
    ],
)
def test_their_side_may_be_half_again_as_slow_as_recorded(ttfp_ms: float, e2e_ms: float, named: list[str]) -> None:
    reasons = slow_machine(summary(ttfp_ms=ttfp_ms, e2e_ms=e2e_ms), frames=64)
    assert [reason.partition(" takes ")[0] for reason in reasons] == named


def test_ratios_say_how_many_times_better_ours_is() -> None:
    theirs, ours = summary(ttfp_ms=60.0, e2e_ms=1200.0), summary(ttfp_ms=6.0, e2e_ms=300.0)
    assert level_ratios(theirs, ours) == pytest.approx(
        {"first_audio_p50": 10, "first_audio_p90": 10, "audio_s_per_s": 4, "real_time_factor_p50": 4}
    )


def document(**changes: Any) -> dict[str, Any]:
    theirs, ours = summary(), replace(summary(ttfp_ms=6.0), underruns=0)
    whole = {
        "slow_machine": [],
        "idle_cores": {"theirs": 0.0, "ours": 0.02},
        "levels": {
            "1": {
                "theirs": theirs,
                "ours": ours,
                "ratios": level_ratios(theirs, ours),
                "processor_ms_per_frame": {"theirs": 20.0, "ours": 5.0},
            }
        },
        "most_streams": {
            "played at once": {"theirs": 0, "ours": 12, "ratio": 12.0},
            "played 2 s later": {"theirs": 6, "ours": 24, "ratio": 4.0},
        },
    }
    return whole | changes


def shown(whole: dict[str, Any]) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(table(whole))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_both_sides_and_the_ratios() -> None:
    lines = shown(document()).splitlines()
    (first,) = [line for line in lines if "first audio p50" in line]
    assert [cell.strip() for cell in first.split("│")[1:-1]] == ["1", "first audio p50 (ms)", "60", "6", "10"]
    (last,) = [line for line in lines if "played 2 s later" in line]
    assert [cell.strip() for cell in last.split("│")[2:-1]] == ["streams, played 2 s later", "6", "24", "4"]
    assert "SLOW" not in lines[0]


def test_a_refused_comparison_has_figures_and_no_ratios() -> None:
    levels = {"1": document()["levels"]["1"] | {"ratios": None}}
    whole = document(slow_machine=["a frame takes too long"], levels=levels, most_streams=None)
    (first,) = [line for line in shown(whole).splitlines() if "first audio p50" in line]
    assert [cell.strip() for cell in first.split("│")[1:-1]] == ["1", "first audio p50 (ms)", "60", "6", ""]
    assert remarks(whole, anyway=False) == [
        "a frame takes too long",
        "the machine is too slow or too busy to compare: no ratios (--anyway gives them)",
    ]


def test_ratios_of_a_slow_machine_are_marked() -> None:
    whole = document(slow_machine=["a frame takes too long"])
    assert "ON A SLOW MACHINE" in shown(whole)
    assert "not to be quoted" in " ".join(remarks(whole, anyway=True))


def test_an_idle_server_that_was_busy_and_a_capacity_of_none_are_told() -> None:
    lines = remarks(document(idle_cores={"theirs": 0.5, "ours": 0.0}), anyway=False)
    assert lines == [
        "theirs used 0.50 cores while the other was measured: both figures are too slow",
        "no stream of theirs is without a gap when played at once: the ratio counts one",
    ]

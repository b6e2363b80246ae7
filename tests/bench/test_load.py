from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.bench.load import Finished, Load, WallClock, run_load, run_ramp
from tests.bench import virtual_time
from tests.bench.virtual_time import MS, SECOND, VirtualClock

# (request, due ms, sent ms) in the order of sending
Sent = list[tuple[int, int, int]]


def simulate(load: Load, service_ms: int) -> tuple[Finished[int], Sent, int]:
    """Run against a server that takes ``service_ms``; also returns the most requests that were under way at once."""
    clock, sent, open_now, most = VirtualClock(), [], 0, 0

    async def send(index: int, due_ns: int) -> int:
        nonlocal open_now, most
        sent.append((index, due_ns // MS, clock.now() // MS))
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(service_ms / 1e3)
        open_now -= 1
        return index

    return virtual_time.run(run_load(load, send, clock)), sent, most


def test_closed_loop_sends_the_next_request_when_one_ends() -> None:
    finished, sent, most = simulate(Load(requests=5, concurrency=2), service_ms=100)
    assert sent == [(0, 0, 0), (1, 0, 0), (2, 100, 100), (3, 100, 100), (4, 200, 200)]
    assert (most, finished.wall_ns, finished.records) == (2, 300 * MS, [0, 1, 2, 3, 4])


def test_open_loop_sends_when_due_whatever_the_server_does() -> None:
    load = Load(requests=50, concurrency=50, rate=10.0, seed=3)
    _, sent, _ = simulate(load, service_ms=60_000)
    assert [due_ms for _, due_ms, _ in sent] == [offset // MS for offset in load.due_ns() or []]
    assert all(sent_ms - due_ms in (0, 1) for _, due_ms, sent_ms in sent)


def test_open_loop_under_a_cap_counts_waiting_from_the_due_moment() -> None:
    load = Load(requests=4, concurrency=1, rate=1000.0, seed=0)
    _, sent, most = simulate(load, service_ms=1000)
    due = [offset // MS for offset in load.due_ns() or []]
    assert sent == [(index, due[index], 1000 * index) for index in range(4)]
    assert most == 1


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 50), st.sampled_from([float("inf"), 5.0, 500.0]))
def test_every_request_is_sent_once_in_order_under_the_cap(n: int, cap: int, service_ms: int, rate: float) -> None:
    finished, sent, most = simulate(Load(n, cap, rate), service_ms)
    assert [index for index, _, _ in sent] == list(range(n)) == finished.records
    assert most <= cap


def test_arrivals_are_the_same_for_a_seed_and_different_for_another() -> None:
    assert Load(100, 1, 20.0, seed=7).due_ns() == Load(100, 1, 20.0, seed=7).due_ns()
    assert Load(100, 1, 20.0, seed=7).due_ns() != Load(100, 1, 20.0, seed=8).due_ns()


def test_arrivals_start_at_zero_and_are_exponential_at_the_rate() -> None:
    due = Load(20_001, 1, rate=40.0, seed=1).due_ns()
    assert due is not None and due[0] == 0
    gaps = np.diff(due) / SECOND
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 40, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 40, rel=0.03)  # an exponential's deviation is its mean
    assert (gaps > 2 / 40).mean() == pytest.approx(np.exp(-2), rel=0.05)


def test_one_request_is_an_open_loop_too() -> None:
    assert Load(1, 1, rate=5.0).due_ns() == [0]


def test_an_error_that_is_no_request_failure_ends_the_run() -> None:
    async def send(index: int, due_ns: int) -> int:
        raise KeyError(index)

    with pytest.raises(ExceptionGroup) as caught:
        virtual_time.run(run_load(Load(2, 1), send, VirtualClock()))
    assert caught.group_contains(KeyError)


async def test_wall_clock_sleeps_at_least_until_the_moment_and_not_for_one_that_has_passed() -> None:
    clock = WallClock()
    at_ns = clock.now() + 3 * MS
    await clock.sleep_until(at_ns)
    assert time.perf_counter_ns() >= at_ns
    await asyncio.wait_for(clock.sleep_until(at_ns - SECOND), 5)


def climb(levels: list[float], stalls_from: float) -> tuple[list[float], float | None, int]:
    async def climb() -> tuple[list[float], float | None, int]:
        clock = VirtualClock()

        async def level(value: float) -> bool:
            return value < stalls_from

        done, largest = await run_ramp(levels, level, bool, clock)
        return [value for value, _ in done], largest, clock.now()

    return virtual_time.run(climb())


def test_ramp_stops_at_the_first_level_that_is_not_clean() -> None:
    assert climb([8, 16, 32, 64], stalls_from=32) == ([8, 16, 32], 16, 2 * SECOND)


def test_ramp_without_a_clean_level_has_no_largest() -> None:
    assert climb([8, 16], stalls_from=1) == ([8], None, 0)


def test_ramp_that_stays_clean_runs_every_level_with_pauses_between() -> None:
    assert climb([8, 16, 32], stalls_from=100) == ([8, 16, 32], 32, 2 * SECOND)

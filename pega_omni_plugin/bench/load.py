"""When requests are sent: closed loop, or open loop with Poisson arrivals under a cap; and ramps of either."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

T = TypeVar("T")

_POLL_NS = 1_000_000


class Clock(Protocol):
    """Time in nanoseconds from an arbitrary start, and sleep on it."""

    def now(self) -> int: ...

    async def sleep_until(self, at_ns: int) -> None:
        """Return at once if ``at_ns`` has passed."""
        ...


class WallClock:
    """The process's monotonic clock."""

    def now(self) -> int:
        return time.perf_counter_ns()

    async def sleep_until(self, at_ns: int) -> None:
        # The event loop's timers have a grain of 1 ms, as much as a good server needs for its first audio: sleep to
        # just before the moment and poll the rest. That costs up to 1 ms of processor time a request, and only while
        # this process has nothing else to do.
        while (left := at_ns - self.now()) > 0:  # noqa: ASYNC110 (a clock, not a condition)
            await asyncio.sleep(max(0, left - _POLL_NS) / 1e9)


@dataclass(frozen=True, slots=True)
class Load:
    """``requests`` requests with at most ``concurrency`` under way.

    With ``rate`` infinite the loop is closed: a request is due when the one before it in its place has ended. With a
    finite ``rate`` (requests a second) it is open: due times are a Poisson process drawn from ``seed``, whatever the
    server does.
    """

    requests: int
    concurrency: int
    rate: float = math.inf
    seed: int = 0

    def due_ns(self) -> list[int] | None:
        """When each request is due, from the first; ``None`` for a closed loop."""
        if math.isinf(self.rate):
            return None
        gaps = np.random.default_rng(self.seed).exponential(1e9 / self.rate, self.requests - 1)
        return [0, *np.cumsum(gaps).astype(np.int64).tolist()]


@dataclass(frozen=True, slots=True)
class Finished(Generic[T]):
    """Results in request order; ``wall_ns`` from the first release to the last completion."""

    records: list[T]
    wall_ns: int


async def run_load(load: Load, send: Callable[[int, int], Awaitable[T]], clock: Clock) -> Finished[T]:
    """Call ``send(index, due_ns)`` for every request of ``load``.

    ``due_ns`` is on ``clock``. Where the cap holds a request of an open loop back, ``send`` is called late with the
    moment at which it was due, so that waiting in the client is never hidden. What ``send`` raises ends the run.
    """
    start_ns = clock.now()
    offsets = load.due_ns()
    turns = iter(range(load.requests))
    records: dict[int, T] = {}

    async def place(turns: Iterator[int]) -> None:
        for index in turns:  # shared by all places: a free one takes the next request, in order
            due_ns = clock.now()
            if offsets is not None:
                due_ns = start_ns + offsets[index]
                await clock.sleep_until(due_ns)
            records[index] = await send(index, due_ns)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.requests)):
            group.create_task(place(turns))
    return Finished([records[index] for index in range(load.requests)], clock.now() - start_ns)


async def run_ramp(
    levels: Sequence[float],
    run_level: Callable[[float], Awaitable[T]],
    clean: Callable[[T], bool],
    clock: Clock,
    pause_s: float = 1.0,
) -> tuple[list[tuple[float, T]], float | None]:
    """Run rising ``levels`` up to the first that is not clean, ``pause_s`` apart.

    Returns every level run with its result, and the largest clean one.
    """
    done: list[tuple[float, T]] = []
    largest: float | None = None
    for level in levels:
        if done:
            await clock.sleep_until(clock.now() + round(pause_s * 1e9))
        result = await run_level(level)
        done.append((level, result))
        if not clean(result):
            break
        largest = level
    return done, largest

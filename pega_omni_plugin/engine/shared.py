"""What the scheduler and the worker of one engine process share: the step plan, its result, and the counters.

vLLM builds both in the same process and passes the plan and the result between them by reference; it offers no place
for anything else, so the counters hang on this module, one set a process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pega_omni_plugin.engine.program import Admission, FinishReason, Part, ProgramInfo, StepOutput

TIME_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
"""Upper bounds in seconds of the engine's histograms: doubling from a step that costs nothing to a long queue."""

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds in rows of the batch size histogram."""

SWITCH_SECONDS = 0.0005
"""How long a thread of a serving process may keep the interpreter from another."""


@dataclass(slots=True)
class Histogram:
    """Counts per bucket (the last one unbounded) and the sum of what was observed."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class EngineStats:
    """Counters of one engine process; only ever grow, except the gauges ``waiting`` and ``running``."""

    slots: int = 0
    waiting: int = 0
    running: int = 0
    steps: int = 0
    frames: int = 0
    messages: int = 0
    admitted: int = 0
    aborted: int = 0
    failed: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS))
    batch: Histogram = field(default_factory=lambda: Histogram(BATCH_BOUNDS))
    part_seconds: Mapping[Part, float] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """One step: slots to release, requests to take in, and every slot to advance (the new ones included)."""

    releases: list[int]
    admissions: list[Admission]
    slots: list[int]


@dataclass(slots=True)
class Result:
    """What a step made, by slot, and how long the program took for it."""

    outputs: dict[int, StepOutput]
    seconds: float


@dataclass(slots=True)
class EngineProcess:
    """The worker fills in ``info`` when the program is loaded, before vLLM builds the scheduler."""

    info: ProgramInfo | None = None
    stats: EngineStats = field(default_factory=EngineStats)


PROCESS = EngineProcess()


def stats_document(stats: EngineStats) -> dict[str, Any]:
    """The counters as plain values, for the control call that reads them."""
    histograms = {
        name: {"bounds": list(value.bounds), "counts": list(value.counts), "sum": value.total}
        for name in ("queue_seconds", "step_seconds", "batch")
        for value in (getattr(stats, name),)
    }
    names = ("slots", "waiting", "running", "steps", "frames", "messages", "admitted", "aborted", "failed")
    counters = {name: getattr(stats, name) for name in names}
    return counters | histograms | {"finished": dict(stats.finished), "part_seconds": dict(stats.part_seconds)}

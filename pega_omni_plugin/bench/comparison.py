"""What the figures of two servers say of each other: whether they may be compared, ratios, and the table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from pega_omni_plugin.bench.report import UNDERRUN_MS, Measured, Summary, figure

RECORDED_FIRST_AUDIO_MS = 67.0
RECORDED_FRAME_MS = 21.0
SLOWER = 1.5
"""vLLM-Omni's pipeline with one caller, as measured on two quiet cores: the slower end of 62 to 67 ms to the first
audio, and of 18 to 21 ms a frame. A run in which it is more than 1.5 times slower compares nothing."""

ATTEMPTS = 2
"""Of a level in the search for the most streams: a pause of the machine stops playback, too."""

WAITS_MS = {"played at once": UNDERRUN_MS, "played 2 s later": 2000.0}
"""When listeners start to play. vLLM-Omni's pipeline sends one frame and then two seconds at a time, so that nobody can
play from the first audio unless the model is 25 times faster than real time; the second listener waits for that."""

IDLE_CORES = 0.1
"""An idle server that uses more than this much of a core disturbs the other's measurement."""


@dataclass
class Search:
    """The most streams that a server plays without a gap. ``level`` runs so many at once."""

    level: Callable[[int], Awaitable[Measured]]
    runs: dict[int, list[Measured]] = field(default_factory=dict)

    async def plays(self, streams: int, wait_ms: float) -> bool:
        """Whether so many play without a gap for listeners who start ``wait_ms`` after the first audio.

        The gaps of a listener who starts at once sum to exactly the wait with which there would have been none.
        """
        runs = self.runs.setdefault(streams, [])
        for attempt in range(ATTEMPTS):
            if attempt == len(runs):
                runs.append(await self.level(streams))
            if all(
                record.underrun_ms is not None and record.underrun_ms <= wait_ms for record in runs[attempt].records
            ):
                return True
        return False

    async def most(self, limit: int, wait_ms: float) -> int:
        """The largest number up to ``limit`` that plays, within an eighth; 0 if not even one does.

        Doubles until one does not play, then halves the gap; less than what plays is taken to play.
        """
        good, bad = 0, limit + 1
        while good < limit and bad > limit:
            trial = min(max(1, 2 * good), limit)
            if await self.plays(trial, wait_ms):
                good = trial
            else:
                bad = trial
        while bad - good > max(1, good // 8):
            trial = (good + bad) // 2
            if await self.plays(trial, wait_ms):
                good = trial
            else:
                bad = trial
        return good


def slow_machine(theirs: Summary, frames: int) -> list[str]:
    """Why their figures with one caller are too slow to be compared with; empty if they are not."""
    if theirs.ttfp_ms is None or theirs.e2e_ms is None:
        raise ValueError("nothing was served")
    reasons = []
    for what, measured, recorded in (
        ("first audio", theirs.ttfp_ms.p50, RECORDED_FIRST_AUDIO_MS),
        ("a frame", theirs.e2e_ms.p50 / frames, RECORDED_FRAME_MS),
    ):
        if measured > SLOWER * recorded:
            reasons.append(
                f"{what} takes vLLM-Omni's pipeline {measured:.1f} ms (median, one caller), "
                f"more than {SLOWER:g} times the recorded {recorded:g} ms"
            )
    return reasons


def level_ratios(theirs: Summary, ours: Summary) -> dict[str, float]:
    """How many times better ours is, for every figure of a level."""
    if not (theirs.ttfp_ms and theirs.rtf and ours.ttfp_ms and ours.rtf):
        raise ValueError("nothing was served")
    return {
        "first_audio_p50": theirs.ttfp_ms.p50 / ours.ttfp_ms.p50,
        "first_audio_p90": theirs.ttfp_ms.p90 / ours.ttfp_ms.p90,
        "audio_s_per_s": ours.audio_s_per_s / theirs.audio_s_per_s,
        "real_time_factor_p50": theirs.rtf.p50 / ours.rtf.p50,
    }


def table(document: Mapping[str, Any]) -> Table:
    """Theirs, ours, and how many times better ours is where ratios may be told."""
    slow = document["slow_machine"]
    shown = Table(
        title="vLLM-Omni's Qwen3-TTS pipeline and ours" + (", ON A SLOW MACHINE" if slow else ""), title_justify="left"
    )
    for name in ("callers", "", "theirs", "ours", "times better"):
        shown.add_column(name, justify="left" if not name else "right")
    for callers, level in document["levels"].items():
        ratios = level["ratios"] or {}
        theirs, ours = level["theirs"], level["ours"]
        rows: tuple[tuple[str, str | None, Callable[[Any], float]], ...] = (
            ("first audio p50 (ms)", "first_audio_p50", lambda side: side.ttfp_ms.p50),
            ("first audio p90 (ms)", "first_audio_p90", lambda side: side.ttfp_ms.p90),
            ("audio seconds/s", "audio_s_per_s", lambda side: side.audio_s_per_s),
            ("real-time factor p50", "real_time_factor_p50", lambda side: side.rtf.p50),
            ("streams with underrun", None, lambda side: side.underruns),
            ("sum of gaps p50 (ms)", None, lambda side: side.underrun_ms.p50),
        )
        for label, ratio, value in rows:
            times = figure(ratios[ratio]) if ratio in ratios else ""
            shown.add_row(callers, label, figure(value(theirs)), figure(value(ours)), times)
        spent = level["processor_ms_per_frame"]
        shown.add_row(callers, "processor ms a frame", figure(spent["theirs"]), figure(spent["ours"]), "")
        shown.add_section()
    for listener, row in (document["most_streams"] or {}).items():
        shown.add_row("", f"streams, {listener}", str(row["theirs"]), str(row["ours"]), figure(row["ratio"]))
    return shown


def remarks(document: Mapping[str, Any], anyway: bool) -> list[str]:
    """What a reader of the table must know besides."""
    lines = list(document["slow_machine"])
    if lines:
        lines.append(
            "the machine is too slow or too busy: these ratios are not to be quoted"
            if anyway
            else "the machine is too slow or too busy to compare: no ratios (--anyway gives them)"
        )
    for name, cores in document["idle_cores"].items():
        if cores > IDLE_CORES:
            lines.append(f"{name} used {cores:.2f} cores while the other was measured: both figures are too slow")
    for listener, row in (document["most_streams"] or {}).items():
        if row["theirs"] == 0:
            lines.append(f"no stream of theirs is without a gap when {listener}: the ratio counts one")
    return lines

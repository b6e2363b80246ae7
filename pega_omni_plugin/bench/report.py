"""What a run showed: figures, tables and the JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.table import Table

from pega_omni_plugin.bench.requests import Record

UNDERRUN_MS = 1.0
"""A stream whose stalls sum to more than this has an underrun."""

CONTINUITY_MS = 100.0
"""vLLM-Omni's benchmark counts a stream as continuous up to this."""

ERROR_CHARS = 80
"""Errors that begin alike are one kind."""

BUSY_CLIENT_CORES = 0.8
BUSY_CLIENT_SECONDS = 1.0
"""A client that uses more of a core than this, for at least this long, may have been the limit."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles are observed values (nearest rank: numpy's ``inverted_cdf``), never interpolated ones."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run. Spreads are over the requests that are ok, ``None`` if there are none.

    Times are in ms from the moment a request was due. ``rtf`` is end to end time over audio time. ``continuity`` is
    the share of ok streams with at most 100 ms of stalls. ``client_cores`` is processor time of this process over
    ``wall_s``: near 1 it was the load generator that was measured.
    """

    requests: int
    ok: int
    failed: int
    wall_s: float
    requests_per_s: float
    audio_s_per_s: float
    ttfp_ms: Spread | None
    e2e_ms: Spread | None
    rtf: Spread | None
    underrun_ms: Spread | None
    wait_ms: Spread | None
    underruns: int
    continuity: float | None
    client_cores: float
    errors: Mapping[str, int]

    @property
    def clean(self) -> bool:
        """Every request was served and no stream had an underrun."""
        return not self.failed and not self.underruns


@dataclass(frozen=True)
class Measured:
    """The records of one run that took ``wall_ns``, and ``cpu_ns`` of this process's processor time."""

    records: Sequence[Record]
    wall_ns: int
    cpu_ns: int

    def every_second(self, first: int) -> Measured:
        """Half of a run whose requests went to two servers in turn; time is that of the whole run."""
        return Measured(self.records[first::2], self.wall_ns, self.cpu_ns)

    @cached_property
    def summary(self) -> Summary:
        return summarise(self.records, self.wall_ns, self.cpu_ns)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of a server less, and over, those of the baseline in the same run."""

    ttfp_difference_ms: float
    ttfp_ratio: float
    e2e_difference_ms: float
    e2e_ratio: float


def spread(values: Iterable[float]) -> Spread | None:
    """Mean, percentiles and maximum; ``None`` of nothing."""
    data = np.fromiter(values, dtype=np.float64)
    if not data.size:
        return None
    p50, p90, p99 = np.percentile(data, (50, 90, 99), method="inverted_cdf")
    return Spread(float(data.mean()), float(p50), float(p90), float(p99), float(data.max()))


def summarise(records: Sequence[Record], wall_ns: int, cpu_ns: int) -> Summary:
    """Reduce the records of one run that took ``wall_ns``, and ``cpu_ns`` of processor time in this process."""
    ok = [record for record in records if record.ok]
    wall_s = wall_ns / 1e9
    stalls = [record.underrun_ms or 0.0 for record in ok]
    return Summary(
        requests=len(records),
        ok=len(ok),
        failed=len(records) - len(ok),
        wall_s=wall_s,
        requests_per_s=len(ok) / wall_s,
        audio_s_per_s=sum(record.audio_s or 0.0 for record in ok) / wall_s,
        ttfp_ms=spread(record.ttfp_ms for record in ok if record.ttfp_ms is not None),
        e2e_ms=spread(record.e2e_ms for record in ok if record.e2e_ms is not None),
        rtf=spread(record.e2e_ms / 1e3 / record.audio_s for record in ok if record.e2e_ms and record.audio_s),
        underrun_ms=spread(stalls),
        wait_ms=spread(record.wait_ms for record in ok),
        underruns=sum(stall > UNDERRUN_MS for stall in stalls),
        continuity=sum(stall <= CONTINUITY_MS for stall in stalls) / len(ok) if ok else None,
        client_cores=cpu_ns / wall_ns,
        errors=dict(Counter((record.error or "")[:ERROR_CHARS] for record in records if not record.ok).most_common()),
    )


def compare(server: Summary, baseline: Summary) -> Comparison | None:
    """Server against baseline; ``None`` unless both have served something."""
    if not (server.ttfp_ms and server.e2e_ms and baseline.ttfp_ms and baseline.e2e_ms):
        return None
    return Comparison(
        ttfp_difference_ms=server.ttfp_ms.p50 - baseline.ttfp_ms.p50,
        ttfp_ratio=server.ttfp_ms.p50 / baseline.ttfp_ms.p50,
        e2e_difference_ms=server.e2e_ms.p50 - baseline.e2e_ms.p50,
        e2e_ratio=server.e2e_ms.p50 / baseline.e2e_ms.p50,
    )


def figure(value: float) -> str:
    """Three significant digits, thousands in full."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def summary_table(summary: Summary, title: str) -> Table:
    """The spreads of one run; everything else is in its caption."""
    caption = (
        f"{summary.ok} ok, {summary.failed} failed of {summary.requests} in {summary.wall_s:.2f} s: "
        f"{summary.requests_per_s:.1f} requests/s, {summary.audio_s_per_s:.1f} s of audio/s. "
        f"{summary.underruns} streams with underrun > {UNDERRUN_MS:g} ms. "
        f"Client: {summary.client_cores:.2f} cores."
    )
    table = Table(title=title, caption=caption, caption_justify="left", caption_style="", title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for label, row in (
        ("first audio (ms)", summary.ttfp_ms),
        ("end to end (ms)", summary.e2e_ms),
        ("real-time factor", summary.rtf),
        ("underrun (ms)", summary.underrun_ms),
        ("waited in client (ms)", summary.wait_ms),
    ):
        if row is not None:
            table.add_row(label, *(figure(value) for value in asdict(row).values()))
    return table


def comparison_table(server: Summary, baseline: Summary, comparison: Comparison) -> Table:
    """Medians side by side."""
    table = Table(title="medians", title_justify="left")
    table.add_column("")
    for name in ("server", "baseline", "difference", "ratio"):
        table.add_column(name, justify="right")
    for label, ours, bare, difference, ratio in (
        ("first audio (ms)", server.ttfp_ms, baseline.ttfp_ms, comparison.ttfp_difference_ms, comparison.ttfp_ratio),
        ("end to end (ms)", server.e2e_ms, baseline.e2e_ms, comparison.e2e_difference_ms, comparison.e2e_ratio),
    ):
        if ours and bare:
            table.add_row(label, *(figure(value) for value in (ours.p50, bare.p50, difference, ratio)))
    return table


def ramp_table(levels: Sequence[tuple[float, Summary]], level_name: str, title: str) -> Table:
    """One row a level; narrow enough for 80 columns. TTFA is the time to first audio."""
    table = Table(title=title, title_justify="left")
    for name in (
        level_name.replace(" ", "\n"),
        "failed",
        "served\n/s",
        "audio\ns/s",
        "TTFA\np50 ms",
        "TTFA\np99 ms",
        "RTF\np50",
        "under-\nruns",
    ):
        table.add_column(name, justify="right")
    for level, summary in levels:
        ttfp, rtf = summary.ttfp_ms, summary.rtf
        table.add_row(
            f"{level:g}",
            str(summary.failed),
            f"{summary.requests_per_s:.1f}",
            f"{summary.audio_s_per_s:.1f}",
            figure(ttfp.p50) if ttfp else "-",
            figure(ttfp.p99) if ttfp else "-",
            figure(rtf.p50) if rtf else "-",
            str(summary.underruns),
        )
    return table


def remarks(summary: Summary) -> list[str]:
    """What a reader of the table must know besides: failures by kind, and a client that was too busy."""
    lines = [f"{count} failed: {error}" for error, count in summary.errors.items()]
    if summary.client_cores > BUSY_CLIENT_CORES and summary.wall_s >= BUSY_CLIENT_SECONDS:
        lines.append(
            f"the client used {summary.client_cores:.2f} cores: it may be what was measured, so lower the load or "
            "run several clients"
        )
    return lines


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document of dataclasses and plain values."""
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

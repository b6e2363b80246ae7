from __future__ import annotations

import io
import math
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pega_omni_plugin.bench.report import (
    Measured,
    compare,
    comparison_table,
    figure,
    ramp_table,
    remarks,
    spread,
    summarise,
    summary_table,
    write_json,
)
from pega_omni_plugin.bench.requests import Record
from tests.bench.virtual_time import SECOND


def served(ttfp_ms: float = 10, e2e_ms: float = 500, audio_s: float = 2, underrun_ms: float = 0) -> Record:
    return Record(True, None, 0.5, ttfp_ms, e2e_ms, audio_s, underrun_ms)


def failed(error: str) -> Record:
    return Record(False, error, 0.5)


def shown(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(*renderables)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_the_smallest_observed_values_with_enough_at_or_below(values: list[float]) -> None:
    figures, ordered = spread(values), sorted(values)
    assert figures is not None
    for percentile, value in ((50, figures.p50), (90, figures.p90), (99, figures.p99), (100, figures.max)):
        assert value == ordered[math.ceil(percentile * len(ordered) / 100) - 1]
    assert figures.mean == pytest.approx(math.fsum(values) / len(values), abs=1e-6)


def test_there_is_no_spread_of_nothing() -> None:
    assert spread([]) is None


def test_figures_are_over_ok_requests_only() -> None:
    summary = summarise([served(10), failed("x"), served(30, underrun_ms=2.5)], wall_ns=4 * SECOND, cpu_ns=SECOND)
    assert (summary.requests, summary.ok, summary.failed) == (3, 2, 1)
    assert (summary.requests_per_s, summary.audio_s_per_s, summary.client_cores) == (0.5, 1.0, 0.25)
    assert summary.ttfp_ms is not None and (summary.ttfp_ms.mean, summary.ttfp_ms.max) == (20, 30)
    assert summary.rtf is not None and summary.rtf.p50 == 0.25


def test_an_underrun_is_more_than_one_millisecond_and_continuity_allows_a_hundred() -> None:
    stalls = [0, 1.0, 1.001, 100.0, 100.1]
    summary = summarise([served(underrun_ms=stall) for stall in stalls], SECOND, 0)
    assert (summary.underruns, summary.continuity) == (3, 0.8)


@pytest.mark.parametrize(
    ("records", "clean"),
    [([served(underrun_ms=1.0)], True), ([served(underrun_ms=1.1)], False), ([served(), failed("x")], False)],
)
def test_clean_means_all_served_and_no_underrun(records: list[Record], clean: bool) -> None:
    assert summarise(records, SECOND, 0).clean is clean


def test_errors_that_begin_with_the_same_80_characters_are_one_kind_most_frequent_first() -> None:
    long = "e" * 80
    records = [failed("rare"), failed(long + " in slot 1"), failed(long + " in slot 2"), served()]
    assert list(summarise(records, SECOND, 0).errors.items()) == [(long, 2), ("rare", 1)]


def test_a_run_in_which_nothing_was_served_has_no_figures() -> None:
    summary = summarise([failed("x")], SECOND, 0)
    assert (summary.ttfp_ms, summary.e2e_ms, summary.rtf, summary.underrun_ms) == (None, None, None, None)
    assert (summary.continuity, summary.requests_per_s) == (None, 0.0)
    assert compare(summary, summary) is None
    assert "0 ok, 1 failed of 1" in shown(summary_table(summary, "t"))


def test_every_second_record_is_one_server_of_two() -> None:
    both = Measured([served(1), served(2), served(3), served(4)], SECOND, 0)
    ours, bare = both.every_second(0), both.every_second(1)
    assert [record.ttfp_ms for record in ours.records] == [1, 3]
    assert [record.ttfp_ms for record in bare.records] == [2, 4]


def test_comparison_is_of_medians() -> None:
    server = summarise([served(3, 8), served(4, 10), served(100, 900)], SECOND, 0)
    bare = summarise([served(1, 4), served(1, 4), served(50, 60)], SECOND, 0)
    comparison = compare(server, bare)
    assert comparison is not None
    assert (comparison.ttfp_difference_ms, comparison.ttfp_ratio) == (3, 4)
    assert (comparison.e2e_difference_ms, comparison.e2e_ratio) == (6, 2.5)
    row = next(line for line in shown(comparison_table(server, bare, comparison)).splitlines() if "first audio" in line)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["4", "1", "3", "4"]


def test_figures_have_three_digits() -> None:
    assert [figure(value) for value in (0, 0.1234, 7.2, 41.26, 212.4, 12345.6)] == [
        "0",
        "0.123",
        "7.2",
        "41.3",
        "212",
        "12346",
    ]


def test_tables_show_the_figures() -> None:
    summary = summarise([served(12.345, 1234, 2, 0)], 2 * SECOND, 0)
    text = shown(summary_table(summary, "my label"))
    assert all(part in text for part in ("my label", "12.3", "1234", "0.617", "1 ok, 0 failed of 1 in 2.00 s"))


def test_ramp_table_has_a_row_a_level_and_fits_a_terminal() -> None:
    slow = summarise([served(1234.5, 123456.0, 0.1, 5)] * 1000, SECOND, 0)
    text = shown(ramp_table([(8.0, slow), (16.0, summarise([failed("x")], SECOND, 0))], "requests per second", "r"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["8", "0", "1000.0", "100.0", "1234", "1234", "1235", "1000"],
        ["16", "1", "0.0", "0.0", "-", "-", "-", "0"],
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_remarks_name_failures_and_a_busy_client() -> None:
    records = [failed("no [bold]slot[/bold]"), failed("no [bold]slot[/bold]"), served()]
    assert remarks(summarise(records, SECOND, 0)) == ["2 failed: no [bold]slot[/bold]"]
    assert "0.90 cores" in remarks(summarise([served()], SECOND, int(0.9 * SECOND)))[0]
    assert remarks(summarise([served()], SECOND // 2, int(0.45 * SECOND))) == []  # too short to tell


def test_json_document_is_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    records = [served(), failed("x")]
    write_json(path, {"config": {"a": 1}, "summary": summarise(records, SECOND, 0), "records": records})
    document = orjson.loads(path.read_bytes())
    assert document["records"][1] == {
        "ok": False,
        "error": "x",
        "wait_ms": 0.5,
        "ttfp_ms": None,
        "e2e_ms": None,
        "audio_s": None,
        "underrun_ms": None,
    }
    assert document["summary"]["ttfp_ms"] == {"mean": 10, "p50": 10, "p90": 10, "p99": 10, "max": 10}
    assert document["summary"]["errors"] == {"x": 1}

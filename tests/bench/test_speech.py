from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
from PIL import Image

from pega_omni_plugin.bench.speech import add_arguments, run
from tests.bench import server as test_server

RECORD_KEYS = {"ok", "error", "wait_ms", "ttfp_ms", "e2e_ms", "audio_s", "underrun_ms"}
SUMMARY_KEYS = {
    "requests",
    "ok",
    "failed",
    "wall_s",
    "requests_per_s",
    "audio_s_per_s",
    "ttfp_ms",
    "e2e_ms",
    "rtf",
    "underrun_ms",
    "wait_ms",
    "underruns",
    "continuity",
    "client_cores",
    "errors",
}


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def bench(url: str, *flags: str) -> int:
    return run(parse("--base-url", url, "--num-requests", "4", "--max-concurrency", "2", *flags))


def bench_json(path: Path, url: str, *flags: str) -> tuple[int, dict[str, Any]]:
    out = path / "run.json"
    return bench(url, "--out", str(out), *flags), orjson.loads(out.read_bytes())


def test_document_has_config_summary_and_a_record_for_every_request(server: str, tmp_path: Path) -> None:
    code, document = bench_json(tmp_path, f"{server}/good/v1", "--label", "a label", "--extra", '{"frames": 5}')
    assert code == 0
    assert set(document) == {"config", "summary", "records"}
    assert set(document["summary"]) == SUMMARY_KEYS
    assert [set(record) for record in document["records"]] == [RECORD_KEYS] * 4
    assert all(record["ok"] and record["audio_s"] == 0.4 for record in document["records"])
    config = document["config"]
    assert (config["model"], config["label"], config["request_rate"]) == ("test-voice", "a label", "inf")
    assert test_server.seen[-1]["model"] == "test-voice"
    assert test_server.seen[-1]["extra"] == {"frames": 5}


def test_table_is_printed(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(f"{server}/good") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "first audio (ms)" in text
    assert "4 ok, 0 failed of 4" in text


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize("response_format", ["pcm", "wav"])
def test_every_form_of_speech_is_understood(
    server: str, tmp_path: Path, response_format: str, stream_format: str
) -> None:
    form = ("--response-format", response_format, "--stream-format", stream_format)
    code, document = bench_json(tmp_path, f"{server}/bare", "--model", "m", *form)
    assert code == 0
    assert {record["audio_s"] for record in document["records"]} == {test_server.BARE_BYTES / 48000}


def test_open_loop(server: str, tmp_path: Path) -> None:
    code, document = bench_json(tmp_path, f"{server}/good", "--request-rate", "200", "--seed", "4")
    assert (code, document["config"]["request_rate"], document["summary"]["ok"]) == (0, 200.0, 4)


def test_failures_are_grouped_shown_and_give_exit_code_2(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = bench_json(tmp_path, f"{server}/abort-after-1")
    assert code == 2
    assert document["summary"]["errors"] == {"connection closed before the response ended": 3}
    assert document["summary"]["ok"] == 1
    assert "3 failed: connection closed before the response ended" in capsys.readouterr().out


def test_underruns_are_counted(server: str, tmp_path: Path) -> None:
    code, document = bench_json(tmp_path, f"{server}/stall")
    assert code == 0
    assert document["summary"]["underruns"] == 4
    assert all(record["underrun_ms"] > 1 for record in document["records"])


def test_warm_up_is_not_counted(server: str, tmp_path: Path) -> None:
    before = len(test_server.seen)
    _, document = bench_json(tmp_path, f"{server}/good", "--warmup", "3")
    assert len(test_server.seen) - before == 7
    assert len(document["records"]) == 4


def test_failed_warm_up_ends_the_run(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(test_server.seen)
    assert bench(f"{server}/silent", "--warmup", "2") == 1
    assert len(test_server.seen) - before == 2
    assert "a warm-up request failed: the response held no audio" in capsys.readouterr().err


def test_ramp_stops_at_the_level_with_underruns_and_draws_it(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "ramp.png"
    code, document = bench_json(tmp_path, f"{server}/stall-after-4", "--ramp", "1,2,4", "--chart", str(chart))
    assert code == 0
    assert set(document) == {"config", "levels", "largest_clean", "records"}
    assert [(level["level"], level["clean"]) for level in document["levels"]] == [(1, True), (2, False)]
    assert set(document["levels"][0]["summary"]) == SUMMARY_KEYS
    assert document["largest_clean"] == 1
    assert [len(records) for records in document["records"]] == [4, 4]
    assert "largest clean level: 1 concurrent streams" in capsys.readouterr().out
    assert Image.open(chart).format == "PNG"


def test_ramp_over_rates_with_failures_gives_exit_code_2(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--ramp", "100.5,200", "--ramp-by", "rate")
    code, document = bench_json(tmp_path, f"{server}/refuse-after-0", *flags)
    assert (code, document["largest_clean"], len(document["levels"])) == (2, None, 1)
    assert document["levels"][0]["level"] == 100.5
    out = capsys.readouterr().out
    assert "no level was clean" in out
    assert "100.5 requests per second: 1 failed: HTTP 429: queue is full, 1" in out


def test_baseline_serves_as_much_audio_in_turn_with_the_server(server: str, tmp_path: Path) -> None:
    code, document = bench_json(tmp_path, f"{server}/good", "--baseline", "--response-format", "pcm")
    assert code == 0
    assert set(document) == {"config", "summary", "records", "baseline", "comparison"}
    baseline = document["baseline"]
    assert len(baseline["records"]) == len(document["records"]) == 4
    assert {record["audio_s"] for record in baseline["records"]} == {0.4}
    ours, bare = document["summary"]["ttfp_ms"]["p50"], baseline["summary"]["ttfp_ms"]["p50"]
    assert document["comparison"]["ttfp_difference_ms"] == pytest.approx(ours - bare)
    assert document["comparison"]["ttfp_ratio"] == pytest.approx(ours / bare)


def test_baseline_needs_a_server_that_answers(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(f"{server}/silent", "--baseline") == 1
    assert "the first request failed: the response held no audio" in capsys.readouterr().err


def test_unreachable_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for model in ((), ("--model", "m")):
        assert bench(url, *model) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "Connection refused" in error and f"--base-url {url}" in error


@pytest.mark.parametrize(
    ("what", "flags", "message"),
    [
        ("two-models", (), "lists 2 models (a, b): choose one with --model"),
        ("no-models", (), "lists 0 models"),
        ("odd-models", (), "/v1/models is no list of models: give --model"),
        ("good", ("--chart", "x.png"), "--chart draws the levels of a ramp"),
        ("good", ("--ramp", "1,1.5"), "whole numbers"),
        ("good", ("--ramp", "1,8"), "--num-requests 4 cannot fill --ramp 8"),
        ("good", ("--prompts", "no-such-file"), "--prompts: "),
        ("good", ("--base-url", "localhost:80"), "--base-url: base URL 'localhost:80'"),
    ],
)
def test_run_that_cannot_be_made_says_why(
    server: str, capsys: pytest.CaptureFixture[str], what: str, flags: tuple[str, ...], message: str
) -> None:
    assert bench(f"{server}/{what}", *flags) == 1
    assert message in capsys.readouterr().err


def test_prompts_come_from_the_file(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first line\n\nsecond line\n")
    assert bench(f"{server}/good", "--max-concurrency", "1", "--prompts", str(prompts)) == 0
    inputs = [body["input"] for body in test_server.seen[-4:]]
    assert inputs == ["first line", "second line"] * 2
    prompts.write_text("\n \n")
    assert bench(f"{server}/good", "--prompts", str(prompts)) == 1
    assert "has no lines" in capsys.readouterr().err

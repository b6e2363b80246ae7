from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
import torch
from safetensors.torch import load_file

from pega_omni_plugin.bench import compare
from pega_omni_plugin.bench.client import Client
from pega_omni_plugin.bench.compare import (
    EXIT_NOT_RUN,
    EXIT_OK,
    EXIT_SLOW_MACHINE,
    CompareError,
    Side,
    commands,
    main,
    parser,
    speech_requests,
    write_checkpoint,
)
from pega_omni_plugin.bench.processes import Command
from pega_omni_plugin.engine.config import load_stage_file, parse_options
from pega_omni_plugin.engine.program import Admission, Speech
from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.front import Qwen3TtsFront
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from tests.bench import virtual_time
from tests.bench.virtual_time import MS, VirtualClock

ROOT = Path(__file__).parents[2]
QUICK = ("qwen3-tts", "--rounds", "2", "--requests", "2", "--max-streams", "2", "--frames", "4")


def fake(name: str, undecoded: int, delay_s: float) -> Command:
    arguments = [sys.executable, "-m", "tests.bench.fake_tts", "{port}", str(undecoded), str(delay_s)]
    return Command(name, arguments, "/readyz", {"PYTHONPATH": str(ROOT)})


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Command]:
    """The two servers that the command starts; a test may change them."""
    servers = {"theirs": fake("theirs", 1, 0.02), "ours": fake("ours", 0, 0.0)}
    monkeypatch.setattr(compare, "commands", lambda *args: (servers["theirs"], servers["ours"]))
    monkeypatch.setattr(compare, "write_checkpoint", lambda folder: folder.mkdir())
    monkeypatch.setattr(compare.tempfile, "tempdir", str(tmp_path))
    return servers


def logs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.log"))


# Arguments


def test_the_defaults_are_the_documented_run() -> None:
    args = parser().parse_args(["qwen3-tts"])
    assert (args.frames, args.rounds, args.requests, args.max_streams) == (64, 2, 12, 64)
    assert (args.checkpoint, args.anyway, args.json, args.profile) == (None, False, None, "balanced")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "family"),
        (["piper"], "invalid choice: 'piper'"),
        (["qwen3-tts", "--checkpoint", "/nowhere"], "/nowhere/config.json does not exist"),
        (["qwen3-tts", "--max-streams", "65"], "at most 64"),
        (["qwen3-tts", "--rounds", "0"], "at least 1"),
        (["qwen3-tts", "--json", "/nowhere/out.json"], "no such directory"),
        (["qwen3-tts", "--profile", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(flags)
    assert message in capsys.readouterr().err


# What is served


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "checkpoint"
    write_checkpoint(folder)
    return folder


def test_only_the_end_and_the_predictors_depth_differ_from_the_tiny_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    tiny.write(tmp_path)
    before, after = load_file(tmp_path / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    missing = before.keys() - after.keys()
    assert after.keys() <= before.keys()
    assert missing
    assert all(name.startswith("talker.code_predictor.model.layers.1.") for name in missing)
    assert [name for name in after if not torch.equal(before[name], after[name])] == ["talker.codec_head.weight"]
    rows = (before["talker.codec_head.weight"] != after["talker.codec_head.weight"]).nonzero()
    assert rows.tolist() == [[2150, 0]]


def test_speech_of_the_checkpoint_lasts_until_it_is_cut(checkpoint: Path) -> None:
    options = Qwen3TtsOptions(positions=512)
    program = Qwen3TtsProgram.load(checkpoint, options, {}, slots=4)
    front = Qwen3TtsFront(checkpoint, options, "vivian")
    speech = [Speech(compare.TEXT, "vivian", seed, extra={"max_new_tokens": 64}) for seed in range(4)]
    program.prefill([Admission(slot, one, front.prepare(one)) for slot, one in enumerate(speech)])
    lengths = np.zeros(4, int)
    for frame in range(64):
        outputs = program.step([0, 1, 2, 3])
        lengths += [len(output.pcm) for output in outputs]
        assert [output.finish for output in outputs] == [None if frame < 63 else "length"] * 4
    assert lengths.tolist() == [64 * compare.FRAME_SAMPLES] * 4


def test_both_sides_have_the_same_seats_and_their_own_settings(tmp_path: Path) -> None:
    theirs, ours = commands(tmp_path, tmp_path / "checkpoint", "ttfa")
    config = load_stage_file(tmp_path / "ours.yaml")
    assert (config.program, config.slots, config.profile) == ("qwen3_tts", compare.SEATS, "ttfa")
    assert parse_options(config) == Qwen3TtsOptions()
    own = compare.yaml.safe_load((compare.STAGE_CONFIGS / "upstream_qwen3_tts.yaml").read_text())
    served = compare.yaml.safe_load((tmp_path / "theirs.yaml").read_text())
    assert [stage.pop("max_num_seqs") for stage in served["stages"]] == [compare.SEATS] * 2
    for stage in own["stages"]:
        del stage["max_num_seqs"]
    assert served == own
    for side in (theirs, ours):
        assert side.arguments[side.arguments.index("--deploy-config") + 1] == str(tmp_path / f"{side.name}.yaml")
        assert str(tmp_path / "checkpoint") in side.arguments
    # Our models are off in theirs, and nothing is said in ours.
    assert theirs.environment == {"VLLM_PLUGINS": "vllm_omni_register_models,pega_platform"}
    assert ours.environment == {}


def test_requests_ask_for_raw_audio_as_it_is_made() -> None:
    body = orjson.loads(speech_requests(64).body(0))
    assert (body["response_format"], body["stream"], body["stream_format"]) == ("pcm", True, "audio")
    assert (body["voice"], body["language"], body["max_new_tokens"]) == ("vivian", "English", 64)


# Measuring


def side(url: str, samples: int, clock: Any = None) -> Side:
    requests = speech_requests(4)
    return Side("theirs", Client(url), requests, samples, **({"clock": clock} if clock else {}))


def test_the_first_request_of_each_caller_comes_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int, int]] = []

    async def speak(client: Any, requests: Any, index: int, due_ns: int, clock: VirtualClock, timeout_s: float) -> int:
        sent.append((index, due_ns // MS, clock.now() // MS))
        await asyncio.sleep(0.1)
        return index

    monkeypatch.setattr(compare, "speak", speak)
    virtual_time.run(side("http://127.0.0.1:1", 0, VirtualClock()).level(3, 5, stagger_ns=10 * MS))
    assert sent == [(0, 0, 0), (1, 10, 10), (2, 20, 20), (3, 100, 100), (4, 110, 110)]


def test_audio_of_another_length_ends_the_run(server: str) -> None:
    async def level(samples: int) -> None:
        one = side(f"{server}/good", samples)
        try:
            await one.whole_level(2, 4)
        finally:
            one.client.close()

    asyncio.run(level(5 * compare.FRAME_SAMPLES))
    with pytest.raises(CompareError, match="theirs: speech has 9600 samples, expected 7680"):
        asyncio.run(level(4 * compare.FRAME_SAMPLES))


def test_a_failed_request_ends_the_run(server: str) -> None:
    one = side(f"{server}/refuse", 1)
    with pytest.raises(CompareError, match="theirs: a request failed with 1 at once: HTTP 429: queue is full"):
        asyncio.run(one.whole_level(1, 1))


# The whole command, against servers that are made up


def test_a_run_measures_both_sides_and_leaves_nothing_behind(
    fakes: dict[str, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main([*QUICK, "--json", str(out)]) == EXIT_OK
    document = orjson.loads(out.read_bytes())
    assert (document["checkpoint"], document["frames"], document["slow_machine"]) == ("tiny", 4, [])
    assert list(document["levels"]) == ["1", "2", "4"]
    level = document["levels"]["4"]
    # Two rounds of as many requests as fill the level twice.
    assert [level[name]["requests"] for name in ("theirs", "ours")] == [16, 16]
    assert level["theirs"]["ttfp_ms"]["p50"] >= 20 > level["ours"]["ttfp_ms"]["p50"]
    assert level["ratios"]["first_audio_p50"] > 1
    assert set(level["processor_ms_per_frame"]) == set(document["idle_cores"]) == {"theirs", "ours"}
    assert document["most_streams"]["played at once"] == {"theirs": 2, "ours": 2, "ratio": 1.0}
    output = capsys.readouterr()
    assert "streams, played 2 s later" in output.out
    order = [line for line in output.err.splitlines() if line.startswith("round")]
    assert order[:2] == ["round 1: 1 at once, theirs", "round 1: 1 at once, ours"]
    assert order[6:8] == ["round 2: 1 at once, ours", "round 2: 1 at once, theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert psutil.Process().children() == []


def test_a_slow_machine_is_refused(
    fakes: dict[str, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["theirs"] = fake("theirs", 1, 0.15)
    out = tmp_path / "out.json"
    assert main([*QUICK, "--rounds", "1", "--json", str(out)]) == EXIT_SLOW_MACHINE
    document = orjson.loads(out.read_bytes())
    assert len(document["slow_machine"]) == 2
    assert [level["ratios"] for level in document["levels"].values()] == [None] * 3
    assert document["most_streams"] is None
    assert "no ratios" in capsys.readouterr().out


def test_a_slow_machine_is_compared_anyway_and_marked(
    fakes: dict[str, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["theirs"] = fake("theirs", 1, 0.15)
    out = tmp_path / "out.json"
    assert main([*QUICK, "--rounds", "1", "--anyway", "--json", str(out)]) == EXIT_OK
    document = orjson.loads(out.read_bytes())
    assert len(document["slow_machine"]) == 2
    assert document["levels"]["1"]["ratios"]["first_audio_p50"] > 1
    assert document["most_streams"]
    shown = capsys.readouterr().out
    assert "ON A SLOW MACHINE" in shown
    assert "not to be quoted" in shown


def test_sides_that_make_different_audio_are_not_compared(
    fakes: dict[str, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["ours"] = fake("ours", 2, 0.0)
    assert main(list(QUICK)) == EXIT_NOT_RUN
    error = capsys.readouterr().err
    assert "ours: speech has 3840 samples, expected 7680" in error
    (folder,) = tmp_path.iterdir()
    assert f"server logs: {folder}" in error
    assert logs(folder) == ["ours.log", "theirs.log"]
    assert psutil.Process().children() == []


def test_a_server_that_does_not_start_ends_the_run_and_the_other_server(
    fakes: dict[str, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["ours"] = Command("ours", [sys.executable, "-c", "raise SystemExit('no memory')"], "/readyz", {})
    assert main(list(QUICK)) == EXIT_NOT_RUN
    error = capsys.readouterr().err
    assert "ours: the server ended by itself\nno memory" in error
    assert "server logs:" in error
    assert psutil.Process().children() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_both_servers(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        "from tests.bench.test_compare import fake, compare\n"
        "compare.commands = lambda *args: (fake('theirs', 1, 5.0), fake('ours', 0, 0.0))\n"
        "compare.write_checkpoint = lambda folder: folder.mkdir()\n"
        f"compare.main({list(QUICK)!r})\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("warming up theirs"):
                break
        time.sleep(0.3)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (-number if number == signal.SIGINT else 128 + number)
    assert "compare: not finished; server logs:" in error
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


# The real thing


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_real_servers_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--rounds", "1", "--requests", "2", "--frames", "16", "--max-streams", "2", "--anyway", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "pega_omni_plugin.bench.compare", "qwen3-tts", *flags],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == EXIT_OK, done.stderr
    document = orjson.loads(out.read_bytes())
    for callers, level in document["levels"].items():
        assert level["theirs"]["failed"] == level["ours"]["failed"] == 0
        assert level["ratios"]["first_audio_p50"] > 1, callers
    assert max(document["idle_cores"].values()) < 0.5

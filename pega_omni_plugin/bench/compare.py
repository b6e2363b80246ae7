"""``python -m pega_omni_plugin.bench.compare qwen3-tts``: vLLM-Omni's own pipeline and our program, in turn.

One tiny checkpoint is served by both, each as a real ``vllm serve --omni``. Both servers are up all the time and one of
them is idle, which costs less than a tenth of a core (the run measures it, and says if it is more); they are measured
level by level in turn, so that a machine which becomes slower does so for both.

All speech has the same length, so that both make the same audio: the checkpoint's end of speech is never drawn, and
``max_new_tokens`` ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pega_omni_plugin.bench.arguments import natural, positive, writable
from pega_omni_plugin.bench.client import Client
from pega_omni_plugin.bench.comparison import WAITS_MS, Search, level_ratios, remarks, slow_machine, table
from pega_omni_plugin.bench.load import Clock, Load, WallClock, run_load
from pega_omni_plugin.bench.processes import Command, ServerFailed, ServerProcess
from pega_omni_plugin.bench.report import Measured, write_json
from pega_omni_plugin.bench.requests import Record, SpeechRequests, speak
from pega_omni_plugin.engine.config import STAGE_CONFIGS

EXIT_OK, EXIT_NOT_RUN, EXIT_SLOW_MACHINE = 0, 1, 3

LEVELS = (1, 2, 4)
"""Callers at once, each asking again when it is served."""

SAMPLE_RATE, FRAME_SAMPLES = 24_000, 1920

SEATS = 64
"""Streams that both servers take at once; vLLM-Omni's own deploy file for this model has as many."""

ROUNDS_OF_STREAMS = 3
STAGGER_NS = 10_000_000
"""The search for the most streams: each level is three streams a caller, the first of all callers 10 ms apart."""

READY_SECONDS = 300.0
REQUEST_SECONDS = 300.0

TEXT = "The last train to the coast leaves at seven in the morning, and the harbour is quiet until then."

END_WEIGHT = -20.0
"""Of the constant channel, in the logit of the end of speech of the checkpoint that is compared."""

RECORDED_PREDICTOR_LAYERS = 1
"""Of the code predictor in the checkpoint that the recorded figures are of. vLLM-Omni spends four fifths of a frame in
that predictor, so another depth could not be held against the record."""


class CompareError(Exception):
    """The run cannot be made, or its two sides did not do the same."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers and what it is asked for."""

    name: str
    client: Client
    requests: SpeechRequests
    samples: int
    clock: Clock = field(default_factory=WallClock)

    async def level(self, callers: int, requests: int, stagger_ns: int = 0) -> Measured:
        """``requests`` by ``callers``, each asking again when it is served, the first ones ``stagger_ns`` apart."""

        async def send(index: int, due_ns: int) -> Record:
            if index < callers:
                due_ns += index * stagger_ns
                await self.clock.sleep_until(due_ns)
            return await speak(self.client, self.requests, index, due_ns, self.clock, REQUEST_SECONDS)

        cpu_ns = _own_cpu_ns()
        done = await run_load(Load(requests, callers), send, self.clock)
        return Measured(done.records, done.wall_ns, _own_cpu_ns() - cpu_ns)

    async def whole_level(self, callers: int, requests: int) -> Measured:
        """A level in which every request must be served, with as many samples as were asked for."""
        measured = await self.level(callers, requests)
        for record in measured.records:
            if record.audio_s is None:
                raise CompareError(f"{self.name}: a request failed with {callers} at once: {record.error}")
            samples = round(record.audio_s * SAMPLE_RATE)
            if samples != self.samples:
                raise CompareError(
                    f"{self.name}: speech has {samples} samples, expected {self.samples}: the sides do not do the same "
                    "work (a checkpoint of your own must not end this text's speech so early: lower --frames)"
                )
        return measured


def merged(parts: Sequence[Measured]) -> Measured:
    """Several runs as one, one after the other."""
    return Measured(
        [record for part in parts for record in part.records],
        sum(part.wall_ns for part in parts),
        sum(part.cpu_ns for part in parts),
    )


def write_checkpoint(folder: Path) -> None:
    """A tiny CustomVoice checkpoint for comparing: speech never ends by itself, and a frame costs what it cost in the
    recorded figures."""
    from safetensors.torch import load_file, save_file

    from pega_omni_plugin.models.qwen3_tts import tiny

    tiny.write(folder, variant="custom_voice")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    predictor["num_hidden_layers"] = RECORDED_PREDICTOR_LAYERS
    predictor["layer_types"] = predictor["layer_types"][:RECORDED_PREDICTOR_LAYERS]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    layers = "talker.code_predictor.model.layers."
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith(layers) or int(name.removeprefix(layers).split(".")[0]) < RECORDED_PREDICTOR_LAYERS
    }
    # Channel 0 is the same positive constant at every position, and only this row reads it.
    tensors["talker.codec_head.weight"][talker["codec_eos_token_id"], 0] = END_WEIGHT
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def commands(folder: Path, checkpoint: Path, profile: str) -> tuple[Command, Command]:
    """Their server and ours; writes the stage files into ``folder``."""
    theirs = yaml.safe_load((STAGE_CONFIGS / "upstream_qwen3_tts.yaml").read_text(encoding="utf-8"))
    for stage in theirs["stages"]:
        stage["max_num_seqs"] = SEATS
    ours = yaml.safe_load((STAGE_CONFIGS / "qwen3_tts.yaml").read_text(encoding="utf-8"))
    ours["base_config"] = str(STAGE_CONFIGS / ours["base_config"])
    ours["stages"][0]["additional_config"] |= {"slots": SEATS, "profile": profile}

    def command(name: str, stages: Mapping[str, Any], ready_path: str, **environment: str) -> Command:
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(stages), encoding="utf-8")
        serve = [str(Path(sys.executable).parent / "vllm"), "serve", str(checkpoint), "--omni", "--host", "127.0.0.1"]
        serve += ["--port", "{port}", "--deploy-config", str(path), "--served-model-name", "tts"]
        serve += ["--disable-log-stats", "--disable-uvicorn-access-log"]
        return Command(name, serve, ready_path, environment)

    models_off = "vllm_omni_register_models,pega_platform"
    return command("theirs", theirs, "/health", VLLM_PLUGINS=models_off), command("ours", ours, "/readyz")


def speech_requests(frames: int) -> SpeechRequests:
    """Raw audio as it is made; both servers know these fields."""
    fields = {"language": "English", "max_new_tokens": frames, "stream": True, "stream_format": "audio"}
    return SpeechRequests("tts", [TEXT], "vivian", "pcm", "audio", SAMPLE_RATE, {}, fields)


async def _measure(args: argparse.Namespace, theirs: ServerProcess, ours: ServerProcess) -> dict[str, Any]:
    samples = args.frames * FRAME_SAMPLES
    clients = Client(theirs.url), Client(ours.url)
    # The last of their tokens is not decoded: one more gives as many frames.
    sides = (
        Side("theirs", clients[0], speech_requests(args.frames + 1), samples),
        Side("ours", clients[1], speech_requests(args.frames), samples),
    )
    servers = {"theirs": theirs, "ours": ours}
    try:
        return await _measure_sides(args, sides, servers)
    finally:
        for client in clients:
            client.close()


async def _measure_sides(
    args: argparse.Namespace, sides: tuple[Side, Side], servers: Mapping[str, ServerProcess]
) -> dict[str, Any]:
    for side in sides:
        _say(f"warming up {side.name}")
        for callers in LEVELS:
            await side.whole_level(callers, 2 * callers)

    measured: dict[tuple[str, int], list[Measured]] = {}
    processor_s: dict[tuple[str, int], float] = dict.fromkeys(itertools.product(servers, LEVELS), 0.0)
    idle_cores = dict.fromkeys(servers, 0.0)
    for turn in range(args.rounds):
        for callers in LEVELS:
            # Who is first changes from round to round.
            for side, other in ((sides, sides[::-1]), (sides[::-1], sides))[turn % 2]:
                _say(f"round {turn + 1}: {callers} at once, {side.name}")
                before = {name: server.cpu_seconds() for name, server in servers.items()}
                level = await side.whole_level(callers, max(args.requests, 2 * callers))
                spent = {name: server.cpu_seconds() - before[name] for name, server in servers.items()}
                processor_s[side.name, callers] += spent[side.name]
                idle_cores[other.name] = max(idle_cores[other.name], spent[other.name] / (level.wall_ns / 1e9))
                measured.setdefault((side.name, callers), []).append(level)
    summaries = {
        callers: {side.name: merged(measured[side.name, callers]).summary for side in sides} for callers in LEVELS
    }
    slow = slow_machine(summaries[1]["theirs"], args.frames)
    ratios = not slow or args.anyway
    most = await _most_streams(args, sides, servers) if ratios and args.max_streams else None
    return {
        "checkpoint": str(args.checkpoint) if args.checkpoint else "tiny",
        "frames": args.frames,
        "profile": args.profile,
        "requests": args.rounds * args.requests,
        "slow_machine": slow,
        "idle_cores": idle_cores,
        "levels": {
            str(callers): {
                **pair,
                "ratios": level_ratios(pair["theirs"], pair["ours"]) if ratios else None,
                "processor_ms_per_frame": {
                    name: 1e3 * processor_s[name, callers] / (args.frames * summary.ok)
                    for name, summary in pair.items()
                },
            }
            for callers, pair in summaries.items()
        },
        "most_streams": most,
    }


async def _most_streams(
    args: argparse.Namespace, sides: tuple[Side, Side], servers: Mapping[str, ServerProcess]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {listener: {} for listener in WAITS_MS}
    for side in sides:

        async def level(streams: int, side: Side = side) -> Measured:
            _say(f"{streams} streams, {side.name}")
            run = await side.level(streams, ROUNDS_OF_STREAMS * streams, STAGGER_NS)
            servers[side.name].check()
            return run

        search = Search(level)
        for listener, wait_ms in WAITS_MS.items():
            found[listener][side.name] = await search.most(args.max_streams, wait_ms)
    for row in found.values():
        row["ratio"] = row["ours"] / max(1, row["theirs"])
    return found


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="python -m pega_omni_plugin.bench.compare",
        description="Serve one checkpoint by vLLM-Omni's own pipeline and by this package, on the CPU, and compare. "
        "Exit status 3 if their side is too slow for its recorded figures, 1 if the run could not be made.",
    )
    made.add_argument("family", choices=("qwen3-tts",))
    made.add_argument(
        "--checkpoint", type=_directory, metavar="DIR", help="of CustomVoice (default: a tiny one, made for it)"
    )
    made.add_argument("--frames", type=positive, default=64, help="of 80 ms in every speech (%(default)s)")
    made.add_argument("--rounds", type=positive, default=2, help="times that both are measured in turn (%(default)s)")
    made.add_argument("--requests", type=positive, default=12, help="per level and round (%(default)s)")
    made.add_argument(
        "--max-streams", type=_streams, default=SEATS, help="where the search for the most ends; 0: none (%(default)s)"
    )
    made.add_argument(
        "--profile", choices=("ttfa", "balanced", "throughput"), default="balanced", help="ours (%(default)s)"
    )
    made.add_argument("--anyway", action="store_true", help="ratios even if their side is too slow, marked so")
    made.add_argument("--json", type=writable, metavar="FILE", help="all figures")
    return made


def run(args: argparse.Namespace) -> int:
    """Make the run; returns the exit status. Logs stay where a failure says they are."""
    folder = Path(tempfile.mkdtemp(prefix="pega-compare-"))
    try:
        document = _serve_and_measure(args, folder)
    except (CompareError, ServerFailed) as error:
        print(f"compare: {error}\nserver logs: {folder}", file=sys.stderr)
        return EXIT_NOT_RUN
    except BaseException:
        print(f"compare: not finished; server logs: {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)
    console = Console(markup=False, highlight=False)
    console.print(table(document))
    for line in remarks(document, args.anyway):
        console.print(line)
    if args.json:
        write_json(args.json, document)
    return EXIT_SLOW_MACHINE if document["slow_machine"] and not args.anyway else EXIT_OK


def _serve_and_measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    checkpoint = args.checkpoint
    if checkpoint is None:
        checkpoint = folder / "checkpoint"
        write_checkpoint(checkpoint)
    theirs, ours = commands(folder, checkpoint.resolve(), args.profile)
    _say("starting theirs")
    with ServerProcess(theirs, folder) as their_server:
        their_server.wait_until_ready(READY_SECONDS)
        _say("starting ours")
        with ServerProcess(ours, folder) as our_server:
            our_server.wait_until_ready(READY_SECONDS)
            return asyncio.run(_measure(args, their_server, our_server))


def _own_cpu_ns() -> int:
    times = os.times()
    return round((times.user + times.system) * 1e9)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _directory(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"no checkpoint: {path / 'config.json'} does not exist")
    return path


def _streams(text: str) -> int:
    value = natural(text)
    if value > SEATS:
        raise argparse.ArgumentTypeError(f"must be at most {SEATS}, the seats that both servers have")
    return value


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; SIGTERM ends it as Ctrl-C does, servers included."""
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())

"""``pega-omni bench speech``: load on ``POST /v1/audio/speech`` and what listeners would have heard."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from pega_omni_plugin.bench.arguments import add_arguments, config
from pega_omni_plugin.bench.baseline import baseline_server
from pega_omni_plugin.bench.chart import Point, draw_ramp
from pega_omni_plugin.bench.client import Client, RequestFailed
from pega_omni_plugin.bench.load import Clock, Load, WallClock, run_load, run_ramp
from pega_omni_plugin.bench.playback import Playback
from pega_omni_plugin.bench.report import (
    Measured,
    Summary,
    compare,
    comparison_table,
    ramp_table,
    remarks,
    summary_table,
    write_json,
)
from pega_omni_plugin.bench.requests import SPEECH_PATH, Record, SpeechRequests, speak, synthetic_prompts
from pega_omni_plugin.bench.streams import SAMPLE_BYTES, StreamError

__all__ = ["add_arguments", "run"]

EXIT_OK, EXIT_NOT_RUN, EXIT_REQUEST_FAILED = 0, 1, 2

Send = Callable[[int, int], Awaitable[Record]]


class BenchError(Exception):
    """The run cannot be made; the message is one sentence for whoever asked for it."""


def run(args: argparse.Namespace) -> int:
    """Make the run that ``args`` describe; returns the exit code."""
    try:
        return asyncio.run(_run(args))
    except BenchError as error:
        print(f"pega-omni bench speech: {error}", file=sys.stderr)
        return EXIT_NOT_RUN


@dataclass(frozen=True, slots=True)
class _Bench:
    """A run's means: the server, its requests, and where the report goes."""

    client: Client
    requests: SpeechRequests
    load: Load
    timeout_s: float
    label: str
    clock: Clock = field(default_factory=WallClock)
    console: Console = field(default_factory=lambda: Console(markup=False, highlight=False))

    def to(self, client: Client) -> Send:
        """What sends the i-th request to a server and measures it."""
        return lambda index, due_ns: speak(client, self.requests, index, due_ns, self.clock, self.timeout_s)

    async def warm_up(self, client: Client, count: int) -> None:
        """Make ``count`` requests all at once and forget them; raises ``BenchError`` if one fails."""
        done = await run_load(Load(count, count), self.to(client), self.clock)
        for record in done.records:
            if not record.ok:
                raise BenchError(f"a warm-up request failed: {record.error}")

    async def measure(self, load: Load, send: Send) -> Measured:
        """Run ``load``; times it and this process."""
        cpu_ns = time.process_time_ns()
        done = await run_load(load, send, self.clock)
        return Measured(done.records, done.wall_ns, time.process_time_ns() - cpu_ns)

    async def probe(self) -> Playback:
        """Make one request and return what it played."""
        stream = self.requests.stream()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.client.post(SPEECH_PATH, self.requests.body(0), stream)
            stream.finish()
        except (RequestFailed, StreamError, TimeoutError) as error:
            raise BenchError(f"the first request failed: {error or 'timed out'}") from error
        return stream.playback

    def show(self, summary: Summary, label: str) -> None:
        self.console.print(summary_table(summary, label))
        self.say(remarks(summary))

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.print(line)


async def _run(args: argparse.Namespace) -> int:
    _check(args)
    prompts = _prompts(args)
    try:
        client = Client(args.base_url)
    except ValueError as error:
        raise BenchError(f"--base-url: {error}") from error
    try:
        requests = SpeechRequests(
            model=await _model(args, client),
            prompts=prompts,
            voice=args.voice,
            response_format=args.response_format,
            stream_format=args.stream_format,
            sample_rate=args.sample_rate,
            extra=args.extra,
            fields=args.body,
        )
        load = Load(args.num_requests, args.max_concurrency, args.request_rate, args.seed)
        bench = _Bench(client, requests, load, args.timeout, args.label or requests.model)
        await bench.warm_up(client, args.warmup)
        mode = _ramp if args.ramp else _against_baseline if args.baseline else _single
        document, failed = await mode(args, bench)
    finally:
        client.close()
    if args.out:
        write_json(args.out, {"config": config(args, requests.model), **document})
    return EXIT_REQUEST_FAILED if failed else EXIT_OK


async def _single(args: argparse.Namespace, bench: _Bench) -> tuple[dict[str, Any], bool]:
    measured = await bench.measure(bench.load, bench.to(bench.client))
    bench.show(measured.summary, bench.label)
    return {"summary": measured.summary, "records": measured.records}, measured.summary.failed > 0


async def _against_baseline(args: argparse.Namespace, bench: _Bench) -> tuple[dict[str, Any], bool]:
    playback = await bench.probe()
    with baseline_server(playback.audio_bytes, playback.bytes_per_second // SAMPLE_BYTES) as url:
        bare = Client(url)
        try:
            await bench.warm_up(bare, max(1, args.warmup))
            send = (bench.to(bench.client), bench.to(bare))
            both = replace(bench.load, requests=2 * bench.load.requests)
            measured = await bench.measure(both, lambda index, due_ns: send[index % 2](index // 2, due_ns))
        finally:
            bare.close()
    server, baseline = measured.every_second(0), measured.every_second(1)
    comparison = compare(server.summary, baseline.summary)
    bench.show(server.summary, bench.label)
    bench.show(baseline.summary, "baseline")
    if comparison:
        bench.console.print(comparison_table(server.summary, baseline.summary, comparison))
    bare_document = {"summary": baseline.summary, "records": baseline.records}
    document = {
        "summary": server.summary,
        "records": server.records,
        "baseline": bare_document,
        "comparison": comparison,
    }
    return document, server.summary.failed + baseline.summary.failed > 0


async def _ramp(args: argparse.Namespace, bench: _Bench) -> tuple[dict[str, Any], bool]:
    by_rate = args.ramp_by == "rate"
    name = "requests per second" if by_rate else "concurrent streams"

    async def level(value: float) -> Measured:
        load = replace(bench.load, rate=value) if by_rate else replace(bench.load, concurrency=int(value))
        measured = await bench.measure(load, bench.to(bench.client))
        bench.say([f"{value:g} {name}: {'clean' if measured.summary.clean else 'not clean'}"])
        return measured

    runs, largest = await run_ramp(args.ramp, level, lambda measured: measured.summary.clean, bench.clock)
    levels = [(value, measured.summary) for value, measured in runs]
    bench.console.print(ramp_table(levels, name, bench.label))
    bench.say(f"{value:g} {name}: {remark}" for value, summary in levels for remark in remarks(summary))
    bench.say(["no level was clean" if largest is None else f"largest clean level: {largest:g} {name}"])
    if args.chart:
        how = "Poisson arrivals" if by_rate else "closed loop"
        subtitle = f"{how}, {bench.load.requests} requests a level, {args.response_format}, {args.stream_format}"
        points = [Point.of(value, summary) for value, summary in levels]
        draw_ramp(points, bench.label, subtitle, name).save(args.chart, format="PNG")
    document = {
        "levels": [{"level": value, "clean": summary.clean, "summary": summary} for value, summary in levels],
        "largest_clean": largest,
        "records": [measured.records for _, measured in runs],
    }
    return document, any(summary.failed for _, summary in levels)


def _check(args: argparse.Namespace) -> None:
    """What one flag alone cannot tell."""
    if args.chart and not args.ramp:
        raise BenchError("--chart draws the levels of a ramp: give --ramp too")
    if args.ramp and args.ramp_by == "concurrency":
        if not all(level.is_integer() for level in args.ramp):
            raise BenchError("--ramp: levels of concurrency are whole numbers")
        if args.num_requests < args.ramp[-1]:
            raise BenchError(f"--num-requests {args.num_requests} cannot fill --ramp {args.ramp[-1]:g}: raise it")


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts is None:
        return synthetic_prompts(args.input_chars)
    try:
        lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--prompts: {error}") from error
    if not lines:
        raise BenchError(f"--prompts: {args.prompts} has no lines")
    return lines


async def _model(args: argparse.Namespace, client: Client) -> str:
    """The model to name; also finds out whether there is a server at all."""
    try:
        if args.model:
            await client.connect()
            return str(args.model)
        listing = await client.get_json("/v1/models")
        names = [str(entry["id"]) for entry in listing["data"]]
    except RequestFailed as error:
        raise BenchError(f"{error} (--base-url {args.base_url})") from error
    except (KeyError, TypeError) as error:
        raise BenchError("/v1/models is no list of models: give --model") from error
    if len(names) != 1:
        raise BenchError(f"the server lists {len(names)} models ({', '.join(names)}): choose one with --model")
    return names[0]

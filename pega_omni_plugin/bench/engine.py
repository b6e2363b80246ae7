"""``pega-omni bench engine``: what free-running streams do to those who arrive.

Serves the simulator from this process (our routes under uvicorn, the real engine process behind), lets ``--streams``
clients read long streams as fast as they come, and measures meanwhile a control call every 80 ms and a new short
request five times a second. The load and the new requests come from processes of their own, as in life.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from pega_omni_plugin.engine.config import ConfigError, find_stage_file, load_stage_file
from pega_omni_plugin.registration import program_directory, register

if TYPE_CHECKING:
    from pega_omni_plugin.engine.client import EngineClient

TICK_SECONDS = 0.08
"""A live frame: the pace at which a control call must come back."""

_ARRIVALS_PER_SECOND = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--stage-configs-path", default="sim", help="a stage file of the simulator (%(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="free-running streams (%(default)s)")
    parser.add_argument("--frames", type=int, default=3000, help="frames of each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON of the figures")


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit status."""
    try:
        config = find_stage_file(args.stage_configs_path)
        if load_stage_file(config).program != "sim":
            raise ConfigError(f"{config}: the load asks for frames, which only the simulator's options have")
    except ConfigError as error:
        print(f"pega-omni bench engine: {error}", file=sys.stderr)
        return 1
    register()
    figures = uvloop.run(_measure(args, config))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2))
    for phase, rows in figures.items():
        for what, row in rows.items():
            print(
                f"{phase:8} {what:14} p50 {row['p50']:8.2f}  p99 {row['p99']:8.2f}  max {row['max']:8.2f}  n {row['n']}"
            )
    return 0


async def _measure(args: argparse.Namespace, config: Path) -> dict[str, Any]:
    # vLLM takes seconds to import, and the command line imports this module.
    import uvicorn
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry

    from pega_omni_plugin.api.metrics import Metrics
    from pega_omni_plugin.api.routes import build_router
    from pega_omni_plugin.api.speech import SpeechService
    from pega_omni_plugin.engine.client import EngineClient, start_engine

    omni = start_engine(str(program_directory("sim")), str(config))
    client = await EngineClient.connect(omni)
    service = SpeechService(client, (client.info.model,), Metrics(CollectorRegistry(), client, client.info.model))
    await service.warm_up()
    app = FastAPI()
    app.state.pega = service
    app.include_router(build_router())
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        idle = await _phase(client, url, args.seconds)
        endless = 1_000_000
        load = await _bench(url, endless, args.streams, args.frames, "inf")
        await asyncio.sleep(3.0)
        busy = await _phase(client, url, args.seconds)
        load.terminate()
        await load.wait()
    finally:
        server.should_exit = True
        await serving
        await client.close()
        await asyncio.to_thread(omni.shutdown)
    return {"idle": idle, f"{args.streams} busy": busy}


async def _phase(client: EngineClient, url: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "arrivals.json"
        count = max(2, int(seconds * _ARRIVALS_PER_SECOND))
        arrivals = await _bench(url, count, 64, 10, str(_ARRIVALS_PER_SECOND), report)
        calls = []
        while arrivals.returncode is None:
            begun = time.perf_counter()
            await client.call("stats")
            calls.append((time.perf_counter() - begun) * 1e3)
            await asyncio.sleep(max(0.0, TICK_SECONDS - calls[-1] / 1e3))
        if arrivals.returncode != 0:
            raise RuntimeError(f"the arriving requests failed with status {arrivals.returncode}")
        first = [record["ttfp_ms"] for record in json.loads(report.read_text())["records"]]
    return {"control call": _row(calls), "first audio": _row(first)}


async def _bench(
    url: str, requests: int, concurrency: int, frames: int, rate: str, report: Path | None = None
) -> asyncio.subprocess.Process:
    arguments = ["bench", "speech", "--base-url", url, "--extra", json.dumps({"frames": frames})]
    arguments += ["--num-requests", str(requests), "--max-concurrency", str(concurrency), "--request-rate", rate]
    arguments += [] if report is None else ["--out", str(report)]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pega_omni_plugin.cli", *arguments, stdout=asyncio.subprocess.DEVNULL
    )


def _row(milliseconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(milliseconds, [50, 99], method="inverted_cdf")
    return {"p50": float(p50), "p99": float(p99), "max": max(milliseconds), "n": len(milliseconds)}

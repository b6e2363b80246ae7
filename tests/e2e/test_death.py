"""Processes that die: callers hear of it within seconds, supervisors see a status, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx

from tests.harness import Server, stage_file, vllm_serve

CALLERS = 8


def serve(folder: Path) -> Server:
    config = stage_file(folder, "sim", options={"step_base_us": 20_000})
    return vllm_serve(folder, "sim", "--deploy-config", str(config))


async def callers_until(server: Server, kill: int, *, stop_first: bool = False) -> list[float]:
    """Start streams, kill a process while they run; returns after how many seconds each caller had an error.

    With ``stop_first`` the process is frozen until a control call (one is made every second) hangs in it.
    """
    body = {"input": "hello", "response_format": "pcm", "extra": {"frames": 4000}}
    killed = 0.0
    hearing = asyncio.Event()

    async def caller(http: httpx.AsyncClient) -> float:
        try:
            async with http.stream("POST", server.url + "/v1/audio/speech", json=body) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_raw():
                    hearing.set()
        except httpx.TransportError:
            return time.monotonic() - killed
        raise AssertionError("a stream that lost its engine ended as if it were whole")

    async with httpx.AsyncClient(timeout=60) as http:
        tasks = [asyncio.create_task(caller(http)) for _ in range(CALLERS)]
        await hearing.wait()
        await asyncio.sleep(0.5)
        if stop_first:
            os.kill(kill, signal.SIGSTOP)
            await asyncio.sleep(2.5)
        killed = time.monotonic()
        os.kill(kill, signal.SIGKILL)
        return await asyncio.gather(*tasks)


def expect_death(server: Server, killed: float) -> None:
    status = server.process.wait(max(0.1, 10.0 - (time.monotonic() - killed)))
    assert status != 0
    assert server.survivors(10.0) == []


async def test_engine_killed(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        killed = time.monotonic()
        assert max(await callers_until(server, server.engine())) < 3.0
        late = httpx.post(server.url + "/v1/audio/speech", json={"input": "hello"}, timeout=5)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
        assert httpx.get(server.url + "/readyz", timeout=5).status_code == 503
        assert 'outcome="engine_dead"' in httpx.get(server.url + "/metrics", timeout=5).text
        expect_death(server, killed)


async def test_engine_killed_while_a_control_call_runs(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert max(await callers_until(server, server.engine(), stop_first=True)) < 3.0
        expect_death(server, time.monotonic())


async def test_api_process_killed(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert max(await callers_until(server, server.process.pid)) < 3.0
        expect_death(server, time.monotonic())


def test_sigterm_ends_everything_with_status_0(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert server.stop() == 0

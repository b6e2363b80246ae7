"""The simulator behind the stock Dynamo frontend, as the launch script starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.checks import eventually, metric
from tests.harness import Server, command_of, free_port, launch, stage_file

FRAME_BYTES = 3840
MODEL = "pega-omni-sim"
SLOTS = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    folder: Path = tmp_path_factory.mktemp("dynamo")
    config = stage_file(folder, "sim", slots=SLOTS, queue=2, profile="ttfa", options={"step_base_us": 10_000})
    status = free_port()
    arguments = ["--model", "sim", "--stage-configs-path", str(config)]
    with launch(folder, *arguments, DYN_SYSTEM_PORT=str(status)) as server:
        yield server, f"http://127.0.0.1:{status}"


def speech(text: str = "hello", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "voice": "alloy", "input": text, "response_format": "pcm", **fields}


def test_the_official_sdk_gets_whole_and_streamed_speech(stack: tuple[Server, str]) -> None:
    client = openai.OpenAI(base_url=f"{stack[0].url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    made = client.audio.speech.create(model=MODEL, voice="alloy", input="ten chars.", response_format="wav")
    body = made.read()
    assert body[:4] == b"RIFF"
    assert len(body) == 44 + 8 * FRAME_BYTES
    with client.audio.speech.with_streaming_response.create(
        model=MODEL, voice="alloy", input="ten chars.", response_format="pcm", extra_body={"extra": {"frames": 40}}
    ) as streamed:
        pieces = list(streamed.iter_bytes())
    assert sum(map(len, pieces)) == 40 * FRAME_BYTES
    assert len(pieces) > 3


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"voice": "nobody"}, 400, "nobody"),
        ({"input": ""}, 400, "input is empty"),
        ({"input": "a" * 4097}, 400, "4097"),
        ({"temprature": 1}, 400, "temprature"),
        ({"stream_format": "sse"}, 400, "stream_format"),
        ({"response_format": "exe"}, 400, "exe"),
        ({"extra": {"frames": 0}}, 400, "frames"),
        ({"model": "tts-0"}, 404, "Model not found"),
    ],
)
def test_refusals_keep_status_and_message(
    stack: tuple[Server, str], fields: dict[str, object], status: int, said: str
) -> None:
    answer = httpx.post(f"{stack[0].url}/v1/audio/speech", json=speech(**fields))
    assert answer.status_code == status
    assert said in answer.json()["message"]


async def test_a_full_queue_answers_429(stack: tuple[Server, str]) -> None:
    server, status = stack
    async with httpx.AsyncClient(timeout=60) as http:

        async def hold() -> None:
            async with http.stream("POST", f"{server.url}/v1/audio/speech", json=speech(extra={"frames": 4000})) as it:
                async for _ in it.aiter_raw():
                    pass

        held = [asyncio.create_task(hold()) for _ in range(SLOTS + 2)]
        await eventually(status, "pega_in_flight", SLOTS + 2)
        assert (await http.post(f"{server.url}/v1/audio/speech", json=speech())).status_code == 429
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    await eventually(status, "pega_in_flight", 0)


async def test_leaving_ends_the_request(stack: tuple[Server, str]) -> None:
    server, status = stack
    async with httpx.AsyncClient() as http:
        before = metric((await http.get(status + "/metrics")).text, "pega_requests_total", outcome="cancelled")
        async with http.stream("POST", f"{server.url}/v1/audio/speech", json=speech(extra={"frames": 4000})) as answer:
            await anext(answer.aiter_raw())
        await eventually(status, "pega_in_flight", 0)
        await eventually(status, "pega_engine_running", 0)
        after = metric((await http.get(status + "/metrics")).text, "pega_requests_total", outcome="cancelled")
    assert after == before + 1


def test_the_worker_reports_health(stack: tuple[Server, str]) -> None:
    assert httpx.get(stack[1] + "/health").json()["status"] == "ready"


async def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    config = stage_file(tmp_path, "sim", options={"step_base_us": 20_000})
    with launch(tmp_path, "--model", "sim", "--stage-configs-path", str(config)) as server:
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("POST", f"{server.url}/v1/audio/speech", json=speech(extra={"frames": 150})) as answer,
        ):
            pieces = answer.aiter_raw()
            read = len(await anext(pieces))
            server.process.send_signal(signal.SIGTERM)
            async for piece in pieces:
                read += len(piece)
        assert read == 150 * FRAME_BYTES
        assert server.process.wait(60) == 0


async def test_a_killed_worker_ends_its_callers_and_the_launch(tmp_path: Path) -> None:
    config = stage_file(tmp_path, "sim", options={"step_base_us": 20_000})
    with launch(tmp_path, "--model", "sim", "--stage-configs-path", str(config)) as server:
        workers = [pid for pid in server.family() if "-m pega_omni_plugin.dynamo" in command_of(pid)]
        killed = 0.0
        with pytest.raises(httpx.TransportError):
            async with (
                httpx.AsyncClient(timeout=60) as http,
                http.stream("POST", f"{server.url}/v1/audio/speech", json=speech(extra={"frames": 4000})) as answer,
            ):
                async for _ in answer.aiter_raw():
                    if not killed:
                        killed = time.monotonic()
                        os.kill(workers[0], signal.SIGKILL)
        assert time.monotonic() - killed < 3.0
        assert server.process.wait(10) != 0
        assert "worker 1 ended" in server.tail()


async def test_a_killed_engine_ends_its_callers_and_the_launch(tmp_path: Path) -> None:
    config = stage_file(tmp_path, "sim", options={"step_base_us": 20_000})
    with launch(tmp_path, "--model", "sim", "--stage-configs-path", str(config)) as server:
        killed = 0.0
        with pytest.raises(httpx.TransportError):
            async with (
                httpx.AsyncClient(timeout=60) as http,
                http.stream("POST", f"{server.url}/v1/audio/speech", json=speech(extra={"frames": 4000})) as answer,
            ):
                async for _ in answer.aiter_raw():
                    if not killed:
                        killed = time.monotonic()
                        os.kill(server.engine(), signal.SIGKILL)
        assert time.monotonic() - killed < 3.0
        assert server.process.wait(10) != 0

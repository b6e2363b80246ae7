"""The simulator under ``vllm serve --omni``: the real engine process, HTTP and the official SDK."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import socket

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.e2e.checks import BAD_BODIES, eventually, metric
from tests.e2e.conftest import QUEUE, SLOTS
from tests.harness import Server

FRAME_BYTES = 3840


def speech(text: str = "hello", **fields: object) -> dict[str, object]:
    return {"input": text, "response_format": "pcm", **fields}


def test_wav_has_the_planned_frames_behind_a_streaming_header(sim: Server) -> None:
    answer = httpx.post(f"{sim.url}/v1/audio/speech", json={"input": "ten chars."})
    assert answer.headers["content-type"] == "audio/wav"
    assert answer.content[4:8] == answer.content[40:44] == b"\xff\xff\xff\xff"
    assert len(answer.content) == 44 + 8 * FRAME_BYTES
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="int16")
    assert rate == 24_000
    assert np.abs(samples).max() == 8000


def test_audio_arrives_while_it_is_made(sim: Server) -> None:
    with httpx.stream("POST", f"{sim.url}/v1/audio/speech", json=speech(extra={"frames": 50})) as answer:
        pieces = list(answer.iter_raw())
    assert sum(map(len, pieces)) == 50 * FRAME_BYTES
    assert len(pieces[0]) == FRAME_BYTES
    assert len(pieces) > 3


def test_server_sent_events_end_with_usage(sim: Server) -> None:
    answer = httpx.post(f"{sim.url}/v1/audio/speech", json=speech("ten chars.", stream_format="sse"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(block.removeprefix("data: ")) for block in answer.text.strip().split("\n\n")]
    assert [event["type"] for event in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
    assert sum(len(base64.b64decode(event["audio"])) for event in events[:-1]) == 8 * FRAME_BYTES
    assert events[-1] == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 10, "output_tokens": 8, "total_tokens": 18, "finish_reason": "stop"},
    }


def test_the_official_sdk_reads_speech_models_and_errors(sim: Server) -> None:
    client = openai.OpenAI(base_url=f"{sim.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["pega-omni-sim"]
    made = client.audio.speech.create(model="pega-omni-sim", voice="alloy", input="ten chars.", response_format="pcm")
    assert len(made.read()) == 8 * FRAME_BYTES
    with client.audio.speech.with_streaming_response.create(
        model="pega-omni-sim", voice="verse", input="ten chars.", response_format="wav", speed=2.0
    ) as streamed:
        assert len(b"".join(streamed.iter_bytes())) == 44 + 4 * FRAME_BYTES
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(model="pega-omni-sim", voice="nobody", input="hello")
    assert refused.value.param == "voice"
    with pytest.raises(openai.NotFoundError) as missing:
        client.audio.speech.create(model="tts-0", voice="alloy", input="hello")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(("body", "status", "param"), [case[1:] for case in BAD_BODIES], ids=[c[0] for c in BAD_BODIES])
def test_bad_bodies_are_refused_by_name(sim: Server, body: bytes, status: int, param: str | None) -> None:
    answer = httpx.post(f"{sim.url}/v1/audio/speech", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"]


def test_the_server_goes_on_after_bad_bodies(sim: Server) -> None:
    assert len(httpx.post(f"{sim.url}/v1/audio/speech", json=speech(extra={"frames": 3})).content) == 3 * FRAME_BYTES


def test_voices_are_listed_as_objects_and_names(sim: Server) -> None:
    listed = httpx.get(f"{sim.url}/v1/audio/voices").json()
    assert "alloy" in listed["voice_names"]
    assert {"id": "alloy", "name": "Alloy", "language": None} in listed["voices"]


async def test_leaving_frees_the_slot(sim: Server) -> None:
    async with httpx.AsyncClient() as http:
        before = metric((await http.get(sim.url + "/metrics")).text, "pega_requests_total", outcome="cancelled")
        async with http.stream("POST", f"{sim.url}/v1/audio/speech", json=speech(extra={"frames": 4000})) as answer:
            await anext(answer.aiter_raw())
    await eventually(sim.url, "pega_in_flight", 0)
    await eventually(sim.url, "pega_engine_running", 0)
    text = httpx.get(sim.url + "/metrics").text
    assert metric(text, "pega_requests_total", outcome="cancelled") == before + 1


async def test_a_full_queue_answers_429_at_once(sim: Server) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as http, asyncio.TaskGroup() as group:

        async def hold(release: asyncio.Event) -> None:
            body = speech(extra={"frames": 4000})
            async with http.stream("POST", f"{sim.url}/v1/audio/speech", json=body) as answer:
                if answer.status_code == 200:
                    await release.wait()

        release = asyncio.Event()
        held = [group.create_task(hold(release)) for _ in range(SLOTS + QUEUE)]
        await eventually(sim.url, "pega_in_flight", SLOTS + QUEUE)
        refused = await http.post(f"{sim.url}/v1/audio/speech", json=speech())
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "engine_overloaded"
        release.set()
        for task in held:
            task.cancel()
    await eventually(sim.url, "pega_in_flight", 0)
    await eventually(sim.url, "pega_engine_running", 0)


async def test_200_callers_of_whom_50_leave_leak_no_slot(sim: Server) -> None:
    chance = random.Random(7)
    leavers = set(chance.sample(range(200), 50))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120) as http:

        async def one(number: int) -> int:
            body = speech(extra={"frames": chance.randint(5, 40)})
            async with http.stream("POST", f"{sim.url}/v1/audio/speech", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                read = 0
                async for piece in answer.aiter_raw():
                    read += len(piece)
                    if number in leavers:
                        return -1
                assert read == body["extra"]["frames"] * FRAME_BYTES  # type: ignore[index]
                return read

        answers = await asyncio.gather(*(one(number) for number in range(200)))
    assert sum(answer < 0 for answer in answers) == 50
    await eventually(sim.url, "pega_in_flight", 0)
    await eventually(sim.url, "pega_engine_running", 0)


async def test_who_never_reads_counts_as_in_flight_and_as_cancelled(sim: Server) -> None:
    """The engine is done with such a request long before its caller is."""
    frames = 1600  # more than the kernel keeps for a socket
    body = json.dumps(speech(extra={"frames": frames})).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(("127.0.0.1", sim.port))
        text = httpx.get(sim.url + "/metrics").text
        before = metric(text, "pega_requests_total", outcome="cancelled")
        heard = metric(text, "pega_audio_seconds_total")
        caller.sendall(head + body)
        await eventually(sim.url, "pega_in_flight", 1)
        await asyncio.sleep(frames * 0.011 + 2)
        await eventually(sim.url, "pega_engine_running", 0)
        assert metric(httpx.get(sim.url + "/metrics").text, "pega_in_flight") == 1
    await eventually(sim.url, "pega_in_flight", 0)
    text = httpx.get(sim.url + "/metrics").text
    assert metric(text, "pega_requests_total", outcome="cancelled") == before + 1
    assert metric(text, "pega_audio_seconds_total") - heard < frames * 0.08


def test_metrics_name_requests_steps_and_slots(sim: Server) -> None:
    text = httpx.get(sim.url + "/metrics").text
    assert metric(text, "pega_engine_up") == 1
    assert metric(text, "pega_engine_slots") == SLOTS
    for name in ("pega_first_audio_seconds_count", "pega_request_seconds_count", "pega_queue_seconds_count"):
        assert metric(text, name) > 0, name
    for name in ("pega_step_seconds_count", "pega_batch_rows_count"):
        assert metric(text, name) > 0, name
    assert metric(text, "pega_part_seconds_total", part="codec") > 0

from __future__ import annotations

import asyncio
import base64
import io
import wave
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI
from starlette.types import Message, Scope

from pega_omni_plugin.api.errors import ApiError
from pega_omni_plugin.api.prompts import MAX_RECORDING_BYTES
from pega_omni_plugin.api.routes import MAX_BODY_BYTES, MAX_RECORDING_BODY_BYTES, build_router
from pega_omni_plugin.api.speech import SpeechService
from pega_omni_plugin.engine.errors import EngineBusy, EngineDead, EngineTimeout, RequestFailed
from pega_omni_plugin.engine.wire import Ending
from tests.api.fake_engine import INFO, MODEL, FakeEngine, outcomes, pcm, serve

SPEECH = "/v1/audio/speech"


def application(service: SpeechService) -> FastAPI:
    app = FastAPI()
    app.include_router(build_router())
    app.state.pega = service
    return app


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(engine: FakeEngine) -> SpeechService:
    return serve(engine)


@pytest.fixture
async def http(service: SpeechService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


class Connection:
    """The server's side of one HTTP request, by hand: what is sent is kept, and the caller can hang up."""

    def __init__(self, app: FastAPI, body: bytes, *, whole: bool = True) -> None:
        self.sent: list[Message] = []
        self._app = app
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": not whole})

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    def send_more(self, body: bytes, *, last: bool = True) -> None:
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": not last})

    async def run(self) -> None:
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": SPEECH,
            "raw_path": SPEECH.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self._app(scope, self._messages.get, self._keep)

    async def _keep(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def finished(self) -> bool:
        """Whether the response was ended in order; a server breaks the connection otherwise."""
        return bool(self.sent) and not self.sent[-1].get("more_body", True)


async def test_speech_is_a_streamed_wav_by_default(http: httpx.AsyncClient) -> None:
    answer = await http.post(SPEECH, json={"model": MODEL, "input": "Hello.", "voice": "alloy"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    assert "content-length" not in answer.headers
    with wave.open(io.BytesIO(answer.content)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (24_000, 1, 2)
    assert len(answer.content) == 44 + 2 * 24_000


async def test_pcm_and_events_have_their_own_content_types(http: httpx.AsyncClient) -> None:
    pcm_answer = await http.post(SPEECH, json={"input": "Hello.", "response_format": "pcm"})
    assert pcm_answer.headers["content-type"] == "audio/pcm"
    sse = await http.post(SPEECH, json={"input": "Hello.", "response_format": "pcm", "stream_format": "sse"})
    assert sse.headers["content-type"].startswith("text/event-stream")
    events = [orjson.loads(line[len("data: ") :]) for line in sse.text.split("\n\n") if line]
    audio = b"".join(base64.b64decode(event.get("audio", "")) for event in events)
    assert audio == pcm_answer.content
    assert events[-1]["usage"] == {"input_tokens": 6, "output_tokens": 13, "total_tokens": 19, "finish_reason": "stop"}


BAD = [
    (b"not JSON", 400, None),
    (b"", 400, None),
    (b"\0", 400, None),
    (b'[{"input": "Hello."}]', 400, None),
    (b'"Hello."', 400, None),
    (b"{}", 400, "input"),
    (b'{"input": 3}', 400, "input"),
    (b'{"input": null}', 400, "input"),
    (b'{"input": "Hello.", "voice": 3}', 400, "voice"),
    (b'{"input": "Hello.", "stream": "yes"}', 400, "stream"),
    (b'{"input": "Hello.", "temperature": 1}', 400, "temperature"),
    (b'{"input": ""}', 400, "input"),
    (b'{"input": "  \\n"}', 400, "input"),
    (orjson.dumps({"input": "x" * 4097}), 400, "input"),
    (b'{"input": "a\\u0000b"}', 400, "input"),
    (b'{"input": "Hello.", "voice": "nobody"}', 400, "voice"),
    (b'{"input": "Hello.", "voice": "\\u0000"}', 400, "voice"),
    (b'{"input": "Hello.", "speed": 9}', 400, "speed"),
    (b'{"input": "Hello.", "response_format": "exe"}', 400, "response_format"),
    (b'{"input": "Hello.", "stream_format": "exe"}', 400, "stream_format"),
    (b'{"input": "Hello.", "extra": {"frames": 0}}', 400, "extra"),
    (b'{"input": "Hello.", "extra": {"frames": ' + b"[" * 1000 + b"]" * 1000 + b"}}", 400, "extra"),
    (b'{"input": "Hello.", "seed": -1}', 400, "seed"),
    (b'{"input": "Hello.", "model": "other"}', 404, "model"),
    (orjson.dumps({"input": "x" * 5_000_000}), 413, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=lambda value: repr(value)[:40])
async def test_a_bad_body_is_answered_in_openais_shape_and_the_next_request_works(
    http: httpx.AsyncClient, service: SpeechService, engine: FakeEngine, body: bytes, status: int, param: str | None
) -> None:
    answer = await http.post(SPEECH, content=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["code"] == ("model_not_found" if status == 404 else None)
    assert engine.spoken == []
    assert (await http.post(SPEECH, json={"input": "Hello."})).status_code == 200
    assert outcomes(service) == {"invalid": 1, "complete": 1}


async def test_the_content_type_of_the_request_does_not_matter(http: httpx.AsyncClient) -> None:
    answer = await http.post(SPEECH, content=b'{"input": "Hello."}', headers={"content-type": "text/plain"})
    assert answer.status_code == 200


async def test_a_body_up_to_the_limit_is_read_and_over_it_refused(http: httpx.AsyncClient) -> None:
    blank = b'{"input": "Hello."}'
    assert (await http.post(SPEECH, content=blank.ljust(MAX_BODY_BYTES))).status_code == 200
    assert (await http.post(SPEECH, content=blank.ljust(MAX_BODY_BYTES + 1))).status_code == 413


async def test_a_model_that_imitates_recordings_reads_longer_bodies() -> None:
    service = serve(FakeEngine(info=replace(INFO, clones="recording")))
    transport = httpx.ASGITransport(application(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        blank = b'{"input": "Hello."}'
        assert (await http.post(SPEECH, content=blank.ljust(MAX_RECORDING_BODY_BYTES))).status_code == 200
        assert (await http.post(SPEECH, content=blank.ljust(MAX_RECORDING_BODY_BYTES + 1))).status_code == 413
    # In base64, three bytes are four.
    assert MAX_RECORDING_BODY_BYTES > MAX_RECORDING_BYTES * 4 // 3


async def test_a_body_may_come_in_pieces(service: SpeechService) -> None:
    connection = Connection(application(service), b'{"input": "Hel', whole=False)
    connection.send_more(b'lo."}')
    await connection.run()
    assert connection.status == 200
    assert connection.finished


async def test_a_body_over_the_limit_is_refused_before_its_end(service: SpeechService) -> None:
    """No further piece ever comes: the answer does not wait for one."""
    connection = Connection(application(service), b" " * (MAX_BODY_BYTES + 1), whole=False)
    await connection.run()
    assert connection.status == 413


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry"),
    [
        (EngineBusy("full"), 429, "engine_overloaded", True),
        (EngineDead("gone"), 503, "engine_dead", True),
        (EngineTimeout("slow"), 504, "engine_timeout", False),
        (RequestFailed("bad row"), 500, None, False),
    ],
)
async def test_what_the_engine_refuses_has_its_own_status(
    http: httpx.AsyncClient, engine: FakeEngine, refusal: Any, status: int, code: str | None, retry: bool
) -> None:
    engine.refusal = refusal
    answer = await http.post(SPEECH, json={"input": "Hello."})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", code, None)
    assert str(refusal) in error["message"]
    assert answer.headers.get("retry-after") == ("1" if retry else None)


async def test_no_audio_is_an_error_before_any_audio_header(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = [Ending("stop", 0)]
    answer = await http.post(SPEECH, json={"input": "Hello."})
    assert answer.status_code == 500
    assert "no audio" in answer.json()["error"]["message"]


async def test_headers_leave_with_the_first_audio_and_not_before(service: SpeechService, engine: FakeEngine) -> None:
    engine.script = []
    connection = Connection(application(service), b'{"input": "Hello.", "response_format": "pcm"}')
    answering = asyncio.create_task(connection.run())
    await engine.entered.wait()
    await asyncio.sleep(0)
    assert connection.sent == []
    engine.streams[0].put(pcm(1))
    engine.streams[0].put(Ending("stop", 1))
    await answering
    assert [message.get("body") for message in connection.sent] == [None, b"\x01\x00", b""]


async def test_raw_audio_that_breaks_off_does_not_look_whole(service: SpeechService, engine: FakeEngine) -> None:
    engine.script = [pcm(1), RequestFailed("row is bad")]
    connection = Connection(application(service), b'{"input": "Hello."}')
    with pytest.raises(ApiError, match="row is bad"):
        await connection.run()
    assert connection.status == 200
    assert not connection.finished
    assert outcomes(service) == {"failed": 1}


async def test_events_that_break_off_say_so_and_end_in_order(service: SpeechService, engine: FakeEngine) -> None:
    engine.script = [pcm(1), EngineDead("gone")]
    connection = Connection(application(service), b'{"input": "Hello.", "stream_format": "sse"}')
    await connection.run()
    assert connection.finished
    last = orjson.loads(connection.sent[-2]["body"][len(b"data: ") :])
    assert (last["type"], last["error"]["code"]) == ("speech.audio.error", "engine_dead")
    assert outcomes(service) == {"engine_dead": 1}


async def test_hanging_up_in_the_queue_frees_the_request_at_once(service: SpeechService, engine: FakeEngine) -> None:
    engine.script = []
    connection = Connection(application(service), b'{"input": "Hello."}')
    answering = asyncio.create_task(connection.run())
    await engine.entered.wait()
    connection.hang_up()
    await answering
    assert engine.in_flight == 0
    assert connection.sent == []
    assert outcomes(service) == {"cancelled": 1}


async def test_hanging_up_in_the_middle_frees_the_request_at_once(service: SpeechService, engine: FakeEngine) -> None:
    engine.script = [pcm(1)]
    connection = Connection(application(service), b'{"input": "Hello."}')
    answering = asyncio.create_task(connection.run())
    await engine.entered.wait()
    connection.hang_up()
    await answering
    assert engine.in_flight == 0
    assert connection.status == 200
    assert not connection.finished
    assert outcomes(service) == {"cancelled": 1}


async def test_hanging_up_before_the_body_is_whole_is_no_request(service: SpeechService, engine: FakeEngine) -> None:
    connection = Connection(application(service), b'{"input"', whole=False)
    connection.hang_up()
    await connection.run()
    assert connection.sent == []
    assert engine.spoken == []
    assert outcomes(service) == {}


async def test_a_server_that_stops_cancels_its_requests(service: SpeechService, engine: FakeEngine) -> None:
    engine.script = [pcm(1)]
    answering = asyncio.create_task(Connection(application(service), b'{"input": "Hello."}').run())
    await engine.entered.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert engine.in_flight == 0
    assert outcomes(service) == {"cancelled": 1}


@pytest.mark.parametrize("body", [b'{"input": "Hello."}', b'{"input": "Hello.", "stream_format": "sse"}', b"{}"])
async def test_nothing_waits_for_a_caller_who_has_the_answer_and_stays(service: SpeechService, body: bytes) -> None:
    connection = Connection(application(service), body)
    await connection.run()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_models_lists_what_is_served(http: httpx.AsyncClient) -> None:
    answer = (await http.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [(model["id"], model["object"]) for model in answer["data"]] == [(MODEL, "model")]


async def test_voices_are_objects_and_plain_names(http: httpx.AsyncClient) -> None:
    answer = (await http.get("/v1/audio/voices")).json()
    assert answer["voices"][0] == {"id": "alloy", "name": "Alloy", "language": None}
    assert answer["voice_names"] == [voice.id for voice in INFO.voices]


@pytest.mark.parametrize("path", ["/health", "/livez"])
async def test_alive_until_the_engine_is_dead(http: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    assert (await http.get(path)).status_code == 200
    engine.dead = EngineDead("process 7 ended")
    answer = await http.get(path)
    assert (answer.status_code, answer.text) == (503, "process 7 ended")


async def test_ready_after_the_warm_up_and_until_the_engine_is_dead(
    http: httpx.AsyncClient, service: SpeechService, engine: FakeEngine
) -> None:
    assert (await http.get("/readyz")).status_code == 503
    await service.warm_up()
    assert (await http.get("/readyz")).status_code == 200
    engine.dead = EngineDead("process 7 ended")
    assert (await http.get("/readyz")).status_code == 503

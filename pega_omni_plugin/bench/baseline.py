"""The least that a Python server can do: a bare route that streams ready-made audio, in its own process.

Measured in turn with the server under test, it says how much of a figure is the machine, the HTTP stack and the client.
"""

from __future__ import annotations

import base64
import contextlib
import multiprocessing
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from pega_omni_plugin.bench.requests import SPEECH_PATH
from pega_omni_plugin.bench.streams import SAMPLE_BYTES

FRAME_SECONDS = 0.08
"""Audio in one message; the frame of all our speech models."""


def baseline_app(audio_bytes: int, sample_rate: int) -> Starlette:
    """A speech route that answers every request with ``audio_bytes`` of silence, a message a frame, at once."""
    frame_bytes = round(FRAME_SECONDS * sample_rate) * SAMPLE_BYTES
    pieces = [bytes(min(frame_bytes, audio_bytes - at)) for at in range(0, audio_bytes, frame_bytes)]

    async def speech(request: Request) -> StreamingResponse:
        body = orjson.loads(await request.body())
        audio = [_wav_header(sample_rate) + pieces[0], *pieces[1:]] if body["response_format"] == "wav" else pieces
        if body.get("stream_format") == "sse":
            return StreamingResponse(_events(audio), media_type="text/event-stream")
        return StreamingResponse(_each(audio), media_type=f"audio/{body['response_format']}")

    return Starlette(routes=[Route(SPEECH_PATH, speech, methods=["POST"])])


@contextlib.contextmanager
def baseline_server(audio_bytes: int, sample_rate: int) -> Iterator[str]:
    """Run ``baseline_app`` in a process of its own for the length of the block; gives its base URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        # The process inherits a listening socket: connections made before it is up wait, none is refused.
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(listener, audio_bytes, sample_rate), daemon=True
        )
        process.start()
        port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()


def _serve(listener: socket.socket, audio_bytes: int, sample_rate: int) -> None:
    config = uvicorn.Config(baseline_app(audio_bytes, sample_rate), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


async def _each(audio: list[bytes]) -> AsyncIterator[bytes]:
    for piece in audio:
        yield piece


async def _events(audio: list[bytes]) -> AsyncIterator[bytes]:
    for piece in audio:
        yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
    yield _event({"type": "speech.audio.done"})


def _event(event: dict[str, str]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _wav_header(sample_rate: int) -> bytes:
    unknown = 0xFFFFFFFF
    form = struct.Struct("<4sI4s4sIHHIIHH4sI")
    rate = (sample_rate, sample_rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES)
    return form.pack(b"RIFF", unknown, b"WAVE", b"fmt ", 16, 1, 1, *rate, b"data", unknown)

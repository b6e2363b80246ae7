"""A speech server for tests: what it does with a request is named by the first part of the path."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from pega_omni_plugin.bench.baseline import baseline_app

FRAME = bytes(3840)
FRAMES = 5
BARE_BYTES = 3840 * 2 + 1000

seen: list[dict[str, Any]] = []
"""Bodies of all speech requests, in order."""

_counts: Counter[str] = Counter()


async def _models(request: Request) -> Response:
    names = {"two-models": ["a", "b"], "no-models": []}.get(request.path_params["what"], ["test-voice"])
    if request.path_params["what"] == "odd-models":
        return JSONResponse({"models": []})
    return JSONResponse({"object": "list", "data": [{"id": name} for name in names]})


async def _speech(request: Request) -> Response:
    what = request.path_params["what"]
    body = orjson.loads(await request.body())
    seen.append(body)
    _counts[what] += 1
    name, _, number = what.partition("-after-")
    if number and _counts[what] <= int(number):
        name = "good"
    if name == "refuse":
        return JSONResponse({"error": {"message": f"queue is full, {_counts[what]}"}}, status_code=429)
    return StreamingResponse(_events() if body.get("stream_format") == "sse" else _audio(name))


async def _audio(name: str) -> AsyncIterator[bytes]:
    if name == "silent":
        return
    if name == "stall":
        yield FRAME
        await asyncio.sleep(0.4)
    if name == "slow":
        yield FRAME
        await asyncio.sleep(30)
    if name == "abort":
        yield FRAME
        raise ConnectionAbortedError("the engine is gone")
    yield FRAME * FRAMES


async def _events() -> AsyncIterator[bytes]:
    yield b"data: " + orjson.dumps({"type": "speech.audio.delta", "audio": base64.b64encode(FRAME).decode()}) + b"\n\n"


@contextmanager
def serving() -> Iterator[str]:
    """Run the server in a thread; gives the base URL, to which the behaviour is added."""
    app = Starlette(
        routes=[
            Mount("/bare", baseline_app(BARE_BYTES, 24000)),
            Route("/{what}/v1/models", _models),
            Route("/{what}/v1/audio/speech", _speech, methods=["POST"]),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()

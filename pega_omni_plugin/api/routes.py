"""The HTTP routes of a speech server. The application carries a ``SpeechService`` in ``app.state.pega``."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from pega_omni_plugin.api import errors
from pega_omni_plugin.api.errors import ApiError, BodyTooLarge
from pega_omni_plugin.api.prompts import MAX_RECORDING_BYTES
from pega_omni_plugin.api.requests import parse_json
from pega_omni_plugin.api.speech import Caller, CallerGone, SpeechService
from pega_omni_plugin.api.voice_routes import build_voice_router

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20

MAX_RECORDING_BODY_BYTES = MAX_BODY_BYTES + 4 * MAX_RECORDING_BYTES // 3
"""Where a recording may come along, in base64."""

SEND_SECONDS = 60.0
"""A reader that takes nothing for so long is gone; what waits for it is held in memory."""


class SpeechEndpoint:
    """``POST /v1/audio/speech``: reads the body, speaks, and sends audio as it is made.

    Headers leave with the first audio. An ASGI application of its own: a framework's request handling would be a good
    part of the time to first audio.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        service: SpeechService = scope["app"].state.pega
        started = sse = False
        caller = Caller()
        watch: asyncio.Task[None] | None = None
        try:
            document = await _document(receive, service)
            watch = asyncio.create_task(_watch(receive, caller))
            async with service.answer(document, caller) as answer:
                headers = [(b"content-type", answer.media_type.encode())]
                started, sse = True, answer.call.sse
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for data in answer.events() if sse else answer.audio():
                    await _send_piece(send, data)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except CallerGone:
            logger.info("the caller left before the end")
        except ApiError as error:
            if not started:
                await errors.response(error)(scope, receive, send)
            elif sse:  # its last event said so
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                # The server then breaks the connection: a short file must not look whole.
                raise
        finally:
            if watch is not None:
                watch.cancel()


def build_router() -> APIRouter:
    """The routes, as a router to be included."""
    router = APIRouter()
    router.add_route("/v1/audio/speech", SpeechEndpoint(), methods=["POST"])  # type: ignore[arg-type]
    router.include_router(build_voice_router())

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": "pega-omni-plugin"}
            for name in _service(request).served
        ]
        return JSONResponse({"object": "list", "data": entries})

    @router.get("/health")
    @router.get("/livez")
    async def health(request: Request) -> Response:
        dead = _service(request).engine.dead
        return PlainTextResponse("ok") if dead is None else PlainTextResponse(f"{dead}", status_code=503)

    @router.get("/readyz")
    async def ready(request: Request) -> Response:
        service = _service(request)
        if service.engine.dead is not None:
            return PlainTextResponse(f"{service.engine.dead}", status_code=503)
        return PlainTextResponse("ready") if service.ready else PlainTextResponse("starting", status_code=503)

    return router


def _service(request: Request) -> SpeechService:
    service: SpeechService = request.app.state.pega
    return service


async def _send_piece(send: Send, data: bytes) -> None:
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError as error:
        raise CallerGone from error


async def _document(receive: Receive, service: SpeechService) -> dict[str, Any]:
    try:
        recordings = service.engine.info.clones == "recording"
        return parse_json(await _read(receive, MAX_RECORDING_BODY_BYTES if recordings else MAX_BODY_BYTES))
    except ApiError:
        service.metrics.ended("invalid")
        raise


async def _read(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        body += message.get("body", b"")
        if len(body) > most:
            raise BodyTooLarge(f"the body is over {most} bytes; send less")
        if not message.get("more_body", False):
            return bytes(body)


async def _watch(receive: Receive, caller: Caller) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    caller.leave()

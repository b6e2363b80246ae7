"""A speech server of its own process for tests: ``python -m tests.bench.fake_tts PORT UNDECODED DELAY_S``.

Answers with ``max_new_tokens`` less UNDECODED frames of silence, DELAY_S after it was asked.
"""

from __future__ import annotations

import asyncio
import sys

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

FRAME = bytes(3840)


def app(undecoded: int, delay_s: float) -> Starlette:
    async def speech(request: Request) -> Response:
        body = orjson.loads(await request.body())
        await asyncio.sleep(delay_s)
        return Response(FRAME * (body["max_new_tokens"] - undecoded))

    async def ready(request: Request) -> Response:
        return PlainTextResponse("ready")

    return Starlette(routes=[Route("/v1/audio/speech", speech, methods=["POST"]), Route("/readyz", ready)])


if __name__ == "__main__":
    port, undecoded, delay_s = sys.argv[1:]
    uvicorn.run(app(int(undecoded), float(delay_s)), port=int(port), log_level="warning", timeout_graceful_shutdown=1)

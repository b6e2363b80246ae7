"""Our routes inside ``vllm serve --omni``.

They are put in front of vLLM-Omni's own on its router before the application is built, and match only when the server
runs one of our pipelines: requests for any other model reach vLLM-Omni's handlers as if we were not installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from starlette.routing import Match
from starlette.types import Scope

from pega_omni_plugin.api.metrics import Metrics
from pega_omni_plugin.api.routes import build_router
from pega_omni_plugin.api.speech import SpeechService
from pega_omni_plugin.engine.client import EngineClient, runs_our_program
from pega_omni_plugin.engine.exit import end_process


class OurRoute(APIRoute):
    """A route that is there only while the application serves one of our programs."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As usual, or no match."""
        if getattr(scope["app"].state, "pega", None) is None:
            return Match.NONE, {}
        return super().matches(scope)


def install() -> None:
    """Put our routes and our start-up on vLLM-Omni's router; once, before its application is built."""
    from vllm_omni.entrypoints.openai import api_server

    ours = build_router(OurRoute)
    api_server.router.routes[:0] = ours.routes
    api_server.router.lifespan_context = _lifespan


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    omni = app.state.engine_client
    if not runs_our_program(omni):
        yield
        return
    client = await EngineClient.connect(omni)
    client.on_death = end_process
    service = SpeechService(client, served_names(app, client), Metrics(REGISTRY, client, client.info.model))
    await service.warm_up()
    app.state.pega = service
    try:
        yield
    finally:
        await client.close()


def served_names(app: Any, client: EngineClient) -> list[str]:
    """The names given by ``--served-model-name``; without it the program's own name, then the model's path."""
    names = [entry.name for entry in app.state.openai_serving_models.base_model_paths]
    return names if client.info.model in names else [client.info.model, *names]

"""Our routes inside ``vllm serve --omni``.

They are put in front of vLLM-Omni's own when the application starts, and only if the server runs one of our pipelines:
requests for any other model reach vLLM-Omni's handlers as if we were not installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY

from pega_omni_plugin.api.metrics import Metrics
from pega_omni_plugin.api.routes import build_router
from pega_omni_plugin.api.speech import SpeechService
from pega_omni_plugin.api.voices import VoiceStore, voices_folder
from pega_omni_plugin.engine.client import EngineClient, runs_our_program
from pega_omni_plugin.engine.exit import end_process
from pega_omni_plugin.versions import check_versions


def install() -> None:
    """Hook our start-up into vLLM-Omni's router; once, before its application is built from it."""
    from vllm_omni.entrypoints.openai import api_server

    api_server.router.lifespan_context = _lifespan


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    omni = app.state.engine_client
    if not runs_our_program(omni):
        yield
        return
    for problem in check_versions():
        raise RuntimeError(str(problem))
    if app.state.api_server_count > 1:
        raise RuntimeError("--api-server-count above 1: the queue is counted in one API server; leave the option out")
    client = await EngineClient.connect(omni)
    client.on_death = end_process
    served = served_names(app, client)
    service = SpeechService(client, served, Metrics(REGISTRY, client, served[0]), VoiceStore(voices_folder()))
    await service.warm_up()
    app.state.pega = service
    # In front: they take the place of vLLM-Omni's own, and routing tries one after the other.
    app.router.routes[:0] = build_router().routes
    try:
        yield
    finally:
        await client.close()


def served_names(app: Any, client: EngineClient) -> list[str]:
    """The names given by ``--served-model-name``; without it the program's own name, then the model's path."""
    names = [entry.name for entry in app.state.openai_serving_models.base_model_paths]
    return [client.info.model, *names] if names == [app.state.engine_client.model] else names

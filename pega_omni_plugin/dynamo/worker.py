"""A Dynamo worker: one engine, offered to Dynamo's frontend as a speech model."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.common.utils.graceful_shutdown import install_signal_handlers
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime
from prometheus_client import CollectorRegistry, generate_latest

from pega_omni_plugin.api.errors import ApiError
from pega_omni_plugin.api.metrics import Metrics
from pega_omni_plugin.api.speech import Caller, CallerGone, SpeechService
from pega_omni_plugin.api.voices import VoiceStore, voices_folder
from pega_omni_plugin.dynamo.mapping import HEALTH_CHECK, audio_item, dynamo_error, speech_document
from pega_omni_plugin.engine.client import EngineClient, runs_our_program, start_engine
from pega_omni_plugin.engine.errors import EngineDead
from pega_omni_plugin.engine.exit import end_process

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
"""How long streams under way may take to finish after SIGTERM."""

_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What to serve, and where in Dynamo's namespace."""

    model: str
    served: tuple[str, ...]
    deploy_config: str | None
    namespace: str
    component: str


class SpeechHandler:
    """Dynamo's endpoint function for speech."""

    def __init__(self, service: SpeechService) -> None:
        self._service = service

    # Dynamo passes the context by this name.
    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Answer one request, piece by piece."""
        model = self._service.served[0]
        if request.get(HEALTH_CHECK):
            dead = self._service.engine.dead
            if dead is not None:
                raise RuntimeError(str(dead))
            yield audio_item(context.id(), model, b"", "wav", last=True)
            return
        caller = Caller()
        # A caller's leaving cancels nothing here by itself.
        watch = asyncio.ensure_future(_watch(context, caller))
        try:
            async with self._service.answer(speech_document(request), caller) as answer:
                async for data in answer.audio():
                    yield audio_item(context.id(), model, data, answer.call.format)
        except ApiError as error:
            # Without the cause: Dynamo logs what it is given, and a caller's mistake needs no traceback of ours.
            raise dynamo_error(error) from None
        except CallerGone:
            logger.info("the caller left before the end")
        finally:
            watch.cancel()


async def serve(options: WorkerOptions) -> None:
    """Start the engine, register with Dynamo and serve until a signal ends it."""
    loop = asyncio.get_running_loop()
    # First, so that a wrong DYN_ variable is told before the engine is started.
    runtime = DistributedRuntime(
        loop,
        os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
        os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
    )
    endpoint = runtime.endpoint(f"{options.namespace}.{options.component}.speech")

    omni = start_engine(options.model, options.deploy_config)
    if not runs_our_program(omni):
        await asyncio.to_thread(omni.shutdown)
        raise SystemExit(f"pega-omni: --model {options.model}: no program of this package runs this model")
    client = await EngineClient.connect(omni)
    registry = CollectorRegistry()
    served = options.served or (client.info.model,)
    service = SpeechService(client, served, Metrics(registry, client, served[0]), VoiceStore(voices_folder()))
    await service.warm_up()

    leaving: set[asyncio.Future[Any]] = set()

    def engine_died(reason: EngineDead) -> None:
        leaving.add(asyncio.ensure_future(endpoint.unregister_endpoint_instance()))
        end_process(reason)

    client.on_death = engine_died
    if client.dead is not None:
        engine_died(client.dead)

    async def drain() -> None:
        logger.info("draining: %d requests under way", client.in_flight)
        await client.drained(DRAIN_SECONDS)

    install_signal_handlers(loop, runtime, [endpoint], asyncio.Event(), drain_callback=drain)
    await register_model(
        ModelInput.Text,
        ModelType.Audios,
        endpoint,
        options.model,
        served[0],
        worker_type=WorkerType.Aggregated,
        needs=[],
        skip_model_assets=True,
        model_aliases=list(served[1:]),
    )
    endpoint.metrics.register_prometheus_expfmt_callback(lambda: generate_latest(registry).decode())
    logger.info("serving %s at %s.%s.speech", served[0], options.namespace, options.component)
    await endpoint.serve_endpoint(
        SpeechHandler(service).generate,
        graceful_shutdown=True,
        metrics_labels=[("model", served[0])],
        health_check_payload={"input": "ping", HEALTH_CHECK: True},
    )
    await client.close()
    async with asyncio.timeout(_STOP_SECONDS):
        await asyncio.to_thread(omni.shutdown)


async def _watch(context: Any, caller: Caller) -> None:
    await context.async_killed_or_stopped()
    caller.leave()

"""An engine whose streams say what the test writes for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from pega_omni_plugin.api.metrics import Metrics
from pega_omni_plugin.api.speech import SpeechService
from pega_omni_plugin.engine.errors import EngineDead, EngineError
from pega_omni_plugin.engine.program import Pcm, ProgramInfo, Speech
from pega_omni_plugin.engine.stream import SpeechStream
from pega_omni_plugin.engine.wire import Ending
from pega_omni_plugin.models.sim.program import SimOptions, SimProgram

INFO = SimProgram(SimOptions()).info
MODEL = INFO.model

Item = Pcm | Ending | Exception


def pcm(*values: int) -> Pcm:
    return np.array(values, dtype=np.int16)


ONE_SECOND: tuple[Item, ...] = (*[pcm(*[value] * 8000) for value in (1, -2, 300)], Ending("stop", 13))


class FakeEngine:
    """``script`` is what every stream holds at once; ``refusal`` is raised in place of a stream."""

    def __init__(self, script: Sequence[Item] = ONE_SECOND, info: ProgramInfo = INFO) -> None:
        self.info = info
        self.dead: EngineDead | None = None
        self.stats: Mapping[str, Any] = {}
        self.script = script
        self.refusal: EngineError | None = None
        self.spoken: list[Speech] = []
        self.streams: list[SpeechStream] = []
        self.left = 0
        self.entered = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self.streams) - self.left

    @asynccontextmanager
    async def speak(self, speech: Speech) -> AsyncIterator[SpeechStream]:
        if self.refusal is not None:
            raise self.refusal
        stream = SpeechStream(30, 60)
        self.spoken.append(speech)
        self.streams.append(stream)
        for item in self.script:
            if isinstance(item, Exception):
                stream.fail(item)
            else:
                stream.put(item)
        self.entered.set()
        try:
            yield stream
        finally:
            self.left += 1


def serve(engine: FakeEngine) -> SpeechService:
    return SpeechService(engine, [MODEL], Metrics(CollectorRegistry(), engine, MODEL))


def outcomes(service: SpeechService) -> dict[str, int]:
    """Requests counted so far, by outcome."""
    samples = [sample for family in service.metrics.registry.collect() for sample in family.samples]
    return {
        sample.labels["outcome"]: int(sample.value)
        for sample in samples
        if sample.name == "pega_requests_total" and sample.value
    }


def value(service: SpeechService, name: str) -> float | None:
    return service.metrics.registry.get_sample_value(name, {"model": MODEL})

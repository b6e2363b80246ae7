"""An engine whose streams say what the test writes for them, and a front that notes what it is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from pega_omni_plugin.api.metrics import Metrics
from pega_omni_plugin.api.speech import SpeechService
from pega_omni_plugin.api.voices import VoiceStore
from pega_omni_plugin.engine.errors import EngineDead, EngineError
from pega_omni_plugin.engine.program import CharacterFront, Front, Pcm, ProgramInfo, Prompt, Recording, Speech
from pega_omni_plugin.engine.stream import SpeechStream
from pega_omni_plugin.engine.wire import Ending
from pega_omni_plugin.models.sim.program import SimOptions, SimProgram

INFO = SimProgram(SimOptions()).info
MODEL = INFO.model

Item = Pcm | Ending | Exception


def pcm(*values: int) -> Pcm:
    return np.array(values, dtype=np.int16)


ONE_SECOND: tuple[Item, ...] = (*[pcm(*[value] * 8000) for value in (1, -2, 300)], Ending("stop", 13))


class FakeFront:
    """Makes prompts of 7 units, and of a recording itself. ``refusal`` is raised in place of a prompt, ``failure`` in
    place of an encoding; encodings wait for ``gate``."""

    def __init__(self, key: str = "fake") -> None:
        self.key = key
        self.asked: list[tuple[Speech, Recording | None]] = []
        self.encoded: list[npt.NDArray[np.float32]] = []
        self.threads: dict[str, threading.Thread] = {}
        self.refusal: Exception | None = None
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def prepare(self, speech: Speech, recording: Recording | None = None) -> Prompt:
        self.asked.append((speech, recording))
        self.threads["prepare"] = threading.current_thread()
        if self.refusal is not None:
            raise self.refusal
        return Prompt(7, {"text_ids": [1, 2]})

    def encode(self, pcm: npt.NDArray[np.float32]) -> Mapping[str, npt.NDArray[Any]]:
        self.encoded.append(pcm)
        self.threads["encode"] = threading.current_thread()
        assert self.gate.wait(10), "nobody opened the gate"
        if self.failure is not None:
            raise self.failure
        return {"pcm": pcm}

    def sample(self) -> tuple[Speech, Prompt]:
        return Speech("One.", "sample", seed=3), Prompt(4)


class FakeEngine:
    """``script`` is what every stream holds at once; ``refusal`` is raised in place of a stream."""

    def __init__(
        self, script: Sequence[Item] = ONE_SECOND, info: ProgramInfo = INFO, front: Front | None = None
    ) -> None:
        self.info = info
        self.front = front or CharacterFront(info)
        self.dead: EngineDead | None = None
        self.stats: Mapping[str, Any] = {}
        self.script = script
        self.refusal: EngineError | None = None
        self.spoken: list[Speech] = []
        self.prompts: list[Prompt] = []
        self.streams: list[SpeechStream] = []
        self.left = 0
        self.entered = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self.streams) - self.left

    def check_room(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    @asynccontextmanager
    async def speak(self, speech: Speech, prompt: Prompt) -> AsyncIterator[SpeechStream]:
        self.check_room()
        stream = SpeechStream(30, 60)
        self.spoken.append(speech)
        self.prompts.append(prompt)
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


def serve(engine: FakeEngine, voices: VoiceStore | None = None) -> SpeechService:
    return SpeechService(engine, [MODEL], Metrics(CollectorRegistry(), engine, MODEL), voices)


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

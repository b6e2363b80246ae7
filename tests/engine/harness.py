"""vLLM's engine core reduced to its step, around the real scheduler and worker and a program that checks its engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self
from unittest.mock import patch

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.request import RequestStatus
from vllm_omni.engine import OmniEngineCoreOutput
from vllm_omni.engine.serialization import serialize_additional_information
from vllm_omni.request import OmniRequest

from pega_omni_plugin.engine import config, scheduler
from pega_omni_plugin.engine.program import (
    Admission,
    CharacterFront,
    FatalProgramError,
    Front,
    Part,
    PartConfig,
    Pcm,
    ProgramInfo,
    Prompt,
    Speech,
    StepOutput,
    Voice,
)
from pega_omni_plugin.engine.scheduler import ProgramScheduler
from pega_omni_plugin.engine.shared import PROCESS, EngineStats, Plan
from pega_omni_plugin.engine.wire import encode_speech
from pega_omni_plugin.engine.worker import ProgramWorker

FRAME = 80
"""Samples; at 1000 Hz a frame lasts 80 ms."""

RATE = 1000

CHECKPOINT = Path(__file__).parent
"""A directory, as models are; the program reads nothing in it."""


def speech(number: int, *pieces: int, **extra: Any) -> Speech:
    """Request ``number``, for which each step makes so many samples.

    ``extra`` may say where the program fails it: ``fail`` is ``prefill`` (it raises there), ``row`` (an error for the
    slot alone), ``step`` (it raises, for all), ``lost`` or ``memory`` (nothing can go on), the last four ``at`` a step.
    """
    return Speech(input="a", voice="v", seed=number, extra={"pieces": list(pieces), **extra})


def samples(number: int, begin: int, length: int) -> Pcm:
    """What request ``number`` sounds like: no two samples of a test are the same."""
    return np.arange(number * 1000 + begin, number * 1000 + begin + length).astype(np.int16)


def whole(spoken: Speech) -> Pcm:
    return samples(spoken.seed, 0, sum(spoken.extra["pieces"]))


@dataclass
class Held:
    """What the program knows of a leased slot."""

    speech: Speech
    prompt: Prompt
    steps: int = 0
    made: int = 0
    over: bool = False


class CheckedProgram:
    """Does what requests say, and notes in ``broken`` whatever the engine does against the contract."""

    @dataclass(frozen=True)
    class Options:
        model: str = "checked"

    info: ClassVar[ProgramInfo] = ProgramInfo(
        model="checked",
        kind="speech",
        sample_rate=RATE,
        frame_samples=FRAME,
        voices=(Voice("v", "V"),),
        default_voice="v",
        max_input_chars=1000,
        max_frames=1000,
    )

    def __init__(self, slots: int) -> None:
        self.part_seconds: dict[Part, float] = {"thinker": 1.5}
        self.slots = slots
        self.held: dict[int, Held] = {}
        self.prefilled: list[list[int]] = []  # seeds, by call
        self.stepped: list[list[int]] = []  # slots, by call
        self.events: list[tuple[str, int]] = []
        self.broken: list[str] = []
        self.closed = False
        self._again: set[int] = set()  # slots of a batch that failed, which may be offered anew

    @classmethod
    def load(cls, checkpoint: Path, options: Any, parts: Mapping[Part, PartConfig], slots: int) -> Self:
        return cls(slots)

    @classmethod
    def front(cls, checkpoint: Path, options: Any, info: ProgramInfo) -> Front:
        return CharacterFront(info)

    def prefill(self, batch: Sequence[Admission]) -> None:
        self.prefilled.append([one.speech.seed for one in batch])
        self._check(len({one.slot for one in batch}) == len(batch) > 0, f"prefill of {batch}")
        again, self._again = self._again, {one.slot for one in batch} if len(batch) > 1 else self._again
        for one in batch:
            self._check(1 <= one.slot <= self.slots, f"prefill of slot {one.slot}")
            self._check(one.slot not in self.held or one.slot in again, f"prefill of slot {one.slot}, not released")
            self.events.append(("prefill", one.slot))
            self.held[one.slot] = Held(one.speech, one.prompt)
            if one.speech.extra.get("fail") == "prefill":
                self.held[one.slot].over = True
                raise ValueError(f"cannot say {one.speech.seed}")

    def step(self, slots: Sequence[int]) -> Sequence[StepOutput]:
        self._again = set()
        self.stepped.append(list(slots))
        self._check(len(set(slots)) == len(slots) > 0, f"step of {slots}")
        for slot in slots:
            self._check(slot in self.held and not self.held[slot].over, f"step of slot {slot}, which has no request")
        for slot in slots:
            held = self.held[slot]
            if held.steps == held.speech.extra.get("at"):
                match held.speech.extra.get("fail"):
                    case "step":
                        for failed in slots:
                            self.held[failed].over = True
                        raise RuntimeError("lost the thread")
                    case "lost":
                        raise FatalProgramError("device gone")
                    case "memory":
                        raise torch.OutOfMemoryError("no memory")
        return [self._advance(self.held[slot]) for slot in slots]

    def _advance(self, held: Held) -> StepOutput:
        pieces, at = held.speech.extra["pieces"], held.steps
        held.steps += 1
        if held.speech.extra.get("fail") == "row" and held.speech.extra["at"] == at:
            held.over = True
            return StepOutput(samples(0, 0, 1), error=f"row {held.speech.seed} is bad")
        pcm = samples(held.speech.seed, held.made, pieces[at])
        held.made += len(pcm)
        held.over = at + 1 == len(pieces)
        return StepOutput(pcm, held.speech.extra.get("finish", "stop") if held.over else None)

    def release(self, slot: int) -> None:
        self.events.append(("release", slot))
        self._again.discard(slot)
        self._check(slot in self.held, f"release of slot {slot}, not held")
        self.held.pop(slot, None)

    def close(self) -> None:
        self.closed = True

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)


@dataclass
class Heard:
    """What a caller got for one request."""

    pieces: list[Pcm] = field(default_factory=list)
    finish_reason: Any = None
    stop_reason: Any = None
    after_end: int = 0

    @property
    def audio(self) -> Pcm:
        return np.concatenate([np.zeros(0, np.int16), *self.pieces])

    @property
    def over(self) -> bool:
        return self.finish_reason is not None


class Engine:
    """Steps like ``vllm.v1.engine.core.EngineCore.step``: plan, run, abort what came in meanwhile, collect."""

    def __init__(self, **section: Any) -> None:
        PROCESS.info, PROCESS.stats = None, EngineStats()
        section = {"program": "sim", **section}
        self.now = 1000.0
        self.step_seconds = 0.0
        self.heard: dict[str, Heard] = {}
        self.plans: list[Plan] = []
        self.worker = ProgramWorker.__new__(ProgramWorker)
        self.worker.vllm_config = SimpleNamespace(
            additional_config=section, model_config=SimpleNamespace(model=str(CHECKPOINT))
        )
        self.worker.load_model()
        self.scheduler = ProgramScheduler(self.worker.vllm_config)
        assert isinstance(self.worker.program, CheckedProgram)
        self.program: CheckedProgram = self.worker.program

    def add(self, spoken: Speech, units: int = 1, client: int = 0, **data: Any) -> str:
        return self.add_raw(f"r{spoken.seed}", encode_speech(spoken, Prompt(units, data)), client)

    def add_raw(self, name: str, information: dict[str, Any] | None, client: int = 0) -> str:
        request = OmniRequest(
            name,
            [0],
            SamplingParams(max_tokens=16),
            None,
            client_index=client,
            additional_information=serialize_additional_information(information),
        )
        self.heard[name] = Heard()
        self.scheduler.add_request(request)
        return name

    def abort(self, *names: str) -> list[str]:
        ended = self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        return [request.request_id for request in ended]

    def step(self, aborts: Iterable[str] = ()) -> dict[int, list[OmniEngineCoreOutput]]:
        """One step, ``aborts`` arriving in the middle of it; returns its messages by client. The clock moves on."""
        if not self.scheduler.has_requests():
            return {}
        planned = self.scheduler.schedule()
        self.plans.append(planned.plan)
        result = self.worker.execute_model(planned)
        result.seconds = self.step_seconds
        self.now += self.step_seconds
        self.abort(*aborts)
        collected = self.scheduler.update_from_output(planned, result)
        assert self.program.broken == []
        messages = {client: list(outputs.outputs) for client, outputs in collected.items()}
        for message in (message for outputs in messages.values() for message in outputs):
            self._hear(message)
        return messages

    def run(self, steps: int = 1000) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"still at work after {steps} steps")

    @property
    def admitted(self) -> list[int]:
        """Seeds in the order of admission."""
        return [one.speech.seed for plan in self.plans for one in plan.admissions]

    @property
    def stats(self) -> EngineStats:
        return PROCESS.stats

    def _hear(self, message: OmniEngineCoreOutput) -> None:
        heard = self.heard[message.request_id]
        heard.after_end += heard.over
        if message.multimodal_output:  # vLLM's encoder fails on an empty tensor, so there never is one
            assert message.multimodal_output["audio"].numel()
            heard.pieces.append(message.multimodal_output["audio"].numpy())
        heard.finish_reason, heard.stop_reason = message.finish_reason, message.stop_reason


@contextmanager
def checked_engine(**section: Any) -> Iterator[Engine]:
    """An engine whose program ``sim`` is ``CheckedProgram`` and whose clock is ``engine.now``."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(config.PROGRAMS, sim=f"{__name__}:CheckedProgram"))
        engine = Engine(**section)
        stack.enter_context(patch.object(scheduler, "time", SimpleNamespace(monotonic=lambda: engine.now)))
        yield engine

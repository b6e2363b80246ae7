"""Admission, slots and messages: the scheduler that vLLM's engine core calls around every step.

``schedule`` takes waiting requests into free slots, first come first served, within the prompt budget of a step.
``update_from_output`` collects what the step made and sends what the chunk policy finds due. A slot is leased for the
whole life of a request: nothing is preempted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.request import Request, RequestStatus
from vllm_omni.engine import OmniEngineCoreOutput, OmniEngineCoreOutputs

from pega_omni_plugin.engine.chunks import Due
from pega_omni_plugin.engine.config import parse_engine
from pega_omni_plugin.engine.outbox import LongMessages, Outgoing
from pega_omni_plugin.engine.program import Admission, Prompt, Speech, StepOutput
from pega_omni_plugin.engine.shared import PROCESS, Plan, Result
from pega_omni_plugin.engine.slots import SlotPool
from pega_omni_plugin.engine.wire import Ending, decode_speech, encode_ending

_PLACEHOLDER_TOKEN = 0
"""vLLM counts tokens; ours are audio, and every message says one."""


@dataclass(slots=True)
class _Waiting:
    request: Request
    speech: Speech
    prompt: Prompt
    since: float


@dataclass(slots=True)
class _Stream:
    """A request that got a slot; without one again when the program is done and audio is left to send."""

    request: Request
    slot: int | None
    audio: Outgoing


class ProgramScheduler(SchedulerInterface):
    """vLLM's scheduler interface over slots."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        info = PROCESS.info
        if info is None:
            raise RuntimeError("stage worker_cls is not ProgramWorker: no program is loaded in this process")
        self._info = info
        self._config = parse_engine(vllm_config.additional_config, "additional_config")
        self._stats = PROCESS.stats
        self._stats.slots = self._config.slots
        self._slots = SlotPool(self._config.slots)
        self._waiting: deque[_Waiting] = deque()
        self._refused: list[tuple[Request, str]] = []
        self._streams: dict[str, _Stream] = {}
        self._by_slot: dict[int, _Stream] = {}
        self._releases: list[int] = []
        self._pause = PauseState.UNPAUSED
        self._long = LongMessages()
        self._step_seconds = 0.0
        # Read by vLLM's engine core.
        self.connector = None
        self.ec_connector = None
        self.kv_event_publisher = None

    # The step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan the next step."""
        admissions = self._admit() if self._pause is PauseState.UNPAUSED else []
        plan = Plan(self._releases, admissions, list(self._by_slot))
        self._releases = []
        output = SchedulerOutput.make_empty()
        output.plan = plan
        # Anything above 0 tells the engine core that the step did something.
        output.total_num_scheduled_tokens = len(plan.slots) + len(plan.releases) + len(self._refused)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> dict[int, OmniEngineCoreOutputs]:
        """Collect what the step made; returns the messages that are due, by API client."""
        result: Result = model_runner_output
        now = time.monotonic()
        plan: Plan = scheduler_output.plan
        if plan.slots:
            self._step_seconds += 0.2 * (result.seconds - self._step_seconds)
            self._stats.step_seconds.observe(result.seconds)
            self._stats.batch.observe(len(plan.slots))
            self._stats.steps += 1
        messages: dict[int, list[OmniEngineCoreOutput]] = {}

        def send(request: Request, message: OmniEngineCoreOutput) -> None:
            messages.setdefault(request.client_index, []).append(message)
            self._stats.messages += 1

        for request, reason in self._refused:
            send(request, _failure(request, reason))
        self._refused.clear()
        for slot, output in result.outputs.items():
            stream = self._by_slot.get(slot)
            if stream is None:  # aborted while the step ran
                continue
            message = self._collect(stream, output, now)
            if message is not None:
                send(stream.request, message)
        while (name := self._long.next(now)) is not None:
            stream = self._streams[name]
            send(stream.request, self._message(stream, now))
            if stream.audio.goes_on(now, self._step_seconds):
                self._long.ask(name)
        return {client: OmniEngineCoreOutputs(outputs=outputs) for client, outputs in messages.items()}

    def _admit(self) -> list[Admission]:
        admissions: list[Admission] = []
        budget = self._config.prompt_budget
        while self._waiting:
            waiting = self._waiting[0]
            # A prompt over the budget is admitted alone, or it would wait for ever.
            if admissions and waiting.prompt.units > budget:
                break
            slot = self._slots.lease()
            if slot is None:
                break
            self._waiting.popleft()
            budget -= waiting.prompt.units
            request = waiting.request
            request.status = RequestStatus.RUNNING
            audio = Outgoing(self._config.chunk_profile, self._info.sample_rate, self._info.frame_samples)
            self._streams[request.request_id] = self._by_slot[slot] = _Stream(request, slot, audio)
            admissions.append(Admission(slot, waiting.speech, waiting.prompt))
            self._stats.queue_seconds.observe(time.monotonic() - waiting.since)
            self._stats.admitted += 1
        self._count()
        return admissions

    def _collect(self, stream: _Stream, output: StepOutput, now: float) -> OmniEngineCoreOutput | None:
        if output.error is not None:
            self._end(stream, RequestStatus.FINISHED_ERROR)
            self._stats.failed += 1
            return _failure(stream.request, output.error)
        stream.audio.add(output.pcm)
        if output.finish is not None:
            frames = math.ceil(stream.audio.samples / self._info.frame_samples)
            stream.audio.ending = Ending(output.finish, frames)
            self._stats.frames += frames
            self._stats.finished[output.finish] = self._stats.finished.get(output.finish, 0) + 1
            self._free(stream)
        due = stream.audio.due(now, self._step_seconds)
        if due is Due.SOON:
            self._long.ask(stream.request.request_id)
        return self._message(stream, now) if due is Due.NOW else None

    def _message(self, stream: _Stream, now: float) -> OmniEngineCoreOutput:
        """The stream's next message; ends the request with its last."""
        pcm = stream.audio.take(now)
        self._long.sent(len(pcm), now)
        message = OmniEngineCoreOutput(
            request_id=stream.request.request_id,
            new_token_ids=[_PLACEHOLDER_TOKEN],
            # vLLM's encoder cannot take an empty tensor.
            multimodal_output={"audio": torch.from_numpy(pcm)} if len(pcm) else {},
        )
        if stream.audio.complete and stream.audio.ending is not None:
            message.finish_reason = VllmFinishReason.STOP
            message.stop_reason = encode_ending(stream.audio.ending)
            self._end(stream, RequestStatus.FINISHED_STOPPED)
        return message

    def _end(self, stream: _Stream, status: RequestStatus) -> None:
        stream.request.status = status
        del self._streams[stream.request.request_id]
        self._long.drop(stream.request.request_id)
        self._free(stream)

    def _free(self, stream: _Stream) -> None:
        if stream.slot is None:
            return
        del self._by_slot[stream.slot]
        self._slots.give_back(stream.slot)
        self._releases.append(stream.slot)
        stream.slot = None
        self._count()

    def _count(self) -> None:
        self._stats.waiting = len(self._waiting)
        self._stats.running = len(self._by_slot)

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request; one that is not ours is refused with the next step."""
        try:
            speech, prompt = decode_speech(request.additional_information)
        except ValueError as error:
            self._refused.append((request, str(error)))
            return
        self._waiting.append(_Waiting(request, speech, prompt, time.monotonic()))
        self._count()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests from outside (aborts): waiting ones leave the queue, running ones free their slot now."""
        queued = [waiting.request for waiting in self._waiting] + [request for request, _ in self._refused]
        if request_ids is None:
            gone = {*self._streams, *(request.request_id for request in queued)}
        else:
            gone = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        ended: list[Request] = []
        for stream in [stream for name, stream in self._streams.items() if name in gone]:
            self._end(stream, finished_status)
            ended.append(stream.request)
        for request in queued:
            if request.request_id in gone:
                request.status = finished_status
                ended.append(request)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.request_id not in gone)
        self._refused = [refusal for refusal in self._refused if refusal[0].request_id not in gone]
        self._stats.aborted += len(ended)
        self._count()
        return ended

    # What the engine core asks.

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait, run, or have audio left to send."""
        return len(self._waiting) + len(self._streams) + len(self._refused)

    def has_finished_requests(self) -> bool:
        """Whether slots wait to be released by the program: one more step is due."""
        return bool(self._releases)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self._by_slot), len(self._waiting)

    @property
    def pause_state(self) -> PauseState:
        """Whether vLLM has paused admission."""
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume admission; running streams go on."""
        self._pause = pause_state

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        """There are no grammars."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """There are no draft tokens."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: SchedulerOutput) -> None:
        """There are no draft tokens."""

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """There is no prefix cache; it is always reset."""
        return True

    def reset_encoder_cache(self) -> None:
        """There is no encoder cache."""

    def make_stats(self) -> None:
        """Counters are read by the control call ``stats``."""

    def shutdown(self) -> None:
        """Nothing is held."""


def _failure(request: Request, reason: str) -> OmniEngineCoreOutput:
    return OmniEngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[_PLACEHOLDER_TOKEN],
        finish_reason=VllmFinishReason.ERROR,
        stop_reason=reason,
    )

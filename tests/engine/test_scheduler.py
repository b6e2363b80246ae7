from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus
from vllm_omni.engine import AdditionalInformationEntry, AdditionalInformationPayload

from pega_omni_plugin.engine import outbox, worker
from pega_omni_plugin.engine.program import Prompt, Speech
from pega_omni_plugin.engine.scheduler import ProgramScheduler
from pega_omni_plugin.engine.shared import PROCESS
from pega_omni_plugin.engine.wire import Ending, decode_ending
from tests.engine.harness import FRAME, Engine, checked_engine, samples, speech, whole


@pytest.fixture
def engine() -> Iterator[Engine]:
    with checked_engine(slots=2) as made:
        yield made


def sizes(engine: Engine, name: str) -> list[int]:
    return [len(piece) // FRAME for piece in engine.heard[name].pieces]


def test_first_audio_leaves_in_the_step_that_admits_the_request() -> None:
    with checked_engine(profile="ttfa") as engine:
        engine.add(speech(7, FRAME, FRAME))
        messages = engine.step()
    assert engine.plans[0].admissions[0].slot in engine.plans[0].slots
    assert [message.request_id for message in messages[0]] == ["r7"]
    assert engine.heard["r7"].audio.tolist() == samples(7, 0, FRAME).tolist()


def test_steps_without_due_audio_send_nothing() -> None:
    with checked_engine(profile="throughput") as engine:
        engine.add(speech(1, *[FRAME] * 9))
        engine.step_seconds = 0.01
        sent = [len(engine.step()) for _ in range(9)]
    assert sent == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert engine.stats.messages == 2


def test_messages_grow_then_rest_and_the_last_leaves_at_once() -> None:
    """64 steps in half a second, each with 80 ms of audio: after 22 of them a good second and a half is out."""
    with checked_engine(profile="balanced") as engine:
        engine.step_seconds = 1 / 128
        name = engine.add(speech(1, *[FRAME] * 170))
        engine.run()
    assert sizes(engine, name) == [2, 4, 8, 8, 64, 64, 20]
    assert engine.heard[name].audio.tolist() == whole(speech(1, *[FRAME] * 170)).tolist()


def test_of_streams_far_ahead_one_sends_in_a_step_and_each_within_a_few() -> None:
    """Four streams that ramp up together; then each has 64 frames every half second, one step after the other."""
    with checked_engine(slots=4, profile="balanced") as engine:
        engine.step_seconds = 1 / 128
        names = [engine.add(speech(number, *[FRAME] * 250)) for number in range(4)]
        for _ in range(22):
            engine.step()
        assert [sizes(engine, name) for name in names] == [[2, 4, 8, 8]] * 4
        sent = [len(engine.step().get(0, [])) for _ in range(227)]
        assert set(sent) == {0, 1}
        assert [sizes(engine, name)[4:] for name in names] == [[64, 64, 64], [65, 64, 64], [66, 64, 64], [67, 64, 64]]
        engine.run()
    for number, name in enumerate(names):
        assert engine.heard[name].audio.tolist() == whole(speech(number, *[FRAME] * 250)).tolist()


def test_ending_says_why_and_counts_frames_started(engine: Engine) -> None:
    name = engine.add(speech(1, FRAME, FRAME + 1, finish="length"))
    engine.run()
    assert engine.heard[name].finish_reason is FinishReason.STOP
    assert decode_ending(engine.heard[name].stop_reason) == Ending("length", 3)


def test_requests_that_ended_are_counted_by_the_reason(engine: Engine) -> None:
    for number, reason in enumerate(["stop", "length", "stop", "repetition", "silence", "stop"]):
        engine.add(speech(number, FRAME, finish=reason))
    engine.add(speech(7, FRAME, fail="row", at=0))
    engine.abort(engine.add(speech(8, FRAME)))
    engine.run()
    assert engine.stats.finished == {"stop": 3, "length": 1, "repetition": 1, "silence": 1}
    assert (engine.stats.failed, engine.stats.aborted) == (1, 1)


def test_a_stream_is_counted_when_the_program_ends_it_and_not_again_when_its_audio_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "MESSAGE_SAMPLES", FRAME)
    monkeypatch.setattr(outbox, "LONG_SAMPLES_PER_SECOND", FRAME)
    with checked_engine() as engine:
        name, gone = (engine.add(speech(number, FRAME, FRAME, FRAME, finish="silence")) for number in (1, 2))
        for _ in range(3):
            engine.step()
        assert not engine.heard[name].over
        assert engine.stats.finished == {"silence": 2}
        engine.abort(gone)
        engine.step_seconds = 1.0
        engine.run()
        assert engine.heard[name].over
    assert engine.stats.finished == {"silence": 2}


def test_what_the_front_prepared_reaches_the_program_unread(engine: Engine) -> None:
    data = {"text_ids": [1, 2, 3], "speaker": {"x": [0.5, -1.0]}, "none": None}
    engine.add(speech(1, FRAME, FRAME), units=3, **data)
    engine.step()
    (admission,) = engine.plans[0].admissions
    assert engine.program.held[admission.slot].prompt == Prompt(3, data)


def test_a_request_without_audio_still_ends(engine: Engine) -> None:
    name = engine.add(speech(1, 0, 0))
    engine.run()
    assert decode_ending(engine.heard[name].stop_reason) == Ending("stop", 0)
    assert engine.heard[name].audio.size == 0


def test_messages_go_to_the_api_process_that_asked(engine: Engine) -> None:
    engine.add(speech(1, FRAME), client=3)
    engine.add(speech(2, FRAME), client=5)
    messages = engine.step()
    assert {client: [message.request_id for message in outputs] for client, outputs in messages.items()} == {
        3: ["r1"],
        5: ["r2"],
    }


def test_requests_wait_for_slots_in_order_of_arrival(engine: Engine) -> None:
    for number in range(1, 6):
        engine.add(speech(number, *[FRAME] * (1 + number % 3)))
    engine.step()
    assert engine.admitted == [1, 2]
    assert (engine.stats.running, engine.stats.waiting) == (2, 3)
    engine.run()
    assert engine.admitted == [1, 2, 3, 4, 5]


def test_the_wait_for_a_slot_is_measured(engine: Engine) -> None:
    engine.step_seconds = 0.25
    for number in range(1, 4):
        engine.add(speech(number, FRAME, FRAME))
    engine.run()
    assert engine.stats.queue_seconds.total == pytest.approx(0.5)
    assert sum(engine.stats.queue_seconds.counts) == 3


@pytest.mark.parametrize(
    ("units", "steps"),
    [
        ([4, 4, 4], [[1, 2], [3]]),
        ([5, 5, 1], [[1, 2], [3]]),
        ([10, 1], [[1], [2]]),
        ([4, 7, 1], [[1], [2, 3]]),
        ([99, 1, 1], [[1], [2, 3]]),
        ([1, 99, 1], [[1], [2], [3]]),
    ],
)
def test_prompts_of_one_step_stay_in_the_budget_and_one_over_it_is_admitted_alone(
    units: list[int], steps: list[list[int]]
) -> None:
    with checked_engine(slots=8, prompt_budget=10) as engine:
        for number, count in enumerate(units, 1):
            engine.add(speech(number, FRAME, FRAME, FRAME, FRAME), units=count)
        engine.run()
    admitted = [[one.speech.seed for one in plan.admissions] for plan in engine.plans if plan.admissions]
    assert admitted == steps


def test_abort_of_a_running_stream_frees_its_slot_for_the_next_step() -> None:
    with checked_engine(slots=1) as engine:
        first, second = engine.add(speech(1, *[FRAME] * 50)), engine.add(speech(2, FRAME))
        engine.step()
        assert engine.abort(first) == [first]
        engine.step()
        assert engine.program.events[-2:] == [("release", 1), ("prefill", 1)]
        assert decode_ending(engine.heard[second].stop_reason) == Ending("stop", 1)
        engine.run()
    assert engine.stats.aborted == 1
    assert not engine.heard[first].over


def test_abort_in_the_middle_of_a_step_drops_what_the_step_made_and_nothing_else(engine: Engine) -> None:
    aborted, other = engine.add(speech(1, FRAME, FRAME)), engine.add(speech(2, FRAME, FRAME))
    engine.step()
    messages = engine.step(aborts=[aborted])
    assert [message.request_id for message in messages[0]] == [other]
    engine.run()
    assert engine.program.held == {}
    assert not engine.heard[aborted].over


def test_abort_in_the_step_that_admits_releases_the_slot(engine: Engine) -> None:
    name = engine.add(speech(1, FRAME, FRAME))
    assert engine.step(aborts=[name]) == {}
    engine.run()
    assert engine.program.events == [("prefill", 1), ("release", 1)]


def test_aborted_while_waiting_is_never_admitted(engine: Engine) -> None:
    names = [engine.add(speech(number, FRAME, FRAME)) for number in range(1, 5)]
    engine.step()
    assert engine.abort(names[2]) == [names[2]]
    assert engine.stats.waiting == 1
    engine.run()
    assert engine.admitted == [1, 2, 4]
    assert not engine.heard[names[2]].over


def test_abort_of_what_is_unknown_or_over_does_nothing(engine: Engine) -> None:
    name = engine.add(speech(1, FRAME))
    engine.run()
    assert engine.abort(name, name, "nobody") == []
    assert engine.stats.aborted == 0


def test_ending_everything_leaves_nothing(engine: Engine) -> None:
    names = [engine.add(speech(number, *[FRAME] * 9)) for number in range(4)]
    engine.step()
    ended = engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert sorted(request.request_id for request in ended) == names
    assert {request.status for request in ended} == {RequestStatus.FINISHED_ABORTED}
    assert engine.scheduler.get_num_unfinished_requests() == 0
    engine.run()
    assert engine.program.held == {}
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("information", [None, {}, {"text": ["hello"]}, {"pega": ["not json"]}, {"pega": ["{}"]}])
def test_a_request_that_is_not_ours_is_refused_and_others_go_on(engine: Engine, information: Any) -> None:
    foreign, ours = engine.add_raw("foreign", information), engine.add(speech(1, FRAME))
    engine.run()
    assert engine.heard[foreign].finish_reason is FinishReason.ERROR
    assert "/v1/audio/speech" in engine.heard[foreign].stop_reason
    assert engine.heard[ours].audio.tolist() == whole(speech(1, FRAME)).tolist()


@pytest.mark.parametrize("entry", [{"scalar_data": 3}, {"tensor_data": b"", "tensor_shape": [0]}, {"list_data": []}])
def test_a_foreign_payload_under_our_key_is_refused(engine: Engine, entry: dict[str, Any]) -> None:
    payload = AdditionalInformationPayload(entries={"pega": AdditionalInformationEntry(**entry)})
    foreign = engine.add_raw("foreign", payload)  # type: ignore[arg-type]
    engine.run()
    assert "/v1/audio/speech" in engine.heard[foreign].stop_reason


def test_a_refused_request_that_was_aborted_gets_no_message(engine: Engine) -> None:
    foreign = engine.add_raw("foreign", None)
    assert engine.abort(foreign) == [foreign]
    assert not engine.scheduler.has_requests()
    engine.run()
    assert not engine.heard[foreign].over


def test_paused_engine_admits_nothing_and_goes_on_with_what_runs(engine: Engine) -> None:
    running = engine.add(speech(1, FRAME, FRAME))
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    waiting = engine.add(speech(2, FRAME))
    for _ in range(3):
        engine.step()
    assert engine.heard[running].over
    assert engine.admitted == [1]
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.heard[waiting].over


def test_a_stage_with_another_worker_is_refused_at_start() -> None:
    with checked_engine():
        PROCESS.info = None
        with pytest.raises(RuntimeError, match="worker_cls is not ProgramWorker"):
            ProgramScheduler(SimpleNamespace(additional_config={"program": "sim"}))


def test_a_program_may_reuse_the_array_that_it_hands_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = np.zeros(FRAME, np.int16)

    def reusing(number: int, begin: int, length: int) -> np.ndarray[Any, Any]:
        buffer[:] = begin
        return buffer

    with checked_engine(profile="ttfa") as engine:
        monkeypatch.setattr("tests.engine.harness.samples", reusing)
        name = engine.add(speech(1, FRAME, FRAME))
        engine.run()
    assert [int(piece[0]) for piece in engine.heard[name].pieces] == [0, FRAME]


@dataclass
class Asked:
    """What the caller of one request expects."""

    speech: Speech
    units: int
    aborted: bool = False
    foreign: bool = False


@dataclass
class Model:
    asked: dict[str, Asked] = field(default_factory=dict)
    waiting: deque[str] = field(default_factory=deque)


FAILS = ("", "", "", "", "prefill", "row", "step")
SLOTS = 3
BUDGET = 10


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of requests, aborts and steps, against what callers may expect."""

    def __init__(self) -> None:
        super().__init__()
        self._context = ExitStack()
        self._context.enter_context(patch.object(worker.logger, "exception"))  # a traceback per failure takes the time
        self.engine = self._context.enter_context(checked_engine(slots=SLOTS, prompt_budget=BUDGET, profile="ttfa"))
        self.model = Model()
        self.numbers = 0

    @rule(
        pieces=st.lists(st.sampled_from([0, 1, FRAME, 3 * FRAME]), min_size=1, max_size=6),
        units=st.integers(1, 14),
        fail=st.sampled_from(FAILS),
        at=st.integers(0, 5),
    )
    def ask(self, pieces: list[int], units: int, fail: str, at: int) -> None:
        self.numbers += 1
        spoken = speech(self.numbers, *pieces, fail=fail, at=at)
        name = self.engine.add(spoken, units)
        self.model.asked[name] = Asked(spoken, units)
        self.model.waiting.append(name)

    @rule()
    def ask_foreign(self) -> None:
        self.numbers += 1
        name = self.engine.add_raw(f"r{self.numbers}", {"text": ["hello"]})
        self.model.asked[name] = Asked(speech(self.numbers, 0), 0, foreign=True)

    @precondition(lambda self: self.model.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._note_aborts(names := self._draw_names(data), self.engine.abort(*names))

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.01, 0.3]))
    def step(self, data: st.DataObject, seconds: float) -> None:
        aborts = self._draw_names(data) if self.model.asked and data.draw(st.booleans()) else []
        self.engine.step_seconds = seconds
        alive = [name for name in aborts if name in self.engine.heard and not self.engine.heard[name].over]
        plans = len(self.engine.plans)
        self.engine.step(aborts)
        if len(self.engine.plans) > plans:
            self._check_admissions()
        # Which of them ended with the step and which before it, the engine may decide; a message tells.
        self._note_aborts(aborts, [name for name in alive if not self.engine.heard[name].over])

    @invariant()
    def slots_are_leased_to_those_who_run(self) -> None:
        scheduler = self.engine.scheduler
        running, waiting = scheduler.get_request_counts()
        slots = list(scheduler._by_slot)
        assert len(set(slots)) == len(slots) == running == scheduler._slots.leased <= SLOTS
        assert waiting == len(self.model.waiting)
        assert (self.engine.stats.running, self.engine.stats.waiting) == (running, waiting)

    @invariant()
    def every_caller_hears_its_own_audio_from_the_start_and_one_ending(self) -> None:
        for name, asked in self.model.asked.items():
            heard = self.engine.heard[name]
            assert heard.after_end == 0
            assert not (heard.over and asked.aborted)
            audio = heard.audio
            assert audio.tolist() == whole(asked.speech)[: len(audio)].tolist()
            if heard.finish_reason is FinishReason.STOP:
                pieces = asked.speech.extra["pieces"]
                assert len(audio) == sum(pieces)
                assert decode_ending(heard.stop_reason) == Ending("stop", -(-sum(pieces) // FRAME))

    def teardown(self) -> None:
        with self._context:  # left in any case: other tests want the real program
            self.engine.run()
            engine, asked = self.engine, self.model.asked.values()
            for name, one in self.model.asked.items():
                assert engine.heard[name].over != one.aborted
            admitted = [one.speech.seed for one in asked if not one.foreign]
            assert engine.admitted == [seed for seed in admitted if seed in set(engine.admitted)]
            assert engine.program.held == {}
            assert engine.scheduler._slots.leased == 0
            assert engine.stats.aborted == sum(one.aborted for one in asked)
            assert engine.stats.admitted == len(engine.admitted)

    def _check_admissions(self) -> None:
        """First come, first served; within the budget or alone; and none is left waiting that could have come."""
        plan = self.engine.plans[-1]
        names = [f"r{one.speech.seed}" for one in plan.admissions]
        assert names == [self.model.waiting.popleft() for _ in names]
        units = [self.model.asked[name].units for name in names]
        assert len(units) < 2 or sum(units) <= BUDGET
        if self.model.waiting:
            following = self.model.asked[self.model.waiting[0]].units
            assert len(plan.slots) == SLOTS or (units and sum(units) + following > BUDGET)

    def _draw_names(self, data: st.DataObject) -> list[str]:
        names = st.sampled_from([*self.model.asked, "nobody"])
        return data.draw(st.lists(names, min_size=1, max_size=3))

    def _note_aborts(self, names: list[str], ended: list[str]) -> None:
        for name in names:
            if name in ended:
                self.model.asked[name].aborted = True
            if name in self.model.waiting:
                self.model.waiting.remove(name)


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrder = SchedulerMachine.TestCase


class LongMessagesMachine(SchedulerMachine):
    """The same where two frames are a long message, so that endings, too, wait in line for the pace."""

    def __init__(self) -> None:
        super().__init__()
        self._context.enter_context(patch.object(outbox, "MESSAGE_SAMPLES", 2 * FRAME))
        self._context.enter_context(patch.object(outbox, "LONG_SAMPLES_PER_SECOND", 100 * FRAME))

    def teardown(self) -> None:
        self.engine.step_seconds = 0.01
        super().teardown()


TestAnyOrderOfLongMessages = LongMessagesMachine.TestCase
TestAnyOrderOfLongMessages.settings = SchedulerMachine.TestCase.settings

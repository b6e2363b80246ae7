from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.serialization import serialize_additional_information

from pega_omni_plugin.engine import client as engine_client
from pega_omni_plugin.engine.client import EngineClient, runs_our_program, start_engine
from pega_omni_plugin.engine.errors import CallFailed, EngineBusy, EngineDead, EngineTimeout, RequestFailed
from pega_omni_plugin.engine.program import CharacterFront, Prompt, Speech
from pega_omni_plugin.engine.wire import Ending, decode_speech, encode_ending, encode_info
from pega_omni_plugin.models.sim.program import SimOptions, SimProgram
from tests.bench.virtual_time import run

INFO = SimProgram(SimOptions()).info
SPEECH = Speech("Hello.", "alloy", seed=1)
PROMPT = Prompt(6, {"text_ids": [1, 2]})
DESCRIPTION = {
    "info": orjson.loads(encode_info(INFO)),
    "checkpoint": "/models/sim",
    "program": "sim",
    "options": {},
    "slots": 2,
    "queue": 1,
    "stall_seconds": 60.0,
    "request_seconds": 600.0,
}


def output(*samples: int, ending: Ending | None = None, reason: str | None = None) -> Any:
    """What vLLM-Omni yields for a message of the engine."""
    audio = torch.tensor(samples, dtype=torch.int16)
    return SimpleNamespace(
        multimodal_output={"audio": audio},
        finished=ending is not None or reason is not None,
        outputs=[SimpleNamespace(stop_reason=encode_ending(ending) if ending is not None else reason)],
    )


class FakeOmni:
    """vLLM-Omni's client: every request gets ``script``, then waits unless the script ended it."""

    def __init__(self, script: list[Any] | None = None) -> None:
        self.script = script or []
        self.log_stats = True
        self.prompts: list[Any] = []
        self.names: list[str] = []
        self.aborted = 0
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {"describe": orjson.dumps(DESCRIPTION), "stats": b'{"steps": 7}'}
        self.health: Exception | None = None

    async def generate(self, *, prompt: Any, request_id: str, sampling_params_list: Any) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        self.names.append(request_id)
        try:
            for item in self.script:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield item
            if not self.script or not self.script[-1].finished:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def collective_rpc(self, method: str, args: Any = (), stage_ids: Any = None) -> Any:
        self.calls.append((method, args))
        answer = self.answers[method]
        if answer is None:
            await asyncio.Event().wait()
        return [[answer]]

    async def check_health(self) -> None:
        if self.health is not None:
            raise self.health


def client(omni: FakeOmni) -> EngineClient:
    return EngineClient(omni, DESCRIPTION)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until it holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never holds")


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """Connecting sets it for the whole process."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def engine_process() -> Iterator[BaseProcess]:
    """A child that bears an engine's name and does nothing."""
    process = multiprocessing.get_context("spawn").Process(
        target=time.sleep, args=(60,), name="StageEngineCoreProc_test", daemon=True
    )
    process.start()
    yield process
    process.kill()
    process.join()


async def test_a_request_carries_the_speech_and_brings_audio_and_ending_back() -> None:
    omni = FakeOmni([output(1, 2), output(), output(3, ending=Ending("length", 9))])
    speaking = client(omni)
    async with speaking.speak(SPEECH, PROMPT) as stream:
        pieces = [pcm async for pcm in stream]
    assert [pcm.tolist() for pcm in pieces] == [[1, 2], [3]]
    assert {pcm.dtype for pcm in pieces} == {np.dtype(np.int16)}
    assert stream.ending == Ending("length", 9)
    payload = serialize_additional_information(omni.prompts[0]["additional_information"])
    assert decode_speech(payload) == (SPEECH, PROMPT)
    assert omni.aborted == 0


async def test_requests_have_names_of_their_own() -> None:
    omni = FakeOmni([output(1, ending=Ending("stop", 1))])
    speaking = client(omni)
    for _ in range(2):
        async with speaking.speak(SPEECH, PROMPT) as stream:
            assert len([pcm async for pcm in stream]) == 1
    assert len(set(omni.names)) == 2


async def test_the_front_is_that_of_the_program_that_the_engine_describes() -> None:
    front = client(FakeOmni()).front
    assert isinstance(front, CharacterFront)
    assert front.prepare(SPEECH).units == len(SPEECH.input)
    assert front.sample()[0].voice == INFO.default_voice


async def test_leaving_the_block_early_aborts_the_request() -> None:
    omni = FakeOmni([output(1)])
    speaking = client(omni)
    async with speaking.speak(SPEECH, PROMPT) as stream:
        await anext(stream)
    assert await speaking.drained(1)
    assert omni.aborted == 1
    assert speaking.in_flight == 0


async def test_all_slots_and_the_queue_full_is_busy_at_once_until_one_leaves() -> None:
    omni = FakeOmni()
    speaking = client(omni)
    first = speaking.speak(SPEECH, PROMPT)
    await first.__aenter__()
    async with speaking.speak(SPEECH, PROMPT), speaking.speak(SPEECH, PROMPT):
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="2 requests run and 1 wait"):
            async with speaking.speak(SPEECH, PROMPT):
                raise AssertionError("there was room for a fourth request")
        with pytest.raises(EngineBusy, match="2 requests run and 1 wait"):
            speaking.check_room()
        assert (len(omni.prompts), speaking.in_flight) == (3, 3)
        await first.__aexit__(None, None, None)
        await until(lambda: speaking.in_flight == 2)
        speaking.check_room()
        async with speaking.speak(SPEECH, PROMPT):
            assert speaking.in_flight == 3


@pytest.mark.parametrize("error", [RuntimeError("row is bad"), ValueError("row is bad")])
async def test_a_failure_of_the_request_is_told_after_the_audio_before_it(error: Exception) -> None:
    speaking = client(FakeOmni([output(1), error]))
    async with speaking.speak(SPEECH, PROMPT) as stream:
        assert (await anext(stream)).tolist() == [1]
        with pytest.raises(RequestFailed, match="row is bad"):
            await anext(stream)


async def test_an_ending_without_a_reason_is_a_failure_and_no_whole_answer() -> None:
    finished = output(1)
    finished.finished = True
    async with client(FakeOmni([finished])).speak(SPEECH, PROMPT) as stream:
        await anext(stream)
        with pytest.raises(RequestFailed):
            await anext(stream)
    assert stream.ending is None


@pytest.mark.parametrize(
    ("answer", "said"), [({"error": "no such method"}, "no such method"), ({"supported": False}, "supported")]
)
async def test_a_control_call_that_the_engine_refuses_fails(answer: Any, said: str) -> None:
    omni = FakeOmni()
    omni.answers["tick"] = answer
    with pytest.raises(CallFailed, match=f"'tick'.*{said}"):
        await client(omni).call("tick")


async def test_a_control_call_brings_its_arguments_there_and_its_answer_back() -> None:
    omni = FakeOmni()
    omni.answers["tick"] = {"frames": [1, 2]}
    assert await client(omni).call("tick", 3, "x") == {"frames": [1, 2]}
    assert omni.calls == [("tick", (3, "x"))]


def test_a_control_call_without_an_answer_times_out() -> None:
    async def story() -> None:
        omni = FakeOmni()
        omni.answers["tick"] = None
        with pytest.raises(EngineTimeout, match="'tick' within 3 s"):
            await client(omni).call("tick", seconds=3)
        assert asyncio.get_running_loop().time() == pytest.approx(3)

    run(story())


def test_draining_waits_for_requests_as_long_as_it_may() -> None:
    async def story() -> None:
        speaking = client(FakeOmni())
        assert await speaking.drained(5)
        async with speaking.speak(SPEECH, PROMPT):
            assert not await speaking.drained(5)
            assert asyncio.get_running_loop().time() == pytest.approx(5)
        assert await speaking.drained(5)
        assert asyncio.get_running_loop().time() == pytest.approx(5)

    run(story())


async def test_connecting_asks_what_is_served_and_keeps_statistics(engine_process: BaseProcess) -> None:
    omni = FakeOmni()
    speaking = await EngineClient.connect(omni)
    assert (speaking.info, speaking.slots, speaking.queue) == (INFO, 2, 1)
    assert not omni.log_stats
    await until(lambda: speaking.stats != {})
    assert speaking.stats == {"steps": 7}
    await speaking.close()


async def test_an_engine_that_this_process_did_not_start_is_refused() -> None:
    with pytest.raises(RuntimeError, match="StageEngineCoreProc"):
        await EngineClient.connect(FakeOmni())


async def test_the_death_of_the_engine_process_fails_every_stream_and_call_and_is_told(
    engine_process: BaseProcess,
) -> None:
    omni = FakeOmni([output(1)])
    omni.answers["tick"] = None
    speaking = await EngineClient.connect(omni)
    told: list[EngineDead] = []
    speaking.on_death = told.append

    async def hear() -> None:
        async with speaking.speak(SPEECH, PROMPT) as stream:
            async for _ in stream:
                pass

    waiting = [asyncio.create_task(one) for one in (hear(), hear(), speaking.call("tick", seconds=60))]
    await until(lambda: len(omni.prompts) == 2)
    engine_process.kill()

    async with asyncio.timeout(10):
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDead] * 3
    assert len(told) == 1
    assert told[0] is speaking.dead
    assert f"{engine_process.pid}" in str(told[0])
    with pytest.raises(EngineDead):
        async with speaking.speak(SPEECH, PROMPT):
            raise AssertionError("a dead engine took a request")
    with pytest.raises(EngineDead):
        speaking.check_room()
    with pytest.raises(EngineDead):
        await speaking.call("stats")
    assert await speaking.drained(10)
    await speaking.close()


async def test_an_engine_that_vllm_omni_gave_up_is_dead(engine_process: BaseProcess) -> None:
    omni = FakeOmni()
    omni.health = EngineDeadError("stage 0 is gone")
    speaking = await EngineClient.connect(omni)
    await until(lambda: speaking.dead is not None)
    assert "stage 0 is gone" in str(speaking.dead)
    await speaking.close()


async def test_closing_stops_the_watch(engine_process: BaseProcess) -> None:
    speaking = await EngineClient.connect(FakeOmni())
    await speaking.close()
    engine_process.kill()
    engine_process.join()
    for _ in range(3):
        await asyncio.sleep(0)
    assert speaking.dead is None


@pytest.mark.parametrize(
    ("schedulers", "ours"),
    [
        (["pega_omni_plugin.engine.scheduler.ProgramScheduler"], True),
        (["vllm_omni.core.sched.OmniARScheduler"], False),
        (["pega_omni_plugin.engine.scheduler.ProgramScheduler", None], False),
        ([], False),
    ],
)
def test_our_programs_are_told_by_their_scheduler(schedulers: list[str | None], ours: bool) -> None:
    stages = [SimpleNamespace(scheduler_cls=name) for name in schedulers]
    assert runs_our_program(SimpleNamespace(stage_configs=stages)) is ours


async def test_a_request_that_is_made_but_not_read_still_counts() -> None:
    """Or callers that do not read would fill the memory, each with a whole answer, past every limit."""
    speaking = client(FakeOmni([output(1, ending=Ending("stop", 1))]))
    async with speaking.speak(SPEECH, PROMPT) as stream:
        await until(lambda: not speaking._pumps)
        assert speaking.in_flight == 1
        assert len([pcm async for pcm in stream]) == 1
    assert speaking.in_flight == 0


@pytest.mark.parametrize(("deploy_config", "options"), [(None, {}), ("x.yaml", {"deploy_config": "x.yaml"})])
def test_the_engine_starts_when_the_configurations_of_checkpoints_are_known(
    monkeypatch: pytest.MonkeyPatch, deploy_config: str | None, options: dict[str, str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(engine_client, "register_omni_models_to_vllm", lambda: calls.append("known"))
    monkeypatch.setattr(engine_client, "AsyncOmni", lambda **given: calls.append(given))
    start_engine("/models/tiny", deploy_config)
    assert calls == ["known", {"model": "/models/tiny", "log_stats": False, **options}]

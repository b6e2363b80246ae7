from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import orjson
import pytest
import torch

from pega_omni_plugin.engine.config import make_front
from pega_omni_plugin.engine.program import FatalProgramError, ProgramInfo, StepOutput
from pega_omni_plugin.engine.shared import PROCESS
from pega_omni_plugin.engine.wire import decode_info
from tests.engine.harness import CHECKPOINT, CheckedProgram, Engine, checked_engine, speech, whole


@pytest.fixture
def engine() -> Iterator[Engine]:
    with checked_engine(slots=4) as made:
        yield made


def test_prefill_failure_ends_the_guilty_request_alone(engine: Engine) -> None:
    first, guilty, third = (
        engine.add(speech(1, 10, 10)),
        engine.add(speech(2, 10, fail="prefill")),
        engine.add(speech(3, 10, 10)),
    )
    engine.run()
    assert engine.program.prefilled == [[1, 2, 3], [1], [2], [3]]
    assert engine.heard[guilty].stop_reason == "prefill failed: ValueError: cannot say 2"
    assert engine.heard[guilty].pieces == []
    for name, number in ((first, 1), (third, 3)):
        assert engine.heard[name].audio.tolist() == whole(speech(number, 10, 10)).tolist()


def test_a_slot_that_failed_prefill_is_not_stepped(engine: Engine) -> None:
    engine.add(speech(1, 10, fail="prefill"))
    engine.add(speech(2, 10, fail="prefill"))
    engine.run()
    assert engine.program.stepped == []
    assert engine.stats.failed == 2
    assert engine.program.held == {}


def test_prefill_failure_leaves_running_streams_alone(engine: Engine) -> None:
    running = engine.add(speech(1, *[10] * 4))
    engine.step()
    engine.add(speech(2, 10, fail="prefill"))
    engine.run()
    assert engine.heard[running].audio.tolist() == whole(speech(1, *[10] * 4)).tolist()


def test_step_failure_ends_its_rows_and_the_next_request_is_served(engine: Engine) -> None:
    names = [engine.add(speech(1, 10, 10, 10, fail="step", at=1)), engine.add(speech(2, 10, 10, 10))]
    engine.run()
    for name in names:
        assert engine.heard[name].stop_reason == "step failed: RuntimeError: lost the thread"
    later = engine.add(speech(3, 10))
    engine.run()
    assert engine.heard[later].audio.tolist() == whole(speech(3, 10)).tolist()
    assert engine.program.held == {}


def test_row_error_ends_its_row_and_not_its_batch(engine: Engine) -> None:
    bad, good = engine.add(speech(1, 10, 10, fail="row", at=1)), engine.add(speech(2, 10, 10))
    engine.run()
    assert engine.heard[bad].stop_reason == "row 1 is bad"
    assert engine.heard[good].audio.tolist() == whole(speech(2, 10, 10)).tolist()


def test_a_program_that_answers_for_too_few_slots_fails_its_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_short(self: CheckedProgram, slots: Sequence[int]) -> list[StepOutput]:
        for slot in slots:
            self.held[slot].over = True
        return [StepOutput(np.zeros(1, np.int16))] * (len(slots) - 1)

    names = [engine.add(speech(1, 10)), engine.add(speech(2, 10))]
    monkeypatch.setattr(CheckedProgram, "step", one_short)
    engine.run()
    assert all(engine.heard[name].stop_reason.startswith("step failed: ValueError") for name in names)


@pytest.mark.parametrize(("fail", "raised"), [("lost", FatalProgramError), ("memory", torch.OutOfMemoryError)])
def test_errors_that_lose_all_state_end_the_engine(engine: Engine, fail: str, raised: type[Exception]) -> None:
    engine.add(speech(1, 10, 10, fail=fail, at=0))
    with pytest.raises(raised):
        engine.step()


@pytest.mark.parametrize("raised", [FatalProgramError("gone"), MemoryError(), torch.AcceleratorError("bad")])
@pytest.mark.parametrize("requests", [1, 2])
def test_fatal_error_in_prefill_ends_the_engine_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, raised: Exception, requests: int
) -> None:
    calls: list[int] = []

    def fatal(self: CheckedProgram, batch: Sequence[object]) -> None:
        calls.append(len(batch))
        raise raised

    monkeypatch.setattr(CheckedProgram, "prefill", fatal)
    for number in range(requests):
        engine.add(speech(number, 10))
    with pytest.raises(type(raised)):
        engine.step()
    assert calls == [requests]


def test_an_error_without_text_is_named_by_its_type(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: CheckedProgram, batch: Sequence[object]) -> None:
        raise KeyError

    monkeypatch.setattr(CheckedProgram, "prefill", silent)
    name = engine.add(speech(1, 10))
    engine.step()
    assert engine.heard[name].stop_reason == "prefill failed: KeyError"


def test_describe_tells_the_api_process_what_is_served_and_its_limits() -> None:
    with checked_engine(slots=3, queue=5, stall_seconds=7.5, request_seconds=90, options={"model": "other"}) as engine:
        described = orjson.loads(engine.worker.describe())
    assert decode_info(orjson.dumps(described.pop("info"))) == CheckedProgram.info
    assert described == {
        "checkpoint": str(CHECKPOINT),
        "program": "sim",
        "options": {"model": "other"},
        "slots": 3,
        "queue": 5,
        "stall_seconds": 7.5,
        "request_seconds": 90.0,
    }


def test_what_is_described_makes_the_front_of_the_program() -> None:
    with checked_engine(options={"model": "other"}) as engine:
        made: list[tuple[Path, str, ProgramInfo]] = []
        description = orjson.loads(engine.worker.describe())
        with patch.object(
            CheckedProgram,
            "front",
            lambda checkpoint, options, info: made.append((checkpoint, options.model, info)),
        ):
            make_front(description, CheckedProgram.info)
    assert made == [(CHECKPOINT, "other", CheckedProgram.info)]


def test_a_model_that_is_no_directory_is_looked_up_in_the_hub_at_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot(model: str, revision: str | None) -> str:
        asked.append((model, revision))
        return str(tmp_path)

    monkeypatch.setattr("pega_omni_plugin.engine.worker.snapshot_download", snapshot)
    with checked_engine() as engine:
        assert asked == []
        engine.worker.vllm_config.model_config = SimpleNamespace(model="owner/voice", revision="v1")
        engine.worker.load_model()
        assert orjson.loads(engine.worker.describe())["checkpoint"] == str(tmp_path)
    assert asked == [("owner/voice", "v1")]


def test_stats_are_those_of_this_process(engine: Engine) -> None:
    engine.add(speech(1, 100, 100))
    engine.add(speech(2, 10, 10, fail="row", at=1))
    engine.run()
    stats = orjson.loads(engine.worker.stats())
    counted = {
        "slots": 4,
        "waiting": 0,
        "running": 0,
        "steps": 2,
        "frames": 3,
        "admitted": 2,
        "aborted": 0,
        "failed": 1,
    }
    assert {name: stats[name] for name in counted} == counted
    assert stats["finished"] == {"stop": 1}
    assert stats["part_seconds"] == {"thinker": 1.5}
    assert sum(stats["step_seconds"]["counts"]) == sum(stats["batch"]["counts"]) == 2
    assert stats["batch"]["sum"] == 4
    assert sum(stats["queue_seconds"]["counts"]) == 2


def test_loading_tells_the_scheduler_and_closing_the_program(engine: Engine) -> None:
    assert PROCESS.info is CheckedProgram.info
    engine.worker.shutdown()
    assert engine.program.closed

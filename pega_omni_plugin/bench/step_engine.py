"""What the engine's scheduler and worker add to a program's step, in one process and without sockets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace

from vllm import SamplingParams
from vllm_omni.engine.serialization import serialize_additional_information
from vllm_omni.request import OmniRequest

from pega_omni_plugin.engine.kernels import vllm_kernels
from pega_omni_plugin.engine.program import Admission, Program
from pega_omni_plugin.engine.scheduler import ProgramScheduler
from pega_omni_plugin.engine.shared import PROCESS
from pega_omni_plugin.engine.wire import encode_speech
from pega_omni_plugin.engine.worker import ProgramWorker
from pega_omni_plugin.nn import kernels


def use_fused_kernels() -> None:
    """Put vLLM's operations in place, as the engine's worker does."""
    fused = vllm_kernels()
    if fused is not None:
        kernels.use(fused)


def overhead_seconds(program: Program, requests: Sequence[Admission], steps: int) -> float:
    """Seconds of a step in which the program itself does not run, the median of ``steps``.

    All requests are admitted first. A step is what vLLM's engine core does: plan, run, collect.
    """
    PROCESS.info = program.info
    config = SimpleNamespace(additional_config={"program": "qwen3_tts", "slots": len(requests)})
    worker = ProgramWorker.__new__(ProgramWorker)
    worker.program = program
    scheduler = ProgramScheduler(config)
    for number, one in enumerate(requests):
        information = serialize_additional_information(encode_speech(one.speech, one.prompt))
        request = OmniRequest(
            f"r{number}", [0], SamplingParams(max_tokens=16), None, additional_information=information
        )
        scheduler.add_request(request)
    seconds: list[float] = []
    inside: list[float] = []
    run = program.step

    def timed(slots: Sequence[int]) -> object:
        begun = time.perf_counter()
        outputs = run(slots)
        inside.append(time.perf_counter() - begun)
        return outputs

    program.step = timed  # type: ignore[method-assign, assignment]
    try:
        for _ in range(steps):
            begun = time.perf_counter()
            plan = scheduler.schedule()
            inside.clear()
            scheduler.update_from_output(plan, worker.execute_model(plan))
            if len(plan.plan.slots) == len(requests) and not plan.plan.admissions:
                seconds.append(time.perf_counter() - begun - sum(inside))
    finally:
        program.step = run  # type: ignore[method-assign]
    return statistics.median(seconds)

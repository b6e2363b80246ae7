"""The step: runs the program inside vLLM's engine process.

vLLM calls ``execute_model`` with the scheduler's plan; everything else here answers what vLLM asks of a worker at
start-up, or is a control call (``describe``, ``stats``) that the API process makes by ``collective_rpc``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from huggingface_hub import snapshot_download
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from pega_omni_plugin.engine.config import parse_engine, parse_options, program_class
from pega_omni_plugin.engine.kernels import vllm_kernels
from pega_omni_plugin.engine.program import Admission, FatalProgramError, Program, StepOutput
from pega_omni_plugin.engine.shared import PROCESS, SWITCH_SECONDS, Plan, Result, stats_document
from pega_omni_plugin.engine.wire import encode_info
from pega_omni_plugin.nn import kernels

logger = init_logger(__name__)

_NOTHING = np.zeros(0, dtype=np.int16)

UNCONTAINABLE = (FatalProgramError, MemoryError, torch.AcceleratorError, torch.OutOfMemoryError)
"""After one of these no slot's state can be trusted: the process ends, and its callers are told."""


class ProgramWorker(WorkerBase):
    """One program, one device, in the engine core's own process."""

    program: Program
    checkpoint: Path

    def init_device(self) -> None:
        """The program chooses its devices, part by part."""
        self.device = torch.device("cpu")
        self.model_runner = self
        # vLLM's threads that carry requests and messages wait for the interpreter while a step runs: Python's 5 ms each
        # would be the better part of the time to first audio.
        sys.setswitchinterval(SWITCH_SECONDS)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the program that the stage file names from the model's directory."""
        config = parse_engine(self.vllm_config.additional_config, "additional_config")
        begun = time.perf_counter()
        self.checkpoint = _checkpoint(self.vllm_config.model_config)
        fused = vllm_kernels()
        if fused is not None:
            kernels.use(fused)
        self.program = program_class(config.program).load(
            self.checkpoint, parse_options(config), config.parts, config.slots
        )
        PROCESS.info = self.program.info
        PROCESS.stats.part_seconds = self.program.part_seconds
        logger.info("program %s loaded in %.2f s", config.program, time.perf_counter() - begun)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Result:
        """One step: release, prefill, advance every slot.

        What the program raises ends the requests concerned, with the reason, and the engine goes on.
        """
        plan: Plan = scheduler_output.plan
        begun = time.perf_counter()
        for slot in plan.releases:
            self.program.release(slot)
        failed = self._prefill(plan.admissions) if plan.admissions else {}
        slots = [slot for slot in plan.slots if slot not in failed] if failed else plan.slots
        outputs = self._step(slots) if slots else {}
        return Result(outputs | failed, time.perf_counter() - begun)

    def _prefill(self, batch: list[Admission]) -> dict[int, StepOutput]:
        try:
            self.program.prefill(batch)
        except UNCONTAINABLE:
            raise
        except Exception as error:
            if len(batch) > 1:
                # Prefill overwrites what a slot holds: offered one by one, only the guilty fail.
                return {slot: output for one in batch for slot, output in self._prefill([one]).items()}
            logger.exception("prefill failed for slot %d", batch[0].slot)
            return {batch[0].slot: StepOutput(_NOTHING, error=f"prefill failed: {_reason(error)}")}
        return {}

    def _step(self, slots: list[int]) -> dict[int, StepOutput]:
        try:
            return dict(zip(slots, self.program.step(slots), strict=True))
        except UNCONTAINABLE:
            raise
        except Exception as error:
            logger.exception("step failed for slots %s", slots)
            return dict.fromkeys(slots, StepOutput(_NOTHING, error=f"step failed: {_reason(error)}"))

    # Control calls.

    def describe(self) -> bytes:
        """Program info and limits, JSON."""
        config = parse_engine(self.vllm_config.additional_config, "additional_config")
        return orjson.dumps(
            {
                "info": orjson.loads(encode_info(self.program.info)),
                "checkpoint": str(self.checkpoint),
                "program": config.program,
                "options": config.options,
                "slots": config.slots,
                "queue": config.queue,
                "stall_seconds": config.stall_seconds,
                "request_seconds": config.request_seconds,
            }
        )

    def stats(self) -> bytes:
        """Counters of this process, JSON."""
        return orjson.dumps(stats_document(PROCESS.stats))

    # What vLLM asks of a worker.

    def get_model(self) -> torch.nn.Module:
        """vLLM wants a module; the program is not one."""
        return torch.nn.Identity()

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """None: the program's caches are its own."""
        return {}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Any will do for no cache."""
        return ["NHD"]

    def set_kv_cache_layout(self, layout: str) -> None:
        """There is no cache."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The task under which vLLM lets requests in."""
        return ("generate",)

    def determine_available_memory(self) -> int:
        """Bytes that vLLM may use for caches."""
        return 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """There is no cache."""

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """There is no cache."""

    def update_max_model_len(self, max_model_len: int) -> None:
        """Limits are the program's own."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """The program captured its graphs when it was loaded."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def check_health(self) -> None:
        """Alive if it answers."""

    def shutdown(self) -> None:
        """The engine core stops."""
        self.program.close()


def _checkpoint(model_config: Any) -> Path:
    """The model's directory: as given, or where the hub's cache has it (downloaded if the hub may be asked)."""
    path = Path(model_config.model)
    if path.is_dir():
        return path
    return Path(snapshot_download(model_config.model, revision=model_config.revision))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

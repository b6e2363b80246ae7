"""vLLM's CPU platform, adjusted for the stages of vLLM-Omni."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def require_v1_runner(model_config: Any) -> None:
    """Refuse a stage that asks for vLLM-Omni's second model runner.

    There is no CPU worker for it. vLLM-Omni would start all the same: the scheduler then waits for a data plane that
    the worker does not have, and every request hangs.

    Raises:
        NotImplementedError: naming the key and its only value here.
    """
    if model_config.use_v2_model_runner:
        raise NotImplementedError(
            "model_runner: v2 does not run on CPU (requests would wait forever); "
            "set `model_runner: v1` at the top of the deploy config"
        )


class StageCpuPlatform(CpuPlatform):
    """Keeps a stage's worker inside the stage's own process.

    vLLM's CPU platform turns the in-process executor ``uni`` into ``mp``, so that each worker's OpenMP threads can be
    bound to cores. For a pipeline of several stages that is one more process each (about 1 GB and 20 s of imports) and
    a shared-memory queue that spins: on two cores the first packet came after 366 ms in place of 65 ms. Threads are
    set with ``OMP_NUM_THREADS`` instead, in the environment or under ``env`` of the stage.

    Models outside vLLM-Omni are configured as vLLM does.
    """

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Apply vLLM's CPU settings to ``vllm_config``; refuse what cannot run, before a process is started.

        Raises:
            NotImplementedError: for ``model_runner: v2``.
        """
        # Only vLLM-Omni's model configs know stages. Not an isinstance check: importing that class costs seconds.
        stage = hasattr(vllm_config.model_config, "stage_id")
        if stage:
            require_v1_runner(vllm_config.model_config)
        parallel = vllm_config.parallel_config
        in_process = stage and parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"
        super().check_and_update_config(vllm_config)
        if in_process:
            parallel.distributed_executor_backend = "uni"

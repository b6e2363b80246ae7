"""Workers and model runners of token and vocoder stages on CPU.

vLLM-Omni's runners extend vLLM's GPU runner, and so does vLLM's CPU runner. Placed between the two in the method
resolution order, the CPU runner overrides vLLM's device code while vLLM-Omni's own steps stay as they are.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.base import OmniGPUWorkerBase
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from pega_omni_plugin.platform.vllm_cpu import require_v1_runner


class _CpuRunner:
    """What vLLM-Omni's runners assume of a GPU and vLLM's CPU runner does not cover."""

    def _make_buffer(self, *size: int, dtype: Any, numpy: bool = True) -> CpuGpuBuffer:
        # vLLM's CPU runner joins the two halves of the buffers that exist when its constructor ends; vLLM-Omni makes
        # more of them afterwards.
        buffer = super()._make_buffer(*size, dtype=dtype, numpy=numpy)  # type: ignore[misc]
        buffer.gpu = buffer.cpu
        return buffer

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # Without graphs vLLM leaves this None; vLLM-Omni compares it with a number to size the talker's buffers.
        config = self.compilation_config  # type: ignore[attr-defined]
        config.max_cudagraph_capture_size = config.max_cudagraph_capture_size or 0
        super().load_model(*args, **kwargs)  # type: ignore[misc]


class CpuARModelRunner(_CpuRunner, GPUARModelRunner, CPUModelRunner):
    """Runs stages that sample tokens."""


class CpuGenerationModelRunner(_CpuRunner, GPUGenerationModelRunner, CPUModelRunner):
    """Runs stages that turn their whole input into output, as vocoders do."""


class _CpuWorker(OmniWorkerMixin, CPUWorker, OmniGPUWorkerBase):
    # vLLM-Omni reads this from the class to check that the stage can be connected to its neighbours.
    model_runner_cls: ClassVar[type]

    def init_device(self) -> None:
        # The platform has refused this already, unless VLLM_TARGET_DEVICE=cpu made vLLM bypass platform plugins.
        require_v1_runner(self.model_config)
        self.use_v2_model_runner = False  # vLLM's own choice, which VLLM_USE_V2_MODEL_RUNNER may have made
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)


class CpuARWorker(_CpuWorker):
    """Worker of stages that sample tokens."""

    model_runner_cls = CpuARModelRunner


class CpuGenerationWorker(_CpuWorker):
    """Worker of stages that turn their whole input into output."""

    model_runner_cls = CpuGenerationModelRunner

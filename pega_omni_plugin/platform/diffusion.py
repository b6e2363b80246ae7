"""Diffusion stages on CPU: attention and worker."""

from __future__ import annotations

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


class CpuSdpaImpl(SDPAImpl):
    """vLLM-Omni's attention through PyTorch, without its choice by device, which knows accelerators only."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attend ``query`` [batch, rows, heads, head_dim] over ``key`` and ``value`` [batch, rows, kv_heads, head_dim].

        Returns [batch, rows, heads, head_dim]. The path named after CUDA holds nothing of CUDA.
        """
        return self.forward_cuda(query, key, value, attn_metadata)


class CpuSdpaBackend(SDPABackend):
    """Tells diffusion models to attend with ``CpuSdpaImpl``."""

    @staticmethod
    def get_impl_cls() -> type[CpuSdpaImpl]:
        """The implementation that layers instantiate."""
        return CpuSdpaImpl


class CpuDiffusionWorker(DiffusionWorker):
    """vLLM-Omni's diffusion worker, in the process of its stage only.

    In a process of its own it returns results through a thread that asks PyTorch for the current accelerator. The CPU
    stack carries a CUDA build of PyTorch, which answers "cuda": the thread dies and every request hangs.
    """

    def __init__(
        self, local_rank: int, rank: int, od_config: OmniDiffusionConfig, skip_load_model: bool = False
    ) -> None:
        """Start the worker.

        Raises:
            NotImplementedError: when the stage asks for worker processes.
        """
        if DiffusionExecutor.get_class(od_config).uses_multiproc:
            raise NotImplementedError(
                "distributed_executor_backend: mp does not run on CPU for diffusion stages (requests would wait "
                "forever); set it to `uni`, or leave it out, and give the stage one device"
            )
        super().__init__(local_rank, rank, od_config, skip_load_model)

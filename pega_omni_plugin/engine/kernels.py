"""vLLM's fused operations, under the names that ``nn.kernels`` gives them."""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from pega_omni_plugin.nn.kernels import Kernels

logger = init_logger(__name__)

_NAMES = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")


def vllm_kernels() -> Kernels | None:
    """The operations of the CPU build of vLLM; ``None`` with others, on whose devices ours are used, or where one is
    missing."""
    if not current_platform.is_cpu():
        return None
    current_platform.import_kernels()
    if not all(hasattr(torch.ops._C, name) for name in _NAMES):
        logger.info("vLLM's fused operations are not there: PyTorch's own are used")
        return None
    # The overload itself: choosing one costs as much as running it.
    norm, add_norm, silu, rotary = (getattr(torch.ops._C, name).default for name in _NAMES)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        norm(out, x, weight, eps)
        return out

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        add_norm(x, residual, weight, eps)
        return x, residual

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        silu(out, gate_up)
        return out

    def turn(
        heads: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, eps: float
    ) -> torch.Tensor:
        turned = torch.empty_like(heads)
        norm(turned, heads, None, eps)
        turned.mul_(weight)
        rotary(positions, turned.flatten(1), None, heads.shape[-1], table, True)
        return turned

    return Kernels(rms_norm, add_rms_norm, silu_mul, turn)

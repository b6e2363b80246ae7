"""The class behind our architecture name. vLLM inspects it; our worker never builds it, it loads the program itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PegaProgram(nn.Module):
    """Carries the methods by which vLLM recognises a text generation model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        raise RuntimeError("stage worker_cls must be pega_omni_plugin.engine.worker.ProgramWorker for our pipelines")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Only inspected."""
        raise AssertionError("never built")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Only inspected."""
        raise AssertionError("never built")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Only inspected."""
        raise AssertionError("never built")

"""Hugging Face configurations of programs without weights. vLLM pickles them by name into the engine process."""

from __future__ import annotations

from transformers import PretrainedConfig


class SimConfig(PretrainedConfig):
    """``config.json`` of the simulator's model directory."""

    model_type = "pega_sim"


class PiperConfig(PretrainedConfig):
    """``config.json`` of the embedded voice's model directory."""

    model_type = "pega_piper"


CONFIGS = (SimConfig, PiperConfig)

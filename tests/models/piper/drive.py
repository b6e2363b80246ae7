"""Run requests through a program, as the engine would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pega_omni_plugin.models.piper
from pega_omni_plugin.engine.program import Admission, Pcm, Program, Prompt, Speech, StepOutput

CHECKPOINT = Path(pega_omni_plugin.models.piper.__file__).parent / "checkpoint"


def speech(text: str, seed: int = 7, speed: float = 1.0, **extra: Any) -> Speech:
    return Speech(input=text, voice="joe", seed=seed, speed=speed, extra=extra)


def admission(slot: int, request: Speech) -> Admission:
    return Admission(slot, request, Prompt(len(request.input)))


def finish(program: Program, slots: list[int]) -> dict[int, list[StepOutput]]:
    """Step ``slots`` until each is over; returns what each step made for each of them."""
    outputs: dict[int, list[StepOutput]] = {slot: [] for slot in slots}
    while slots:
        for slot, output in zip(slots, program.step(slots), strict=True):
            outputs[slot].append(output)
        slots = [slot for slot in slots if outputs[slot][-1].finish is None and outputs[slot][-1].error is None]
    return outputs


def run(program: Program, requests: Mapping[int, Speech]) -> dict[int, list[StepOutput]]:
    program.prefill([admission(slot, request) for slot, request in requests.items()])
    return finish(program, list(requests))


def audio(outputs: list[StepOutput]) -> Pcm:
    return np.concatenate([output.pcm for output in outputs])

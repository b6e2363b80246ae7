"""Requests as the engine gives them to the program, and samplers that say which codes come next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pega_omni_plugin.engine.program import Admission, FinishReason, Pcm, Prompt, Speech
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from pega_omni_plugin.models.qwen3_tts.prompt import Clone, PromptBuilder, TalkerPrompt
from pega_omni_plugin.models.qwen3_tts.sampler import CpuSampler, DrawSettings

GREEDY = {"temperature": 0.0, "subtalker_temperature": 0.0}
"""Extra values of a request that takes the likeliest codes."""


@dataclass
class Heard:
    """What a request was given: the samples of every step, and the codes of every frame, group 0 first."""

    pieces: list[Pcm] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def pcm(self) -> Pcm:
        return np.concatenate(self.pieces)


@dataclass(frozen=True)
class Coming:
    """A request that comes in step ``step`` into ``slot``."""

    slot: int
    speech: Speech
    prompt: Prompt
    step: int = 0


def run(program: Qwen3TtsProgram, *coming: Coming, steps: int = 1000) -> dict[int, Heard]:
    """Serve requests until all of them end, or for so many steps; by slot. Rows stand in the order of admission."""
    heard: dict[int, Heard] = {}
    live: list[int] = []
    for step in range(steps):
        admitted = [Admission(one.slot, one.speech, one.prompt) for one in coming if one.step == step]
        if admitted:
            program.prefill(admitted)
            heard |= {one.slot: Heard() for one in admitted}
            live += [one.slot for one in admitted]
        if not live and step >= max(one.step for one in coming):
            break
        for slot, output in zip(list(live), program.step(live), strict=True):
            assert output.error is None
            heard[slot].pieces.append(output.pcm)
            heard[slot].codes.append(program._codes[slot].tolist())
            heard[slot].finish = output.finish
            if output.finish is not None:
                live.remove(slot)
                program.release(slot)
    return heard


def speak(program: Qwen3TtsProgram, speech: Speech, prompt: Prompt, slot: int = 1) -> Heard:
    """Serve one request alone."""
    return run(program, Coming(slot, speech, prompt))[slot]


def request_prompt(
    builder: PromptBuilder, request: Mapping[str, Any], reference: Clone | None = None, frames: int = 1
) -> TalkerPrompt:
    """The prompt of a request to the official package, as the golden outputs' manifest has it."""
    language = request.get("language", "auto").lower()
    if reference is not None and request.get("x_vector_only_mode"):
        reference = Clone(reference.embedding, reference.codes)
    return builder.build(
        request["text"],
        frames=frames,
        language=None if language == "auto" else language,
        speaker=request["speaker"].lower() if "speaker" in request else None,
        instruction=request.get("instruct"),
        clone=reference,
        # The package's own default is to read on while speaking for cloned voices only.
        whole_text=request.get("non_streaming_mode", reference is None),
    )


def as_prompt(prompt: TalkerPrompt) -> Prompt:
    return Prompt(len(prompt), prompt.document())


class Wrapped:
    """A sampler around another, for tests to change what it draws."""

    def __init__(self, sampler: CpuSampler) -> None:
        self.inner = sampler

    def admit(self, slot: int, settings: DrawSettings, seed: int) -> None:
        self.inner.admit(slot, settings, seed)

    def begin(self, slots: Sequence[int], frames: np.ndarray) -> None:
        self.inner.begin(slots, frames)

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        return self.inner.first(logits)

    def next(self, group: int, logits: torch.Tensor) -> torch.Tensor:
        return self.inner.next(group, logits)


class Forced(Wrapped):
    """Gives the first row ``codes`` ``[frames, groups]`` in place of draws, and keeps the logits.

    After those frames it goes on with draws. ``first_logits`` has one array a frame, ``next_logits`` one a frame and
    further group.
    """

    def __init__(self, sampler: CpuSampler, codes: np.ndarray) -> None:
        super().__init__(sampler)
        self.codes = codes
        self.frame = 0
        self.first_logits: list[np.ndarray] = []
        self.next_logits: list[np.ndarray] = []

    def begin(self, slots: Sequence[int], frames: np.ndarray) -> None:
        super().begin(slots, frames)
        self.frame = int(frames[0])

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        self.first_logits.append(logits[0].numpy().copy())
        return self._forced(0, super().first(logits))

    def next(self, group: int, logits: torch.Tensor) -> torch.Tensor:
        self.next_logits.append(logits[0].numpy().copy())
        return self._forced(group, super().next(group, logits))

    def _forced(self, group: int, drawn: torch.Tensor) -> torch.Tensor:
        if self.frame < len(self.codes):
            drawn[0] = int(self.codes[self.frame, group])
        return drawn


class Numbers:
    """``Uniforms`` that are given, ``[frames, groups]``; zeros after them."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def frames(self, first: int, frames: int) -> np.ndarray:
        found = self._numbers[first : first + frames]
        return np.pad(found, ((0, frames - len(found)), (0, 0)))

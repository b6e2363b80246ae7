"""The speech simulator: a tone as long as the speech would be, at a speed that the options set.

It exercises everything but a model: admission, chunks, transport, clients. Output is a pure function of the request;
only the timing follows the wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from pega_omni_plugin.engine.program import (
    Admission,
    CharacterFront,
    FinishReason,
    Front,
    Option,
    Part,
    PartConfig,
    Pcm,
    ProgramInfo,
    Speech,
    StepOutput,
    Voice,
)

TONE_HZ = 220
AMPLITUDE = 8000
VOICES = ("alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse")


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What the simulator pretends to be. Costs are microseconds of sleep in the step that they belong to."""

    model: str = "pega-omni-sim"
    sample_rate: int = 24_000
    frame_rate: float = 12.5
    frames_per_char: float = 0.8
    max_frames: int = 4096
    max_input_chars: int = 4096
    step_base_us: float = 0.0
    step_per_row_us: float = 0.0
    prefill_per_char_us: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (
            ("frame_rate", 0.001),
            ("step_base_us", 0),
            ("step_per_row_us", 0),
            ("prefill_per_char_us", 0),
        ):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number from {least}, got {getattr(self, name)}")
        for name in ("sample_rate", "frames_per_char", "max_frames", "max_input_chars"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}")
        if self._frame.denominator != 1:
            raise ValueError(f"sample_rate {self.sample_rate} / frame_rate {self.frame_rate} is no whole frame")

    @property
    def _frame(self) -> Fraction:
        return self.sample_rate / Fraction(self.frame_rate).limit_denominator(1000)

    @property
    def frame_samples(self) -> int:
        """Samples in one frame."""
        return int(self._frame)


def tone_frames(sample_rate: int, frame_samples: int) -> list[Pcm]:
    """Cut a continuous 220 Hz sine into frames, up to the frame after which its phase repeats.

    Frame ``i`` of a stream is ``frames[i % len(frames)]``, each of shape ``[frame_samples]``.
    """
    cycles = Fraction(TONE_HZ * frame_samples, sample_rate)
    count = cycles.denominator
    phase = 2 * np.pi * TONE_HZ / sample_rate * np.arange(count * frame_samples)
    tone = np.round(AMPLITUDE * np.sin(phase)).astype(np.int16)
    return list(tone.reshape(count, frame_samples))


def planned_frames(speech: Speech, options: SimOptions) -> tuple[int, FinishReason]:
    """Frames that a request gets, and whether the limit cut it."""
    asked = speech.extra.get("frames")
    wanted = asked if asked is not None else math.ceil(len(speech.input) * options.frames_per_char / speech.speed)
    return min(max(int(wanted), 1), options.max_frames), "length" if wanted > options.max_frames else "stop"


@dataclass(slots=True)
class _Stream:
    made: int
    planned: int
    finish: FinishReason


class SimProgram:
    """Program ``sim``."""

    Options: ClassVar[type] = SimOptions

    def __init__(self, options: SimOptions) -> None:
        self.options = options
        self.info = ProgramInfo(
            model=options.model,
            kind="speech",
            sample_rate=options.sample_rate,
            frame_samples=options.frame_samples,
            voices=tuple(Voice(id=name, name=name.capitalize()) for name in VOICES),
            default_voice=VOICES[0],
            max_input_chars=options.max_input_chars,
            max_frames=options.max_frames,
            speeds=(0.25, 4.0),
            instructions=True,
            options={
                "frames": Option("integer", "Frames to make, whatever the text", minimum=1, maximum=options.max_frames)
            },
        )
        self.part_seconds: dict[Part, float] = {"thinker": 0.0, "codec": 0.0, "decoder": 0.0}
        self._frames = tone_frames(options.sample_rate, options.frame_samples)
        self._streams: dict[int, _Stream] = {}

    @classmethod
    def load(
        cls, checkpoint: Path, options: SimOptions, parts: Mapping[Part, PartConfig], slots: int
    ) -> Self:  # there is nothing in the checkpoint but its name
        """Ready at once."""
        return cls(options)

    @classmethod
    def front(cls, checkpoint: Path, options: SimOptions, info: ProgramInfo) -> Front:
        """Text goes to the engine as it is."""
        return CharacterFront(info)

    def prefill(self, batch: Sequence[Admission]) -> None:
        """Plan the new streams; costs ``prefill_per_char_us`` a character."""
        for admission in batch:
            planned, finish = planned_frames(admission.speech, self.options)
            self._streams[admission.slot] = _Stream(0, planned, finish)
        characters = sum(len(admission.speech.input) for admission in batch)
        self._spend("thinker", self.options.prefill_per_char_us * characters)

    def step(self, slots: Sequence[int]) -> Sequence[StepOutput]:
        """One frame for every slot; costs ``step_base_us`` and ``step_per_row_us`` a slot."""
        self._spend("codec", self.options.step_base_us + self.options.step_per_row_us * len(slots))
        outputs = []
        for slot in slots:
            stream = self._streams[slot]
            pcm = self._frames[stream.made % len(self._frames)]
            stream.made += 1
            outputs.append(StepOutput(pcm, stream.finish if stream.made >= stream.planned else None))
        return outputs

    def release(self, slot: int) -> None:
        """Forget the slot's stream."""
        self._streams.pop(slot, None)

    def close(self) -> None:
        """Nothing is held."""
        self._streams.clear()

    def _spend(self, part: Part, microseconds: float) -> None:
        if microseconds > 0:
            begun = time.perf_counter()
            time.sleep(microseconds / 1e6)
            self.part_seconds[part] += time.perf_counter() - begun

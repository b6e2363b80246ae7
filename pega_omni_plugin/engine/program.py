"""The contract between the engine and a model: a *program* makes audio for a batch of slots, step by step.

A program is plain PyTorch or NumPy code that knows nothing of requests, queues, sockets or clocks. The engine
leases it slots, gives it prompts and asks it for the next piece of audio of every leased slot. This module is
imported by models and by the API process alike and therefore depends on NumPy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

Pcm = npt.NDArray[np.int16]
"""Mono 16-bit audio at the program's own sample rate, shape ``[samples]``."""

FinishReason = Literal["stop", "length", "repetition", "silence"]
"""Why a stream ended: ``stop``, the speech is complete; ``length``, the frame limit cut it; ``repetition`` and
``silence``, the model had lost its way and went round in circles or said nothing more."""

Part = Literal["thinker", "codec", "decoder"]
PARTS: tuple[Part, ...] = ("thinker", "codec", "decoder")


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice that a caller may name. ``id`` is what requests carry."""

    id: str
    name: str
    language: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """A key that a caller may send in ``extra``, and what its value may be.

    ``integer`` and ``number`` have inclusive bounds, ``choice`` lists its strings, ``text`` has at most ``maximum``
    characters.
    """

    kind: Literal["integer", "number", "boolean", "choice", "text"]
    description: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """What a loaded program serves; the API validates every request against it, once, before the engine.

    ``sample_rate`` is in Hz, ``frame_samples`` is the unit of usage and of chunk policy, ``speeds`` is the inclusive
    range of the ``speed`` field that the program itself can follow. ``aliases`` are further names of voices, by the
    voice's id. ``clones`` says what further voices may be made from: a recording, whose length in seconds, silence at
    its ends left out, ``recording_seconds`` bounds, and which may be named by URL if ``recording_urls``; or a
    description.
    """

    model: str
    kind: Literal["speech", "live", "image"]
    sample_rate: int
    frame_samples: int
    voices: tuple[Voice, ...]
    default_voice: str
    max_input_chars: int
    max_frames: int
    speeds: tuple[float, float] = (1.0, 1.0)
    instructions: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    clones: Literal["recording", "description"] | None = None
    recording_seconds: tuple[float, float] = (1.0, 30.0)
    recording_urls: bool = False

    @property
    def frame_seconds(self) -> float:
        """Seconds of audio in one frame."""
        return self.frame_samples / self.sample_rate


@dataclass(frozen=True, slots=True)
class Speech:
    """A checked request for speech. ``extra`` holds declared options only; ``seed`` is always set."""

    input: str
    voice: str
    seed: int
    instructions: str | None = None
    speed: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recording:
    """A voice to imitate: what ``Front.encode`` made of it, and what it says, where that is known."""

    encoding: Mapping[str, npt.NDArray[Any]]
    transcript: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a program's front made of a request: ``units`` (the tokens of its prompt) count against the budget of a
    step; ``data`` are JSON values that only the program reads."""

    units: int
    data: Mapping[str, Any] = field(default_factory=dict)


class RequestError(ValueError):
    """A request that the program cannot serve; ``field`` of the body is at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Front(Protocol):
    """A program's half in the process that takes requests: it knows the checkpoint's texts, not its weights.

    May be called from several threads at once.
    """

    key: str
    """Names whatever decides what ``encode`` makes of a recording; ``[0-9A-Za-z_-]``, at most 64 characters."""

    def prepare(self, speech: Speech, recording: Recording | None = None) -> Prompt:
        """Make the prompt.

        Raises ``RequestError`` for a request that the program cannot serve.
        """
        ...

    def encode(self, pcm: npt.NDArray[np.float32]) -> Mapping[str, npt.NDArray[Any]]:
        """What prompts need of a recording, mono at the program's sample rate, ``[samples]``. Takes seconds.

        Only asked of programs that imitate recordings.
        """
        ...

    def sample(self) -> tuple[Speech, Prompt]:
        """A short request, to see that everything works."""
        ...


class CharacterFront:
    """The front of programs that take text as it is: a unit is a character."""

    key = ""

    def __init__(self, info: ProgramInfo) -> None:
        self._info = info

    def prepare(self, speech: Speech, recording: Recording | None = None) -> Prompt:
        """Count the characters."""
        return Prompt(len(speech.input))

    def encode(self, pcm: npt.NDArray[np.float32]) -> Mapping[str, npt.NDArray[Any]]:
        """These programs imitate nothing."""
        raise NotImplementedError

    def sample(self) -> tuple[Speech, Prompt]:
        """A word in the default voice."""
        speech = Speech("Hello.", self._info.default_voice, seed=0)
        return speech, self.prepare(speech)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that enters ``slot``, with what the front made of it. Everything the slot held before is void."""

    slot: int
    speech: Speech
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step made for one slot.

    ``pcm`` may be empty (nothing ready yet) and may hold several frames (a sentence at once). With ``finish`` it is
    the last. ``error`` ends this slot's request alone, with its text as the reason; ``pcm`` is then ignored.
    """

    pcm: Pcm
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PartConfig:
    """Where a part of a program runs.

    ``device`` ``auto`` is the first GPU, or the CPU where there is none; ``dtype`` ``auto`` is bfloat16 on a GPU and
    float32 on the CPU. ``graphs`` captures the part as CUDA graphs, on a GPU.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    graphs: bool = True


class FatalProgramError(RuntimeError):
    """Raised by a program whose state is lost for every slot: the engine process ends and says why."""


class Program(Protocol):
    """A model as the engine runs it.

    Slots are numbered from 1 to ``slots``; slot 0 is scratch for padding rows and never leased. Draws are a function
    of (request seed, frame, codebook) only, so that a slot gives the same audio whatever shares its batch.
    """

    Options: ClassVar[type]
    """Dataclass of the program's own settings; the stage file's ``options`` are checked against it."""

    info: ProgramInfo
    part_seconds: Mapping[Part, float]
    """Seconds spent in each part since load; only grows."""

    @classmethod
    def load(cls, checkpoint: Path, options: Any, parts: Mapping[Part, PartConfig], slots: int) -> Self:
        """Load the weights in ``checkpoint`` and allocate state for ``slots`` slots.

        Raises ``FileNotFoundError`` or ``ValueError`` naming the file or field at fault.
        """
        ...

    @classmethod
    def front(cls, checkpoint: Path, options: Any, info: ProgramInfo) -> Front:
        """The half of the program that makes prompts, in another process than the one that loaded it.

        Raises as ``load`` does.
        """
        ...

    def prefill(self, batch: Sequence[Admission]) -> None:
        """Take new requests into their slots, overwriting what those held.

        May raise: the engine then offers the batch again one by one, so that only the guilty request fails.
        """
        ...

    def step(self, slots: Sequence[int]) -> Sequence[StepOutput]:
        """Advance every given slot by one frame; returns one output a slot, in order.

        Raising ends the requests of all given slots and leaves the engine serving; raise ``FatalProgramError`` where
        that cannot be (the device is gone). A slot that finished or failed is not given again before ``prefill``.
        """
        ...

    def release(self, slot: int) -> None:
        """The request in ``slot`` is over or was aborted; must not raise."""
        ...

    def close(self) -> None:
        """The engine stops: end threads and free devices."""
        ...

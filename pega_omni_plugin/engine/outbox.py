"""Audio that was made and not yet sent, and in which order long messages leave.

Short messages leave with the step that makes them due. A long one (a stream far ahead of playback has much to send) is
copied through several hands, and while that lasts nobody else hears anything. So long messages are cut at
``MESSAGE_SAMPLES``, leave one after the other, first come first served, and at most at ``LONG_SAMPLES_PER_SECOND``.
That is thousands of times real time: only a program that costs next to nothing ever waits for it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pega_omni_plugin.engine.chunks import ChunkPolicy, Due
from pega_omni_plugin.engine.config import ChunkProfile
from pega_omni_plugin.engine.program import Pcm
from pega_omni_plugin.engine.wire import Ending

MESSAGE_SAMPLES = 240_000
"""Most of a message: 10 s at 24 kHz, 480 KB, half a millisecond of copying."""

LONG_SAMPLES_PER_SECOND = 48_000_000
"""Pace of long messages: one in 5 ms, which leaves most of two cores to others; 2,000 times real time at 24 kHz."""

_NOTHING = np.zeros(0, dtype=np.int16)


class Outgoing:
    """One stream's audio between the program and its messages."""

    def __init__(self, profile: ChunkProfile, sample_rate: int, frame_samples: int) -> None:
        self.samples = 0
        self.ending: Ending | None = None
        self._policy = ChunkPolicy(profile, frame_samples / sample_rate)
        self._sample_rate = sample_rate
        self._pieces: deque[Pcm] = deque()
        self._pending = 0

    def add(self, pcm: Pcm) -> None:
        """The program made this, shape ``[samples]``; empty is nothing."""
        if len(pcm):
            self._pieces.append(pcm)
            self._pending += len(pcm)
            self.samples += len(pcm)
            self._policy.made(len(pcm) / self._sample_rate)

    def due(self, now: float, step_seconds: float) -> Due:
        """When the next message is sent. The last one goes at once, unless it is long."""
        if self.ending is not None:
            return Due.NOW if self._pending <= MESSAGE_SAMPLES else Due.SOON
        due = self._policy.due(now, step_seconds)
        # A stream that makes more than a message in half a second need not wait for the rest of it.
        return Due.SOON if due is Due.NO and self._pending >= MESSAGE_SAMPLES else due

    def take(self, now: float) -> Pcm:
        """The next message's audio: whole pieces, up to the first that reaches ``MESSAGE_SAMPLES``."""
        taken: list[Pcm] = []
        length = 0
        while self._pieces and length < MESSAGE_SAMPLES:
            taken.append(self._pieces.popleft())
            length += len(taken[-1])
        self._pending -= length
        self._policy.sent(length / self._sample_rate, now)
        # Always a copy: the program may use its buffer again.
        return np.concatenate(taken) if taken else _NOTHING

    def goes_on(self, now: float, step_seconds: float) -> bool:
        """After a long message: whether another is to follow. No step asks any more for a stream that has ended."""
        if self.ending is not None:
            return bool(self._pieces)
        return self.due(now, step_seconds) is Due.SOON

    @property
    def complete(self) -> bool:
        """Whether the program is done and everything has been taken."""
        return self.ending is not None and not self._pieces


class LongMessages:
    """The streams that have a long message to send, in the order in which they asked."""

    def __init__(self) -> None:
        self._streams: dict[str, None] = {}
        self._free_at = 0.0

    def ask(self, name: str) -> None:
        """Stand in line, once."""
        self._streams.setdefault(name)

    def drop(self, name: str) -> None:
        """Leave the line, if there."""
        self._streams.pop(name, None)

    def next(self, now: float) -> str | None:
        """Whose turn it is, or ``None`` while the last message is still on its way."""
        if not self._streams or now < self._free_at:
            return None
        name = next(iter(self._streams))
        del self._streams[name]
        return name

    def sent(self, samples: int, now: float) -> None:
        """A message of so many samples has left."""
        self._free_at = max(self._free_at, now) + samples / LONG_SAMPLES_PER_SECOND

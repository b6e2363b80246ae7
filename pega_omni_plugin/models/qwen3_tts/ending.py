"""When speech that does not end by itself is ended: a limit from the text, and a watch for loops and silence.

The model sometimes misses its end and repeats itself or goes on in silence, for minutes if it is let. Both are found
from what a step makes anyway. The limits are far beyond what speech does, slow styles and pauses included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pega_omni_plugin.engine.program import FinishReason, Pcm

FRAMES_AT_LEAST = 75
FRAMES_PER_BYTE = 5
"""Frames that a text may take: six seconds and these per byte of its UTF-8.

Speech takes about 0.9 frames a byte (English 15 characters a second; Chinese 4.5 of three bytes each), so this is five
times slower than usual."""

FRAMES_NEEDED_PER_BYTE = 1
"""Frames that a text is sure to want, to refuse early what cannot fit."""

LOOP_PERIODS = 8
LOOP_FRAMES = 75
"""Codes of group 0 that repeat with a period of up to eight frames, for six seconds."""

SILENCE_PEAK = 66
SILENCE_FRAMES = 100
"""Samples that all stay below -54 dBFS, for eight seconds."""


def frame_limit(text: str) -> int:
    """Frames that speaking ``text`` may take."""
    return FRAMES_AT_LEAST + FRAMES_PER_BYTE * len(text.encode())


def frames_needed(text: str) -> int:
    """Frames that speaking ``text`` is sure to take, about."""
    return FRAMES_NEEDED_PER_BYTE * len(text.encode())


class Watch:
    """Looks at every frame of every slot."""

    def __init__(self, slots: int) -> None:
        self._recent = np.full((slots + 1, LOOP_PERIODS), -1, np.int64)  # codes, the latest last
        self._alike = np.zeros((slots + 1, LOOP_PERIODS), np.int64)  # frames in a row that equal the one before, by lag
        self._quiet = np.zeros(slots + 1, np.int64)

    def admit(self, slot: int) -> None:
        """A new request in ``slot``."""
        self._recent[slot] = -1
        self._alike[slot] = 0
        self._quiet[slot] = 0

    def look(self, slots: Sequence[int], codes: npt.NDArray[np.int64], pcm: Pcm) -> dict[int, FinishReason]:
        """Which rows are to end with this frame, and why.

        ``codes`` are those of group 0, ``[rows]``; ``pcm`` is ``[rows, samples]``.
        """
        rows = np.asarray(slots)
        recent = self._recent[rows]
        alike = (self._alike[rows] + 1) * (recent == codes[:, None])
        self._alike[rows] = alike
        self._recent[rows] = np.concatenate((recent[:, 1:], codes[:, None]), axis=1)
        loud = (pcm.max(axis=1) > SILENCE_PEAK) | (pcm.min(axis=1) < -SILENCE_PEAK)
        quiet = np.where(loud, 0, self._quiet[rows] + 1)
        self._quiet[rows] = quiet
        ended: dict[int, FinishReason] = {}
        looping = alike.max(axis=1) >= LOOP_FRAMES
        if looping.any() or quiet.max() >= SILENCE_FRAMES:
            for row in np.flatnonzero(looping | (quiet >= SILENCE_FRAMES)).tolist():
                ended[row] = "silence" if quiet[row] >= SILENCE_FRAMES else "repetition"
        return ended


def fade_out(pcm: Pcm) -> Pcm:
    """The frame ``[samples]``, ever quieter down to nothing."""
    ramp = np.linspace(1.0, 0.0, len(pcm), dtype=np.float32)
    return np.round(pcm * ramp).astype(np.int16)

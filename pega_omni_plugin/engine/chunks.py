"""Chunk policy: when the audio that a stream has made is sent as a message.

Messages are what the API process pays for, so a stream sends few of them; but never so late that playback runs dry.
Three rules, all on the stream's own clock:

1. The first message goes when ``first`` frames are made; each further one holds twice as many, up to ``steady``.
2. Where the model is slow, waiting for that many would stall playback: what is there goes when the listener's buffer
   would be down to ``MARGIN_SECONDS`` after another step.
3. A stream more than ``AHEAD_SECONDS`` ahead of playback sends at most one message per ``REST_SECONDS``, with
   everything made since in it. One API process then sees two to three messages per second and stream however fast the
   model is. These messages can be long and can wait, see ``outbox``. The last message goes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from pega_omni_plugin.engine.config import ChunkProfile

AHEAD_SECONDS = 1.0
REST_SECONDS = 0.5
MARGIN_SECONDS = 0.04


class Due(IntEnum):
    """Whether a stream's pending audio is sent: not yet, when there is nothing more urgent, or with this step."""

    NO = 0
    SOON = 1
    NOW = 2


@dataclass(slots=True)
class ChunkPolicy:
    """Decides for one stream. Times are seconds of any steady clock; audio lengths are seconds of playback.

    The caller says what has been made (``made``), asks ``due``, and says what it has sent (``sent``).
    """

    profile: ChunkProfile
    frame_seconds: float
    target: int = 0
    sent_seconds: float = 0.0
    pending_seconds: float = 0.0
    _first_sent_at: float = 0.0
    _last_sent_at: float = 0.0

    def __post_init__(self) -> None:
        self.target = self.profile.first

    def made(self, seconds: float) -> None:
        """Count audio that the model has just made."""
        self.pending_seconds += seconds

    def due(self, now: float, step_seconds: float) -> Due:
        """Whether to send what is pending, given how long a step takes at present."""
        if not self.pending_seconds:
            return Due.NO
        missing = self.target * self.frame_seconds - self.pending_seconds
        complete = missing < self.frame_seconds / 2
        if not self.sent_seconds:
            return Due.NOW if complete else Due.NO
        ahead = self.sent_seconds - (now - self._first_sent_at)
        if ahead > AHEAD_SECONDS:
            return Due.SOON if now - self._last_sent_at >= REST_SECONDS else Due.NO
        return Due.NOW if complete or ahead - step_seconds < MARGIN_SECONDS else Due.NO

    def sent(self, seconds: float, now: float) -> None:
        """So much of what was pending has left."""
        if not self.sent_seconds:
            self._first_sent_at = now
        self.sent_seconds += seconds
        self.pending_seconds = max(0.0, self.pending_seconds - seconds)
        self._last_sent_at = now
        self.target = min(self.target * 2, max(self.profile.steady, self.profile.first))

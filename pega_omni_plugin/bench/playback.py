"""Whether a listener would have heard a gap: a model of a player that starts at once and plays in real time."""

from __future__ import annotations

NANOSECONDS = 1_000_000_000


class Playback:
    """A player fed by one stream of audio.

    It starts when the first audio arrives, with an empty buffer, and plays in real time. Audio that arrives after the
    buffer ran dry is a *stall* as long as the gap; playing goes on at that arrival. All times are integer nanoseconds
    of one clock, rounded down by less than one nanosecond, so that a stall is exact and sums do not drift.
    """

    __slots__ = ("audio_bytes", "bytes_per_second", "stall_ns", "started_ns")

    def __init__(self, bytes_per_second: int) -> None:
        self.bytes_per_second = bytes_per_second
        self.started_ns: int | None = None
        self.stall_ns = 0
        self.audio_bytes = 0

    def feed(self, at_ns: int, size: int) -> None:
        """Take ``size`` bytes of audio that arrived at ``at_ns``; times must not go back."""
        dry_ns = self.dry_ns
        if dry_ns is None:
            self.started_ns = at_ns
        elif at_ns > dry_ns:
            self.stall_ns += at_ns - dry_ns
        self.audio_bytes += size

    @property
    def audio_ns(self) -> int:
        """Duration of all audio so far."""
        return self.audio_bytes * NANOSECONDS // self.bytes_per_second

    @property
    def dry_ns(self) -> int | None:
        """When the buffer runs dry if no more audio comes; ``None`` before the first."""
        return None if self.started_ns is None else self.started_ns + self.audio_ns + self.stall_ns

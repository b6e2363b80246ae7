"""Slots: which rows of the program's state are leased."""

from __future__ import annotations

from heapq import heappop, heappush


class SlotPool:
    """Leases slot numbers ``1 … size``, the lowest free one first.

    Streams so stay close together: a program reads neighbouring rows of its caches where they lie, and copies others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(1, size + 1))  # a heap, since it is sorted
        self._leased: set[int] = set()

    @property
    def leased(self) -> int:
        """Slots in use."""
        return len(self._leased)

    def lease(self) -> int | None:
        """A free slot, or ``None`` when all are taken."""
        if not self._free:
            return None
        slot = heappop(self._free)
        self._leased.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """End a lease. Raises ``KeyError`` for a slot that is not leased: that is a bug in the scheduler."""
        self._leased.remove(slot)
        heappush(self._free, slot)

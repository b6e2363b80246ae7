"""Slots: which rows of the program's state are leased."""

from __future__ import annotations

from collections import deque


class SlotPool:
    """Leases slot numbers ``1 … size``, the longest unused first.

    A slot that comes back is offered again last, so that a program whose release is lazy has the most time for it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = deque(range(1, size + 1))
        self._leased: set[int] = set()

    @property
    def leased(self) -> int:
        """Slots in use."""
        return len(self._leased)

    def lease(self) -> int | None:
        """A free slot, or ``None`` when all are taken."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._leased.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """End a lease. Raises ``KeyError`` for a slot that is not leased: that is a bug in the scheduler."""
        self._leased.remove(slot)
        self._free.append(slot)

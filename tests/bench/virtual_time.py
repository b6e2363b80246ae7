"""An event loop whose time jumps to the next timer, so that tests of waiting take no time and are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MS = 1_000_000
SECOND = 1_000_000_000


class VirtualClock:
    """``Clock`` of the running virtual loop."""

    def now(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)

    async def sleep_until(self, at_ns: int) -> None:
        await asyncio.sleep(max(0, at_ns - self.now()) / 1e9)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(coroutine)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._virtual_s

    def skip(self, seconds: float) -> None:
        self._virtual_s += seconds


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "every task waits and no timer is set"
            self._loop.skip(timeout)
        return events

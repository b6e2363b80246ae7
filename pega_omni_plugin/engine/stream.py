"""A request's audio on the caller's side, and what a caller may ask of any engine, near or far."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self

from pega_omni_plugin.engine.errors import EngineDead, EngineTimeout
from pega_omni_plugin.engine.program import Front, Pcm, ProgramInfo, Prompt, Speech
from pega_omni_plugin.engine.wire import Ending


class SpeechStream:
    """The audio of one request as it is made: iterate over int16 pieces; ``ending`` is set when it is complete."""

    def __init__(self, seconds_without_audio: float, seconds_in_all: float) -> None:
        self.ending: Ending | None = None
        self._abandoned: Exception | None = None
        self._items: asyncio.Queue[Pcm | Ending | Exception] = asyncio.Queue()
        self._stall = seconds_without_audio
        self._end_by = asyncio.get_running_loop().time() + seconds_in_all

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Pcm:
        """The next piece, shape ``[samples]``, never empty.

        Raises:
            RequestFailed: the engine could not make this request's audio.
            EngineTimeout: nothing came for too long, the wait for a slot included.
            EngineDead: the engine process is gone.
        """
        if self._abandoned is not None:
            raise self._abandoned
        if self.ending is not None:
            raise StopAsyncIteration
        if asyncio.get_running_loop().time() >= self._end_by:
            raise self._late()
        item = self._items.get_nowait() if not self._items.empty() else await self._wait()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, Ending):
            self.ending = item
            raise StopAsyncIteration
        return item

    async def _wait(self) -> Pcm | Ending | Exception:
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(now + self._stall, self._end_by)):
                return await self._items.get()
        except TimeoutError as error:
            raise self._late() from error

    def _late(self) -> EngineTimeout:
        return EngineTimeout(f"no audio for {self._stall:g} s, or the request ran out of time; try again later")

    def put(self, item: Pcm | Ending) -> None:
        """The engine made this."""
        self._items.put_nowait(item)

    def abandon(self, error: Exception) -> None:
        """Raise ``error`` in whoever iterates, at once: nobody hears what is there already."""
        self._abandoned = error
        self._items.put_nowait(error)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in whoever iterates, after what is there already."""
        self._items.put_nowait(error)


class SpeechEngine(Protocol):
    """What the API needs of an engine."""

    info: ProgramInfo
    front: Front
    dead: EngineDead | None
    stats: Mapping[str, Any]

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet over."""
        ...

    def check_room(self) -> None:
        """Raise what ``speak`` would at this moment: ``EngineBusy`` or ``EngineDead``."""
        ...

    def speak(self, speech: Speech, prompt: Prompt) -> AbstractAsyncContextManager[SpeechStream]:
        """Submit a request; leaving the block aborts what is left of it. Raises ``EngineBusy`` or ``EngineDead``."""
        ...

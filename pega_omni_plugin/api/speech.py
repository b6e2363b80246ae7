"""One speech request from its body to its last byte, whatever carries it (HTTP here, Dynamo's request plane there)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pybase64

from pega_omni_plugin.api.errors import ApiError, BodyTooLarge, InvalidRequest, ModelNotFound, from_engine
from pega_omni_plugin.api.metrics import Metrics, Outcome
from pega_omni_plugin.api.prompts import Preparer
from pega_omni_plugin.api.requests import SpeechCall
from pega_omni_plugin.api.voices import VoiceStore
from pega_omni_plugin.audio.wav import wav_header
from pega_omni_plugin.engine.errors import EngineBusy, EngineDead, EngineError, EngineTimeout
from pega_omni_plugin.engine.program import Pcm, Prompt
from pega_omni_plugin.engine.stream import SpeechEngine, SpeechStream

PIECE_SAMPLES = 32_768
"""Longest piece handed to the transport at once: a stream far ahead of playback gets megabytes in a message, and while
they are copied nobody else is served."""


class CallerGone(Exception):
    """The caller has left; nobody hears the rest."""


class Caller:
    """Who asked. ``leave``, called from outside at any time, makes the request under way raise ``CallerGone``."""

    def __init__(self) -> None:
        self._gone = False
        self._stream: SpeechStream | None = None

    def leave(self) -> None:
        """The caller is gone."""
        self._gone = True
        if self._stream is not None:
            self._stream.abandon(CallerGone())

    def listen(self, stream: SpeechStream) -> None:
        """This stream is what the caller waits for."""
        self._stream = stream
        if self._gone:
            stream.abandon(CallerGone())


class SpeechAnswer:
    """An accepted request whose first audio is there.

    Iterate over ``audio`` (wav or pcm bytes) or ``events`` (server-sent events).
    """

    def __init__(
        self, call: SpeechCall, prompt: Prompt, stream: SpeechStream, engine: SpeechEngine, first: Pcm
    ) -> None:
        self.call = call
        self._prompt = prompt
        self.sample_rate = engine.info.sample_rate
        self.samples = 0
        self.error: EngineError | None = None
        self._stream = stream
        self._first = first

    @property
    def media_type(self) -> str:
        """Content type of what is sent."""
        return "text/event-stream" if self.call.sse else f"audio/{self.call.format}"

    @property
    def complete(self) -> bool:
        """Whether the last audio has been taken."""
        return self._stream.ending is not None

    async def audio(self) -> AsyncIterator[bytes]:
        """The answer's bytes, the header together with the first audio.

        Raises:
            EngineError: the audio ends here unfinished.
        """
        header = wav_header(self.sample_rate) if self.call.format == "wav" else b""
        for data in self._pieces(self._first):
            yield header + data
            header = b""
        async for pcm in self._stream:
            for data in self._pieces(pcm):
                yield data
                await asyncio.sleep(0)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; a failure is the last event instead of ``speech.audio.done``."""
        try:
            async for data in self.audio():
                yield _event({"type": "speech.audio.delta", "audio": pybase64.b64encode(data).decode()})
        except EngineError as error:
            self.error = error
            yield _event({"type": "speech.audio.error", **from_engine(error).body})
            return
        yield _event({"type": "speech.audio.done", "usage": self.usage})

    @property
    def usage(self) -> dict[str, Any]:
        """What the request took, in the program's prompt units and frames of audio, and why it ended."""
        units, ending = self._prompt.units, self._stream.ending
        frames = ending.frames if ending else 0
        counts = {"input_tokens": units, "output_tokens": frames, "total_tokens": units + frames}
        return counts | {"finish_reason": ending.finish if ending else None}

    def _pieces(self, pcm: Pcm) -> Iterator[bytes]:
        for start in range(0, len(pcm), PIECE_SAMPLES):
            piece = pcm[start : start + PIECE_SAMPLES]
            self.samples += len(piece)
            yield piece.astype("<i2", copy=False).tobytes()


class SpeechService:
    """Speech requests against one engine: validation, metrics and the outcome of each, in one place."""

    def __init__(
        self, engine: SpeechEngine, served: Collection[str], metrics: Metrics, voices: VoiceStore | None = None
    ) -> None:
        """``voices`` keeps what callers make; only asked for programs that have a use for it."""
        self.engine = engine
        self.served = tuple(served)
        self.metrics = metrics
        self.voices = voices if engine.info.clones is not None else None
        self.prompts = Preparer(engine, self.voices)
        self.ready = False

    @asynccontextmanager
    async def answer(self, document: Mapping[str, Any], caller: Caller) -> AsyncIterator[SpeechAnswer]:
        """Check a request and wait for its first audio; leaving the block aborts what is left.

        Raises:
            ApiError: the request is wrong or cannot be served now; also for a failure inside the block.
            CallerGone: the caller left.
        """
        arrived = time.perf_counter()
        outcome: Outcome = "failed"
        try:
            call, prompt = await self.prompts.prepare(document, self.served)
            async with self.engine.speak(call.speech, prompt) as stream:
                caller.listen(stream)
                first = await anext(stream, None)
                if first is None:
                    raise ApiError("the engine made no audio for this input")
                self.metrics.first_audio(time.perf_counter() - arrived)
                answer = SpeechAnswer(call, prompt, stream, self.engine, first)
                try:
                    yield answer
                finally:
                    self.metrics.audio(answer.samples / answer.sample_rate)
                if answer.error is not None:
                    raise answer.error
                outcome = "complete" if answer.complete else "cancelled"
                if answer.complete:
                    self.metrics.complete(time.perf_counter() - arrived)
        except (InvalidRequest, ModelNotFound, BodyTooLarge):
            outcome = "invalid"
            raise
        except EngineError as error:
            outcome = _outcome(error)
            raise from_engine(error) from error
        except (CallerGone, asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            self.metrics.ended(outcome)

    async def warm_up(self) -> None:
        """Speak one short sentence through the engine, then be ready.

        Raises:
            EngineError: it cannot speak.
        """
        speech, prompt = await asyncio.to_thread(self.engine.front.sample)
        async with self.engine.speak(speech, prompt) as stream:
            async for _ in stream:
                pass
        self.ready = True


def _outcome(error: EngineError) -> Outcome:
    if isinstance(error, EngineBusy):
        return "rejected"
    if isinstance(error, EngineDead):
        return "engine_dead"
    return "timed_out" if isinstance(error, EngineTimeout) else "failed"


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"

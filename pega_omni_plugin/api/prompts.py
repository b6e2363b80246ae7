"""From a request body to a prompt: checks, the recording of the voice to imitate, and the program's own front."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pega_omni_plugin.api.errors import InvalidRequest
from pega_omni_plugin.api.fetch import FetchError, fetch_recording
from pega_omni_plugin.api.requests import SpeechCall, check_speech, no_stored_voice
from pega_omni_plugin.api.voices import StoredVoice, VoiceGone, VoiceStore, VoicesUnwritable
from pega_omni_plugin.audio.recording import Limits, RecordingError, decode_data, read_recording
from pega_omni_plugin.engine.errors import EngineBusy
from pega_omni_plugin.engine.program import Prompt, Recording, RequestError, Speech
from pega_omni_plugin.engine.stream import SpeechEngine

logger = logging.getLogger(__name__)

MAX_RECORDING_BYTES = 16 << 20
"""Of an encoded recording: a minute of uncompressed studio sound has 17 MB."""

MOST_PREPARING = 32
"""Requests whose recordings are read and encoded at a time; each holds up to a few recordings' length in memory."""

ENCODERS = max(1, (os.cpu_count() or 1) // 2)
"""Recordings encoded at a time: each keeps a core busy for seconds, and a thread that others wait for."""

ENCODINGS_KEPT = 256
"""Encodings of recordings kept in memory: a few kilobytes each."""

Encoding = Mapping[str, npt.NDArray[Any]]


class Preparer:
    """Makes prompts for one engine. What is made of a recording is kept by its content, so that it is made once."""

    def __init__(self, engine: SpeechEngine, voices: VoiceStore | None) -> None:
        self._engine = engine
        self._voices = voices
        self._preparing = 0
        self._turns = asyncio.Semaphore(ENCODERS)
        self._encodings: OrderedDict[str, asyncio.Future[Encoding]] = OrderedDict()

    async def prepare(self, document: Mapping[str, Any], served: Collection[str]) -> tuple[SpeechCall, Prompt]:
        """Check a body and make its prompt.

        Raises:
            ApiError: the request is wrong; names the field.
            EngineBusy, EngineDead: it would not be taken, and so nothing was done for it.
        """
        find = self._voices.get if self._voices is not None else no_stored_voice
        call = check_speech(document, self._engine.info, served, find)
        speech, recording = call.speech, None
        if call.stored is not None or "ref_audio" in speech.extra or "ref_text" in speech.extra:
            self._engine.check_room()
            with self.room():
                speech, recording = await self._voice(speech, call.stored)
            call = dataclasses.replace(call, speech=speech)
        try:
            return call, self._engine.front.prepare(speech, recording)
        except RequestError as error:
            raise InvalidRequest(str(error), param=error.field) from error

    @contextmanager
    def room(self) -> Iterator[None]:
        """Around everything that reads or encodes a recording. Raises ``EngineBusy``: ``MOST_PREPARING`` do already."""
        if self._preparing >= MOST_PREPARING:
            raise EngineBusy(f"{MOST_PREPARING} recordings are being read already; try again in a moment")
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    async def read(self, source: str | bytes, param: str) -> tuple[npt.NDArray[np.float32], str]:
        """A recording from a data URL, base64, a URL if the server allows it, or a file's bytes: mono float32 at the
        program's sample rate, ``[samples]``, and the digest of what was sent.

        Raises ``InvalidRequest`` naming ``param``.
        """
        info = self._engine.info
        try:
            if isinstance(source, str) and source.startswith(("http://", "https://")):
                if not info.recording_urls:
                    raise FetchError("this server takes no URLs; send the recording itself as a data URL")
                source = await fetch_recording(source, MAX_RECORDING_BYTES)
            # Megabytes of base64 take longer than a frame may wait on the event loop.
            return await asyncio.to_thread(_read, source, info.sample_rate, Limits(*info.recording_seconds))
        except RecordingError as error:  # its message goes on from the field's name
            raise InvalidRequest(f"{param} {error}", param=param) from error
        except FetchError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error

    async def encode_stored(self, voice: StoredVoice) -> Encoding:
        """The encoding of a stored voice's recording, from memory, from disk, or made now and kept in both.

        Raises ``InvalidRequest``: the voice is gone.
        """
        return await self._once(voice.id, lambda: self._in_turn(self._encode_stored, voice))

    async def _voice(self, speech: Speech, stored: StoredVoice | None) -> tuple[Speech, Recording | None]:
        """What a request in a stored or a sent voice says to the program. The recording itself stays here."""
        extra = {key: value for key, value in speech.extra.items() if key not in ("ref_audio", "ref_text")}
        audio, transcript = speech.extra.get("ref_audio"), speech.extra.get("ref_text") or None
        speech = dataclasses.replace(speech, extra=extra)
        if audio is not None:
            pcm, digest = await self.read(audio, "ref_audio")
            encode = self._engine.front.encode
            return speech, Recording(await self._once(digest, lambda: self._in_turn(encode, pcm)), transcript)
        if transcript is not None:
            raise InvalidRequest("ref_text is what ref_audio says; send both, or a stored voice", param="ref_text")
        if stored is None:
            return speech, None
        if self._engine.info.clones == "description":
            instructions = " ".join(filter(None, (stored.description, speech.instructions)))
            return dataclasses.replace(speech, instructions=instructions), None
        return speech, Recording(await self.encode_stored(stored), stored.transcript)

    async def _in_turn(self, encode: Callable[[Any], Encoding], what: Any) -> Encoding:
        async with self._turns:
            return await asyncio.to_thread(encode, what)

    async def _once(self, digest: str, make: Callable[[], Coroutine[Any, Any, Encoding]]) -> Encoding:
        """The encoding kept for ``digest``, or the one that ``make`` gives, for all who ask meanwhile."""
        kept = self._encodings.get(digest)
        if kept is None:
            kept = self._encodings[digest] = asyncio.ensure_future(make())
            kept.add_done_callback(partial(self._forget_failed, digest))
            if len(self._encodings) > ENCODINGS_KEPT:
                self._encodings.popitem(last=False)
        self._encodings.move_to_end(digest)
        # A caller who leaves does not take it away from the others.
        return await asyncio.shield(kept)

    def _forget_failed(self, digest: str, made: asyncio.Future[Encoding]) -> None:
        """A failure is told to those who wait for it, and to nobody who comes later, even if all of them have left."""
        if (made.cancelled() or made.exception() is not None) and self._encodings.get(digest) is made:
            del self._encodings[digest]

    def _encode_stored(self, voice: StoredVoice) -> Encoding:
        assert self._voices is not None
        front = self._engine.front
        kept = self._voices.encoding(voice, front.key)
        if kept is not None:
            return kept
        try:
            made = front.encode(self._voices.audio(voice))
            self._voices.keep_encoding(voice, front.key, made)
        except VoiceGone as error:
            raise InvalidRequest(str(error), param="voice") from error
        except VoicesUnwritable as error:  # this worker will make it again when it is started anew
            logger.warning("%s", error)
        return made


def _read(source: str | bytes, sample_rate: int, limits: Limits) -> tuple[npt.NDArray[np.float32], str]:
    """What ``Preparer.read`` gives, of a recording that is here."""
    data = decode_data(source) if isinstance(source, str) else source
    return read_recording(data, sample_rate, limits), hashlib.sha256(data).hexdigest()

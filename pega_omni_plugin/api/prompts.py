"""From a request body to a prompt: checks, the recording of the voice to imitate, and the program's own front."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from pega_omni_plugin.api.errors import InvalidRequest
from pega_omni_plugin.api.fetch import FetchError, fetch_recording
from pega_omni_plugin.api.requests import SpeechCall, check_speech, no_stored_voice
from pega_omni_plugin.api.voices import StoredVoice, VoiceStore
from pega_omni_plugin.audio.recording import Limits, RecordingError, decode_data, read_recording
from pega_omni_plugin.engine.program import Prompt, Recording, RequestError, Speech
from pega_omni_plugin.engine.stream import SpeechEngine

MAX_RECORDING_BYTES = 16 << 20
"""Of an encoded recording: a minute of uncompressed studio sound has 17 MB."""


class Preparer:
    """Makes prompts for one engine."""

    def __init__(self, engine: SpeechEngine, voices: VoiceStore | None) -> None:
        self._engine = engine
        self._voices = voices

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
            speech, recording = await self._voice(speech, call.stored)
            call = dataclasses.replace(call, speech=speech)
        front = self._engine.front
        try:
            if recording is None:
                return call, front.prepare(speech)
            return call, await asyncio.to_thread(front.prepare, speech, recording)
        except RequestError as error:
            raise InvalidRequest(str(error), param=error.field) from error

    async def _voice(self, speech: Speech, stored: StoredVoice | None) -> tuple[Speech, Recording | None]:
        """What a request in a stored or a sent voice says to the program. The recording itself stays here."""
        extra = {key: value for key, value in speech.extra.items() if key not in ("ref_audio", "ref_text")}
        audio, transcript = speech.extra.get("ref_audio"), speech.extra.get("ref_text")
        speech = dataclasses.replace(speech, extra=extra)
        if audio is not None:
            return speech, await self.recording(audio, transcript)
        if transcript is not None:
            raise InvalidRequest("ref_text is what ref_audio says; send both, or a stored voice", param="ref_text")
        if stored is not None and self._engine.info.clones == "description":
            instructions = " ".join(filter(None, (stored.description, speech.instructions)))
            return dataclasses.replace(speech, instructions=instructions), None
        if stored is not None and self._voices is not None:
            pcm = await asyncio.to_thread(self._voices.audio, stored)
            return speech, Recording(pcm, stored.id, stored.transcript)
        return speech, None

    async def recording(self, source: str | bytes, transcript: str | None, param: str = "ref_audio") -> Recording:
        """A recording from a data URL, base64, a URL if the server allows it, or a file's bytes.

        Raises ``InvalidRequest`` naming ``param``.
        """
        info = self._engine.info
        try:
            if isinstance(source, bytes):
                data = source
            elif not source.startswith(("http://", "https://")):
                data = decode_data(source)
            elif info.recording_urls:
                data = await fetch_recording(source, MAX_RECORDING_BYTES)
            else:
                raise FetchError("this server takes no URLs; send the recording itself as a data URL")
            pcm = await asyncio.to_thread(read_recording, data, info.sample_rate, Limits(*info.recording_seconds))
        except RecordingError as error:  # its message goes on from the field's name
            raise InvalidRequest(f"{param} {error}", param=param) from error
        except FetchError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        return Recording(pcm, hashlib.sha256(data).hexdigest(), transcript or None)

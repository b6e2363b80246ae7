"""The routes of stored voices: list, create, delete."""

from __future__ import annotations

import asyncio
import time
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from pega_omni_plugin.api import errors
from pega_omni_plugin.api.errors import ApiError, InvalidRequest, NotFound, VoiceTaken, from_engine
from pega_omni_plugin.api.speech import SpeechService
from pega_omni_plugin.api.voice_form import VoiceRequest, parse_voice_form
from pega_omni_plugin.api.voices import (
    StoredVoice,
    VoiceConflict,
    VoiceLimit,
    VoiceStore,
    VoicesUnwritable,
)
from pega_omni_plugin.audio.recording import TAIL_SECONDS
from pega_omni_plugin.engine.errors import EngineError
from pega_omni_plugin.engine.program import RequestError, Speech

SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog, while the evening sun slowly sets behind the quiet hills. "
    "I have plenty of time today, so let me tell you how it all began."
)
"""What a voice made from a description says first. Its recording is what other models imitate."""


def build_voice_router() -> APIRouter:
    """The routes, as a router to be included."""
    router = APIRouter()

    @router.get("/v1/audio/voices")
    async def voices(request: Request) -> Response:
        service: SpeechService = request.app.state.pega
        info = service.engine.info
        entries = [{"id": voice.id, "name": voice.name, "language": voice.language} for voice in info.voices]
        stored = [] if service.voices is None else await asyncio.to_thread(service.voices.list)
        entries += [_document(voice) for voice in stored]
        names = [*(voice.id for voice in info.voices), *(voice.name for voice in stored)]
        return JSONResponse({"voices": entries, "voice_names": names, "aliases": dict(info.aliases)})

    @router.post("/v1/audio/voices")
    async def create(request: Request) -> Response:
        service: SpeechService = request.app.state.pega
        try:
            return JSONResponse(_document(await _create(service, request)))
        except ApiError as error:
            return errors.response(error)
        except EngineError as error:
            return errors.response(from_engine(error))
        except ClientDisconnect:
            return Response(status_code=499)

    @router.delete("/v1/audio/voices/{voice_id}")
    async def delete(request: Request, voice_id: str) -> Response:
        service: SpeechService = request.app.state.pega
        try:
            gone = await asyncio.to_thread(_store(service).delete, voice_id)
        except VoicesUnwritable as error:
            return errors.response(ApiError(str(error)))
        except ApiError as error:
            return errors.response(error)
        if not gone:
            known = any(voice.id == voice_id for voice in service.engine.info.voices)
            reason = "is the model's own and stays" if known else "is unknown; GET /v1/audio/voices lists all"
            return errors.response(NotFound(f"voice {voice_id[:100]!r} {reason}", param="voice_id"))
        return JSONResponse({"id": voice_id, "object": "audio.voice.deleted", "deleted": True})

    return router


async def _create(service: SpeechService, request: Request) -> StoredVoice:
    store, info = _store(service), service.engine.info
    asked = await parse_voice_form(request)
    if asked.name.lower() in {voice.id.lower() for voice in info.voices} | info.aliases.keys():
        # Speech requests look there first.
        raise VoiceTaken(f"{asked.name!r} is a voice of model {info.model} itself; choose another name", param="name")
    if asked.data is not None:
        if info.clones != "recording":
            message = f"model {info.model} makes voices from descriptions only; send description"
            raise InvalidRequest(message, param=asked.audio_field)
        with service.prompts.room():
            pcm, _ = await service.prompts.read(asked.data, asked.audio_field)
            voice = await _keep(store, asked, pcm, asked.transcript)
            # Now, so that the first request in this voice need not wait for it.
            await service.prompts.encode_stored(voice)
        return voice
    if info.clones != "description":
        raise InvalidRequest(
            f"model {info.model} makes voices from recordings only; send audio_sample", param="audio_sample"
        )
    said = (asked.description, asked.language)
    voices = await asyncio.to_thread(store.list)
    known = next((voice for voice in voices if (voice.description, voice.language) == said and voice.has_audio), None)
    # Made again beside other streams, it might differ in its last bits and be another voice.
    pcm = await asyncio.to_thread(store.audio, known) if known is not None else await _describe(service, asked)
    return await _keep(store, asked, pcm, SAMPLE_TEXT)


async def _describe(service: SpeechService, asked: VoiceRequest) -> npt.NDArray[np.float32]:
    """Let the model speak in the voice described; the same description gives the same recording."""
    engine, description = service.engine, asked.description or ""
    seed = int.from_bytes(sha256(description.encode()).digest()[:7], "little")
    extra: dict[str, Any] = {} if asked.language is None else {"language": asked.language}
    speech = Speech(SAMPLE_TEXT, engine.info.default_voice, seed, description, extra=extra)
    try:
        prompt = engine.front.prepare(speech)
    except RequestError as error:
        raise InvalidRequest(str(error), param=error.field) from error
    async with engine.speak(speech, prompt) as stream:
        pieces = [piece async for piece in stream]
        finish = stream.ending.finish if stream.ending is not None else None
    if not pieces or finish != "stop":
        # What there is does not say SAMPLE_TEXT, and the same description would end the same way.
        raise ApiError(f"the model did not speak its sample text to the end ({finish}); word the description otherwise")
    # The silence that every recording to be imitated has at its end.
    pieces.append(np.zeros(round(TAIL_SECONDS * engine.info.sample_rate), np.int16))
    return np.concatenate(pieces).astype(np.float32) / np.float32(32768)


async def _keep(
    store: VoiceStore, asked: VoiceRequest, pcm: npt.NDArray[np.float32], transcript: str | None
) -> StoredVoice:
    try:
        return await asyncio.to_thread(
            store.create,
            name=asked.name,
            pcm=pcm,
            transcript=transcript,
            description=asked.description,
            language=asked.language,
            now=int(time.time()),
        )
    except (VoiceConflict, VoiceLimit) as error:
        raise VoiceTaken(str(error), param="name") from error
    except VoicesUnwritable as error:
        raise ApiError(str(error)) from error


def _store(service: SpeechService) -> VoiceStore:
    if service.voices is None:
        raise NotFound(f"model {service.engine.info.model} has voices of its own only; none can be made or deleted")
    return service.voices


def _document(voice: StoredVoice) -> dict[str, Any]:
    return {
        "id": voice.id,
        "object": "audio.voice",
        "name": voice.name,
        "type": "prompt" if voice.transcript == SAMPLE_TEXT else "audio_sample",
        "created_at": voice.created_at,
        "language": voice.language,
        "transcript": voice.transcript,
        "description": voice.description,
    }

"""What a speech run asks for, and what becomes of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pega_omni_plugin.bench.client import Client, RequestFailed
from pega_omni_plugin.bench.load import Clock
from pega_omni_plugin.bench.streams import (
    AudioStream,
    EventStream,
    ResponseFormat,
    SpeechStream,
    StreamError,
    StreamFormat,
)

SPEECH_PATH = "/v1/audio/speech"

_TEXT = "river lantern copper seven morning quiet window garden winter silver paper harbour amber walking gentle stone"


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are in ms from the moment it was due; of a failed request only ``wait_ms`` is known.

    ``ttfp_ms`` ends at the first audio byte that is no header, ``e2e_ms`` at the last byte of the response.
    ``wait_ms`` is the part of both that the client spent before sending: waiting for a permit, or late itself.
    """

    ok: bool
    error: str | None
    wait_ms: float
    ttfp_ms: float | None = None
    e2e_ms: float | None = None
    audio_s: float | None = None
    underrun_ms: float | None = None


@dataclass(frozen=True, slots=True)
class SpeechRequests:
    """The requests of a run: ``body(i)`` is the JSON of the i-th. ``fields`` are merged over the others."""

    model: str
    prompts: Sequence[str]
    voice: str
    response_format: ResponseFormat
    stream_format: StreamFormat
    sample_rate: int
    extra: Mapping[str, Any]
    fields: Mapping[str, Any]

    def body(self, index: int) -> bytes:
        """Prompts are used in turn; ``stream_format`` and ``extra`` are left out when they say nothing."""
        request: dict[str, Any] = {
            "model": self.model,
            "input": self.prompts[index % len(self.prompts)],
            "voice": self.voice,
            "response_format": self.response_format,
        }
        if self.stream_format != "audio":
            request["stream_format"] = self.stream_format
        if self.extra:
            request["extra"] = dict(self.extra)
        return orjson.dumps({**request, **self.fields})

    def stream(self) -> SpeechStream:
        """What takes the response to one of these requests."""
        audio = AudioStream(self.response_format, self.sample_rate)
        return EventStream(audio) if self.stream_format == "sse" else audio


async def speak(
    client: Client, requests: SpeechRequests, index: int, due_ns: int, clock: Clock, timeout_s: float
) -> Record:
    """Make one request, due at ``due_ns``, and measure it. Failures of the request are in the record, not raised."""
    body, stream = requests.body(index), requests.stream()
    wait_ms = (clock.now() - due_ns) / 1e6
    try:
        async with asyncio.timeout(timeout_s):
            ended_ns = await client.post(SPEECH_PATH, body, stream)
        stream.finish()
    except TimeoutError:
        return Record(False, f"timed out after {timeout_s:g} s", wait_ms)
    except (RequestFailed, StreamError) as error:
        return Record(False, str(error), wait_ms)
    playback = stream.playback
    assert playback.started_ns is not None  # finish() refuses a stream without audio
    return Record(
        ok=True,
        error=None,
        wait_ms=wait_ms,
        ttfp_ms=(playback.started_ns - due_ns) / 1e6,
        e2e_ms=(ended_ns - due_ns) / 1e6,
        audio_s=playback.audio_bytes / playback.bytes_per_second,
        underrun_ms=playback.stall_ns / 1e6,
    )


def synthetic_prompts(chars: int) -> list[str]:
    """Sixteen prompts of ``chars`` characters that begin with different words, the same in every run."""
    words = _TEXT.split()
    prompts = []
    for first in range(len(words)):
        line = " ".join(words[first:] + words[:first])
        prompts.append(" ".join([line] * (chars // len(line) + 1))[:chars])
    return prompts

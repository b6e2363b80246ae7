"""Response bodies as they arrive: raw PCM, WAV and server-sent events, reduced to audio bytes with arrival times."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import orjson

from pega_omni_plugin.bench.playback import Playback

ResponseFormat = Literal["pcm", "wav"]
StreamFormat = Literal["audio", "sse"]

SAMPLE_BYTES = 2
"""Mono 16-bit samples, the only kind that ``pcm`` and ``wav`` speech has."""

_WAV = struct.Struct("<4s4x4s4sIHHI4x2xH4s4x")
"""The 44-byte header of streamed WAV; the two sizes, byte rate and alignment are not looked at."""


class StreamError(Exception):
    """A body is not what was asked for, or ended too early; the message is the request's error."""


class SpeechStream(Protocol):
    """Takes one response body."""

    @property
    def playback(self) -> Playback:
        """What was heard; whole once ``finish`` has passed."""
        ...

    def write(self, at_ns: int, data: bytes) -> None:
        """Take the bytes that arrived at ``at_ns``; raises ``StreamError``."""
        ...

    def finish(self) -> None:
        """The body has ended; raises ``StreamError`` if it must not end here."""
        ...


class AudioStream:
    """Raw PCM, or WAV whose header is skipped and whose sample rate then replaces the given one.

    ``sample_rate`` is in Hz. A header may be split anywhere; only what follows it counts as audio.
    """

    def __init__(self, response_format: ResponseFormat, sample_rate: int) -> None:
        self._playback = Playback(sample_rate * SAMPLE_BYTES)
        self._header: bytearray | None = bytearray() if response_format == "wav" else None

    @property
    def playback(self) -> Playback:
        return self._playback

    def write(self, at_ns: int, data: bytes) -> None:
        if self._header is not None:
            self._header += data
            if len(self._header) < _WAV.size:
                return
            self._playback = Playback(_wav_sample_rate(self._header) * SAMPLE_BYTES)
            data = bytes(self._header[_WAV.size :])
            self._header = None
        if data:
            self._playback.feed(at_ns, len(data))

    def finish(self) -> None:
        if not self._playback.audio_bytes:
            raise StreamError("the response held no audio")
        if self._playback.audio_bytes % SAMPLE_BYTES:
            raise StreamError(f"the audio ended inside a sample, after {self._playback.audio_bytes} bytes")


class EventStream:
    """Speech as server-sent events: ``speech.audio.delta`` with base64 audio, at last ``speech.audio.done``.

    Event types are OpenAI's; ``error`` and vLLM-Omni's ``speech.audio.error`` fail the request, unknown types are
    skipped.
    """

    def __init__(self, audio: AudioStream) -> None:
        self._audio = audio
        self._events = EventParser()
        self._done = False

    @property
    def playback(self) -> Playback:
        return self._audio.playback

    def write(self, at_ns: int, data: bytes) -> None:
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                continue
            event = _event(payload)
            kind = event.get("type")
            if self._done:
                raise StreamError(f"event {kind!r} after speech.audio.done")
            if kind == "speech.audio.delta":
                self._audio.write(at_ns, _audio_of(event))
            elif kind == "speech.audio.done":
                self._done = True
            elif kind in ("error", "speech.audio.error"):
                raise StreamError(f"error event: {_message_of(event)}")

    def finish(self) -> None:
        if not self._done:
            raise StreamError("the event stream ended without speech.audio.done")
        self._audio.finish()


class EventParser:
    """Splits a server-sent event stream, cut anywhere, into the data of its events.

    Follows the event stream format of the HTML standard for lines ended by LF or CRLF. Fields other than ``data`` and
    comments are skipped; an event without its closing empty line is not given out.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of every event that ``data`` completes."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event


def _wav_sample_rate(header: bytearray) -> int:
    riff, wave, fmt, size, coding, channels, rate, bits, data = _WAV.unpack_from(header)
    if (riff, wave) != (b"RIFF", b"WAVE"):
        raise StreamError("not a WAV stream: no RIFF header")
    if (fmt, size, coding, channels, bits, data) != (b"fmt ", 16, 1, 1, 16, b"data") or not rate:
        raise StreamError("WAV header: expected 44 bytes of PCM, mono, 16 bit")
    return int(rate)


def _event(payload: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise StreamError(f"event is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise StreamError(f"event is {type(event).__name__}, expected an object")
    return event


def _audio_of(event: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(event["audio"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise StreamError(f"speech.audio.delta: audio: expected base64, got {event.get('audio')!r:.20}") from error


def _message_of(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, dict) else error)

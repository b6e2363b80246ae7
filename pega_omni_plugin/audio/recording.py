"""Reference recordings: from bytes that somebody sent to mono samples that a voice can be cloned from."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64
import soundfile
import soxr

Samples = npt.NDArray[np.float32]
"""Mono audio, shape ``[samples]``, within -1 and 1."""

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "MP3", "OGG")
"""Containers, by libsndfile's names."""

RATES_HZ = (8_000, 192_000)
MAX_CHANNELS = 8

SILENCE_SLACK_SECONDS = 30.0
"""Silence around the speech that a recording may have beyond its longest length: so much more is decoded."""

FRAME_SECONDS = 0.02
SILENCE_DB = -45.0
"""A frame this far below the loudest one is silence, if it stands at the start or the end."""

FLOOR_DBFS = -60.0
"""A recording whose loudest frame is below this (RMS, of full scale) holds nothing to clone."""

MARGIN_SECONDS = 0.1
"""Kept of the silence on either side: breaths, and consonants that begin or end softly."""

TAIL_SECONDS = 0.5
"""Silence appended: the last frames of a reference are heard again at the start of generated speech (QwenLM/Qwen3-TTS
issues 119 and 291), and these are silent."""

_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?:;[^;,]*)*;base64", re.IGNORECASE)
_DATA_URL_HEAD_CHARS = 256

_STREAMED_BYTES = 0x7FFFF000
"""Sizes in a WAV header from this on are what programs write that cannot know the length: 2**32 - 1 (ffmpeg), or just
below 2**31 (SoX). A file of that size would be over every limit on what may be sent."""

# What libsndfile's log of a file says when there is less of it than its header promises.
_LOG_WAV = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)
_LOG_CUT = re.compile(r"Junk after the last page|Calculated frame count \d+ does not match")

_UNKNOWN_FRAMES = 2**63 - 1


class RecordingError(ValueError):
    """A recording cannot be used. The message says what is wrong and what is allowed, and reads on from the name of the
    field that the recording came in, which only the caller knows: "is too short: ..."."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what is left of a recording without the silence around it."""

    min_seconds: float = 1.0
    max_seconds: float = 30.0

    @property
    def allowed(self) -> str:
        """In words, for messages."""
        return f"{self.min_seconds:g} to {self.max_seconds:g} seconds are allowed"


def decode_data(text: str) -> bytes:
    """The bytes in a data URL (``data:audio/wav;base64,…``, RFC 2397) or in bare base64. Opens neither paths nor URLs.

    Raises:
        RecordingError: it is empty, not base64, or a data URL of something else than audio.
    """
    encoded = text
    if text[:5].lower() == "data:":
        comma = text.find(",", 0, _DATA_URL_HEAD_CHARS)
        head = _DATA_URL.fullmatch(text[:comma]) if comma >= 0 else None
        if head is None:
            raise RecordingError("is a data URL without base64; send data:audio/wav;base64,… or bare base64")
        kind = head["type"].strip().lower()
        if not kind.startswith("audio/") and kind != "application/octet-stream":
            raise RecordingError(
                f"is a data URL of {kind or 'no type'}; audio/* and application/octet-stream are allowed"
            )
        encoded = text[comma + 1 :]
    try:
        # Base64 in lines is common, and the validating decoder takes none.
        data = pybase64.b64decode("".join(encoded.split()), validate=True)
    except ValueError as error:  # which binascii.Error is
        raise RecordingError("is not base64; send a data URL (data:audio/wav;base64,…) or bare base64") from error
    if not data:
        raise RecordingError("is empty; send a recording as a data URL (data:audio/wav;base64,…) or bare base64")
    return data


def read_recording(data: bytes, sample_rate: int, limits: Limits) -> Samples:
    """Decode, mix to mono, trim, check, resample, and append ``TAIL_SECONDS`` of silence.

    Never decodes more than ``limits.max_seconds + SILENCE_SLACK_SECONDS`` and one more, whatever the file holds or its
    header says.

    Returns:
        Samples at ``sample_rate``, shape ``[samples]``.

    Raises:
        RecordingError: it is no such file, cut off, too short, too long or silent, or has samples that are no numbers.
    """
    if not data:
        raise RecordingError("is empty; send a wav, flac, mp3 or ogg file")
    samples, rate = _decode(data, limits)
    voiced = trim(_within_one(samples), rate)
    seconds = len(voiced) / rate
    if not seconds:
        raise RecordingError(f"is silent ({len(samples) / rate:.2f} seconds); send one with speech in it")
    if not limits.min_seconds <= seconds <= limits.max_seconds:
        size = "short" if seconds < limits.min_seconds else "long"
        raise RecordingError(f"is too {size}: {seconds:.2f} seconds without the silence around it; {limits.allowed}")
    resampled = soxr.resample(voiced, rate, sample_rate, quality="HQ")
    tail = np.zeros(round(TAIL_SECONDS * sample_rate), dtype=np.float32)
    # Resampling overshoots a little at full scale.
    return np.concatenate([_within_one(resampled), tail])


def trim(samples: Samples, sample_rate: int) -> Samples:
    """Without the silence before the first and after the last frame that sounds, ``MARGIN_SECONDS`` of it kept.

    Silence inside is untouched. A recording that is silent throughout has no samples left.
    """
    size = max(1, round(FRAME_SECONDS * sample_rate))
    frames = -(-len(samples) // size)
    padded = np.pad(samples, (0, frames * size - len(samples)), mode="edge" if len(samples) else "constant")
    # Around each frame's own mean: an offset of the recording is not sound.
    power = padded.reshape(frames, size).var(axis=1, dtype=np.float64)  # [frames]
    loudest = power.max(initial=0.0)
    if loudest < 10 ** (FLOOR_DBFS / 10):
        return samples[:0]
    sounding = np.flatnonzero(power >= loudest * 10 ** (SILENCE_DB / 10))
    margin = round(MARGIN_SECONDS * sample_rate)
    return samples[max(0, sounding[0] * size - margin) : (sounding[-1] + 1) * size + margin]


def _decode(data: bytes, limits: Limits) -> tuple[Samples, int]:
    """Mono samples as stored, and their rate."""
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise RecordingError(_unreadable(data)) from error
    with file:
        rate: int = file.samplerate
        if file.format not in FORMATS:
            raise RecordingError(f"is {file.format}; wav, flac, mp3 and ogg are allowed")
        if not RATES_HZ[0] <= rate <= RATES_HZ[1]:
            raise RecordingError(f"has {rate} samples per second; {RATES_HZ[0]} to {RATES_HZ[1]} are allowed")
        if file.channels > MAX_CHANNELS:
            raise RecordingError(f"has {file.channels} channels; 1 to {MAX_CHANNELS} are allowed")
        _check_whole(file)
        longest = limits.max_seconds + SILENCE_SLACK_SECONDS
        if file.frames > longest * rate:
            raise RecordingError(f"is too long: {file.frames / rate:.1f} seconds by its header; {limits.allowed}")
        samples = _read(file, longest, limits)
        if len(samples) < file.frames:
            raise RecordingError(_cut(len(samples) / rate, file.frames / rate))
    return samples, rate


def _check_whole(file: Any) -> None:
    """By libsndfile's log: of these formats it reports as many frames as there are, not as many as were promised."""
    if file.frames == _UNKNOWN_FRAMES:
        raise RecordingError("is a stream whose header has no length; convert it to a file, to wav for example")
    log = file.extra_info
    sizes = _LOG_WAV.search(log)
    if sizes is not None:
        promised, there = int(sizes[1]), int(sizes[2])
        if there < promised < _STREAMED_BYTES:
            seconds = file.frames / file.samplerate
            raise RecordingError(_cut(seconds, seconds * promised / there if there else None))
    if _LOG_CUT.search(log):
        raise RecordingError(_cut(file.frames / file.samplerate, None))


def _read(file: Any, longest_seconds: float, limits: Limits) -> Samples:
    """Mono samples, decoded a second at a time so that no header decides how much."""
    rate: int = file.samplerate
    block = np.empty((rate, file.channels), dtype=np.float32)  # [frames, channels]
    blocks: list[Samples] = []
    frames = 0
    while True:
        try:
            # Into an array: without one, never more is read than the header says.
            got = file.read(out=block)
        except soundfile.LibsndfileError as error:
            raise RecordingError(_cut(frames / rate, None)) from error
        if not len(got):
            break
        if not np.isfinite(got).all():
            raise RecordingError(f"has samples that are NaN or infinite, after {frames / rate:.0f} seconds")
        # In double precision, where no sum of finite samples overflows.
        blocks.append(got.mean(axis=1, dtype=np.float64).astype(np.float32))
        frames += len(got)
        if frames > longest_seconds * rate:
            raise RecordingError(f"is too long: {frames / rate:.1f} seconds and more; {limits.allowed}")
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)


def _within_one(samples: Samples) -> Samples:
    peak = np.abs(samples).max(initial=0.0)
    return samples / peak if peak > 1 else samples


def _cut(seconds: float, promised: float | None) -> str:
    of = "" if promised is None else f" of the {promised:.2f} seconds that its header promises"
    return f"is cut off or damaged after {seconds:.2f} seconds{of}; send the whole file"


def _unreadable(data: bytes) -> str:
    kind = "a PDF" if data.startswith(b"%PDF-") else "no audio file that can be read"
    return f"is {kind}; wav, flac, mp3 and ogg are allowed"

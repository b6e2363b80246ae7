"""WAV headers. The format is RIFF/WAVE, 16-bit PCM, one channel (Microsoft multimedia specification 1.0, 1991)."""

from __future__ import annotations

import struct

UNKNOWN_SIZE = 0xFFFFFFFF
"""In both size fields of a header that is sent before the length is known."""

HEADER_BYTES = 44


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """The 44 bytes before mono s16le samples; ``data_bytes=None`` for a stream of unknown length."""
    riff, data = (UNKNOWN_SIZE, UNKNOWN_SIZE) if data_bytes is None else (data_bytes + HEADER_BYTES - 8, data_bytes)
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        riff,
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        sample_rate,
        sample_rate * 2,
        2,
        16,
        b"data",
        data,
    )

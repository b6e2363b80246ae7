"""Outputs of the official packages on the tiny checkpoints, and what their recording and their tests share."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "qwen3_tts"
MANIFEST = FOLDER / "manifest.json"
COLUMN_STRIDE = 127
"""Of each row of logits every 127th is kept, and the logarithm of the sum of all exponentials."""
PCM_STRIDE = 61
CODEC_PCM_STRIDE = 13
"""Of a waveform one sample in so many is kept: prime to 1920, so that every phase of a frame is met."""
REFERENCE_RATE = 24_000


def manifest() -> dict[str, Any]:
    """What was asked, of which checkpoints, with which packages; see ``record_qwen3_tts``."""
    document: dict[str, Any] = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return document


def load(case: str) -> dict[str, np.ndarray]:
    """All arrays of one case, by the names that ``record_qwen3_tts`` lists."""
    with np.load(FOLDER / f"{case}.npz") as file:
        return dict(file)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


def reference_audio() -> np.ndarray:
    """int16 [36000], 1.5 s at 24 kHz: a gliding buzz with noise, by integer arithmetic, so the same everywhere."""
    count = REFERENCE_RATE * 3 // 2
    time = np.arange(count)
    noise = (np.random.PCG64(1).random_raw(count) >> np.uint64(52)).astype(np.int64) - 2048  # [-2048, 2048)
    step = 300 + (time // 40) % 250  # of 65536 a turn: 110 to 201 Hz
    phase = np.cumsum(step) % 65536
    buzz = np.abs(phase - 32768) - 16384
    level = np.abs(time % 9000 - 4500)  # four swells
    return ((buzz + noise) * level // 8192).astype(np.int16)


def uniforms(seed: int, frames: int) -> np.ndarray:
    """float32 [frames, 16] in [0, 1), exact multiples of 2**-24."""
    raw = np.random.PCG64(seed).random_raw(frames * 16) >> np.uint64(40)
    return (raw.astype(np.float32) * np.float32(2.0**-24)).reshape(frames, 16)


def codes(seed: int, frames: int) -> np.ndarray:
    """int16 [frames, 16] in [0, 2048)."""
    raw = np.random.PCG64(seed).random_raw(frames * 16) >> np.uint64(53)
    return raw.astype(np.int16).reshape(frames, 16)

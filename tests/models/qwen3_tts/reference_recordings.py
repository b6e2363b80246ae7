"""Recordings for the tests of the reference encoder, whose goldens (``goldens/reference.npz``) were made from them.

``record`` made the goldens, from the tiny ``base`` checkpoint and the official package (qwen-tts 0.1.1 with
transformers 4.57.3 on the CPU, in float32). It needs that package, so no test calls it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SAMPLES = {"short": 12_100, "odd": 77_039, "long": 264_000}
"""Each ends in a part of a frame; the last is longer than the window of the encoder's attention."""


def recording(samples: int) -> np.ndarray:
    """A rising tone in noise, float32 [samples] at 24 kHz, from integers alone: every machine makes the same."""
    position = np.arange(samples, dtype=np.int64)
    phase = (position * (480 + position // 400)) % 65_536
    triangle = np.abs(phase - 32_768) - 16_384
    noise = (np.random.PCG64(24).random_raw(samples) >> np.uint64(52)).astype(np.int64) - 2_048
    return ((triangle + noise) / 32_768).astype(np.float32)


def record(checkpoint: Path, goldens: Path) -> None:
    """Write what the official package makes of the recordings: ``NAME.codes`` and ``NAME.embedding`` for each.

    transformers 4 forgets the attention's window (``sliding_window``) unless it runs FlashAttention, so it is given the
    mask that transformers 5 uses in the same place.
    """
    import torch
    from qwen_tts import Qwen3TTSModel  # type: ignore[import-not-found]
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.mimi import modeling_mimi

    modeling_mimi.create_causal_mask = create_sliding_window_causal_mask
    model = Qwen3TTSModel.from_pretrained(str(checkpoint), dtype=torch.float32).model
    arrays = {}
    for name, samples in SAMPLES.items():
        pcm = recording(samples)
        codes = model.speech_tokenizer.encode(pcm, sr=24_000).audio_codes[0]
        arrays[f"{name}.codes"] = codes.to(torch.int16).numpy()
        arrays[f"{name}.embedding"] = model.extract_speaker_embedding(pcm, 24_000).numpy()
    np.savez_compressed(goldens, **arrays)

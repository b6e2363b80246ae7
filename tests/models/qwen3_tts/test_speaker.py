"""The speaker encoder's features, and what it refuses. Its numbers are tested in ``test_reference``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pega_omni_plugin.models.qwen3_tts.config import Section
from pega_omni_plugin.models.qwen3_tts.speaker import (
    HOP_SAMPLES,
    SAMPLE_RATE,
    SpeakerConfig,
    log_mel,
    mel_filters,
    read_speaker_config,
)
from pega_omni_plugin.nn.checkpoint import CheckpointError

LIBROSA = {
    35: {40: 0.01779319, 41: 0.02432632},
    42: {48: 0.00491832, 49: 0.02904600, 50: 0.01113054},
    46: {54: 0.01354131, 55: 0.02432369, 56: 0.00544480},
}
"""Whole rows of ``librosa.filters.mel(sr=24000, n_fft=1024, n_mels=128, fmin=0, fmax=12000)`` (librosa 0.11): one where
the scale is linear, two where it is logarithmic."""

FILTERS = mel_filters(128)


def test_filters_are_those_of_librosa() -> None:
    for row, entries in LIBROSA.items():
        expected = np.zeros(513, dtype=np.float32)
        expected[list(entries)] = list(entries.values())
        np.testing.assert_allclose(FILTERS[row].numpy(), expected, atol=1e-8)
    assert FILTERS[0, 1].item() == pytest.approx(0.03355042636)
    assert FILTERS[127, 511].item() == pytest.approx(0.00022817837, rel=1e-5)
    assert FILTERS.count_nonzero() == 1008
    assert FILTERS.sum().item() == pytest.approx(5.4594154, rel=1e-6)


@given(st.integers(2 * HOP_SAMPLES, 20 * HOP_SAMPLES))
@settings(max_examples=25, deadline=None)
def test_there_is_a_column_for_each_whole_hop(samples: int) -> None:
    assert log_mel(torch.zeros(samples), FILTERS).shape == (128, samples // HOP_SAMPLES)


def test_silence_is_at_the_floor() -> None:
    mel = log_mel(torch.zeros(SAMPLE_RATE // 10), FILTERS)
    torch.testing.assert_close(mel, torch.full_like(mel, float(np.log(1e-5))))


def test_a_tone_is_loudest_in_the_band_around_it() -> None:
    hertz = 1150.0  # bins 49 and 50, which row 42 above has most of
    tone = torch.sin(2 * torch.pi * hertz * torch.arange(SAMPLE_RATE // 10) / SAMPLE_RATE)
    middle = log_mel(tone, FILTERS)[:, 4:-4]
    assert set(middle.argmax(dim=0).tolist()) == {42}


def section(tmp_path: Path, values: dict[str, Any]) -> Section:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"speaker_encoder_config": values}))
    return Section(path).section("speaker_encoder_config")


def test_keys_left_out_have_the_official_defaults(tmp_path: Path) -> None:
    assert read_speaker_config(section(tmp_path, {})) == SpeakerConfig(
        embedding=1024,
        mels=128,
        channels=(512, 512, 512, 512, 1536),
        kernels=(5, 3, 3, 3, 1),
        dilations=(1, 2, 3, 4, 1),
        attention=128,
        squeeze=128,
        parts=8,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sample_rate": 16000}, r"speaker_encoder_config\.sample_rate: only 24000 Hz is supported"),
        ({"enc_dilations": [1, 2, 3, 4]}, "enc_channels: expected at least 3, and as many"),
        ({"enc_channels": [512, 512, 256, 512, 1280]}, "enc_channels: all but the last must be equal"),
        ({"enc_res2net_scale": 7}, "enc_channels: all but the last must be equal and divisible by 7"),
        ({"enc_channels": [512, 512, 512, 512, 2048]}, "enc_channels: the last must be the sum .* 1536"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused_by_name(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_speaker_config(section(tmp_path, values))

"""References against the official package's, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.reference import ReferenceEncoder
from pega_omni_plugin.nn.checkpoint import CheckpointError
from tests.models.qwen3_tts.reference_recordings import SAMPLES, recording

GOLDENS = Path(__file__).parent / "goldens" / "reference.npz"
"""Made by ``reference_recordings.record``, which says from what."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny.write(tmp_path, variant="base")
    return tmp_path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ReferenceEncoder:
    folder = tmp_path_factory.mktemp("base")
    tiny.write(folder, variant="base")
    return ReferenceEncoder.load(folder, 16)


@pytest.mark.parametrize("name", SAMPLES)
def test_codes_and_embedding_are_those_of_the_official_package(encoder: ReferenceEncoder, name: str) -> None:
    reference = encoder.encode(recording(SAMPLES[name]))
    with np.load(GOLDENS) as goldens:
        np.testing.assert_array_equal(reference.codes, goldens[f"{name}.codes"])
        np.testing.assert_allclose(reference.embedding, goldens[f"{name}.embedding"], rtol=1e-4, atol=1e-5)
    assert reference.codes.dtype == np.int16
    assert reference.embedding.dtype == np.float32


def test_threads_that_share_an_encoder_get_what_one_alone_gets(encoder: ReferenceEncoder) -> None:
    recordings = [recording(24_000 + 1_000 * number) for number in range(8)]
    alone = [encoder.encode(pcm) for pcm in recordings]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(encoder.encode, recordings))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.codes, other.codes)
        np.testing.assert_array_equal(one.embedding, other.embedding)


def test_a_recording_that_nobody_may_write_to_is_taken_and_left_as_it_is(encoder: ReferenceEncoder) -> None:
    pcm = recording(24_000)
    pcm.flags.writeable = False
    encoder.encode(pcm)
    np.testing.assert_array_equal(pcm, recording(24_000))


def test_the_shortest_recording_is_one_frame(encoder: ReferenceEncoder) -> None:
    assert encoder.sample_rate == 24_000
    assert encoder.encode(recording(encoder.min_samples)).codes.shape == (1, 16)


@pytest.mark.parametrize(
    ("pcm", "message"),
    [
        (recording(1_279), "1279 samples are too few, at least 1280 are needed"),
        (recording(24_000)[None], r"expected one channel of float32, got shape \[1, 24000\]"),
        (recording(24_000).astype(np.float64), "expected one channel of float32, .* of float64"),
    ],
)
def test_other_than_a_recording_is_refused(encoder: ReferenceEncoder, pcm: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder.encode(pcm)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_checkpoint_without_a_speaker_encoder_is_refused(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", lambda config: config.update(tts_model_type="custom_voice"))
    with pytest.raises(
        CheckpointError, match=r"tts_model_type: only 'base' checkpoints clone voices, .*'custom_voice'"
    ):
        ReferenceEncoder.load(checkpoint, 16)


def test_an_embedding_of_another_size_than_the_talker_is_refused(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", lambda config: config["speaker_encoder_config"].update(enc_dim=32))
    with pytest.raises(
        CheckpointError, match=r"speaker_encoder_config\.enc_dim: expected the talker's hidden_size, 64"
    ):
        ReferenceEncoder.load(checkpoint, 16)


def test_encoders_of_different_sample_rates_are_refused(checkpoint: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["input_sample_rate"] = config["encoder_config"]["sampling_rate"] = 16_000

    edit(checkpoint / "speech_tokenizer" / "config.json", change)
    with pytest.raises(CheckpointError, match="input_sample_rate: expected the speaker encoder's 24000 Hz, got 16000"):
        ReferenceEncoder.load(checkpoint, 16)


@pytest.mark.parametrize("groups", [1, 17])
def test_a_talker_with_other_codes_than_the_codec_makes_is_refused(checkpoint: Path, groups: int) -> None:
    with pytest.raises(CheckpointError, match=f"encoder_valid_num_quantizers: 16 does not go with .* {groups} codes"):
        ReferenceEncoder.load(checkpoint, groups)

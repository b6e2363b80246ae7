"""The codec's encoder: what holds for any recording, and what it refuses. Its numbers are in ``test_reference``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.encoder import CodecEncoder, EncoderConfig, read_encoder_config
from pega_omni_plugin.nn.checkpoint import CheckpointError, Weights
from tests.models.qwen3_tts.reference_recordings import recording

FRAME = 1920
PCM = torch.from_numpy(recording(12 * FRAME))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("base")
    tiny.write(checkpoint, variant="base")
    return checkpoint / "speech_tokenizer"


@pytest.fixture(scope="module")
def config(folder: Path) -> EncoderConfig:
    return read_encoder_config(folder / "config.json")


@pytest.fixture(scope="module")
def encoder(folder: Path, config: EncoderConfig) -> CodecEncoder:
    return CodecEncoder(config, Weights(folder, torch.float32), 16)


@pytest.fixture(scope="module")
def codes(encoder: CodecEncoder) -> torch.Tensor:
    return encoder(PCM)


@given(samples=st.one_of(st.integers(1, 12 * FRAME), st.integers(1, 11).map(lambda frames: frames * FRAME)))
@settings(max_examples=20, deadline=None)
def test_every_frame_begun_is_encoded_and_whole_ones_do_not_depend_on_what_follows(
    encoder: CodecEncoder, codes: torch.Tensor, samples: int
) -> None:
    part = encoder(PCM[:samples])
    assert part.shape == (-(-samples // FRAME), 16)
    whole = samples // FRAME
    assert torch.equal(part[:whole], codes[:whole])


def test_a_frame_depends_on_the_window_and_on_nothing_before_it(folder: Path, config: EncoderConfig) -> None:
    # With a window of one step, a frame hears its own samples and the 5240 before them (less than three frames) that
    # the convolutions reach back to: each does by its kernel less its stride, times the strides before it.
    narrow = CodecEncoder(replace(config, window=1), Weights(folder, torch.float32), 16)
    other = PCM.clone()
    other[: 4 * FRAME] = -other[: 4 * FRAME]
    changed = (narrow(PCM) != narrow(other)).any(dim=1)
    assert changed[:4].all() and not changed[7:].any()
    wide = CodecEncoder(config, Weights(folder, torch.float32), 16)
    assert (wide(PCM) != wide(other))[7:].any()


def test_fewer_groups_are_the_first_ones(folder: Path, config: EncoderConfig, codes: torch.Tensor) -> None:
    four = CodecEncoder(config, Weights(folder, torch.float32), 4)
    assert torch.equal(four(PCM), codes[:, :4])


def written(tmp_path: Path, **keys: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"encoder_config": {}} | keys))
    return path


def test_keys_left_out_have_the_official_defaults(tmp_path: Path) -> None:
    assert read_encoder_config(written(tmp_path)) == EncoderConfig(
        sample_rate=24000,
        frame_samples=FRAME,
        filters=64,
        strides=(4, 5, 6, 8),
        kernel=7,
        residual_kernel=3,
        last_kernel=3,
        residual_layers=1,
        dilation_growth=2,
        compress=2,
        hidden=512,
        layers=8,
        heads=8,
        head_dim=64,
        intermediate=2048,
        eps=1e-5,
        rope_theta=10000.0,
        window=250,
        semantic=1,
        quantizers=16,
        codebook_size=2048,
        codebook_dim=256,
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"encoder_config": {"use_causal_conv": False}}, r"encoder_config\.use_causal_conv: only True is supported"),
        ({"encoder_config": {"use_conv_shortcut": True}}, "use_conv_shortcut: only False is supported"),
        ({"encoder_config": {"attention_bias": True}}, "attention_bias: only False is supported"),
        ({"encoder_config": {"audio_channels": 2}}, "audio_channels: only 1 is supported"),
        ({"encoder_config": {"pad_mode": "reflect"}}, "pad_mode: only 'constant' is supported, got 'reflect'"),
        ({"encoder_config": {"hidden_act": "silu"}}, "hidden_act: only 'gelu' is supported"),
        ({"input_sample_rate": 16000}, "sampling_rate: expected input_sample_rate, 16000"),
        ({"encode_downsample_rate": 960}, "upsampling_ratios: these and 2 do not multiply to 960"),
        ({"encoder_config": {"num_key_value_heads": 2}}, "num_key_value_heads: expected num_attention_heads, 8"),
        ({"encoder_config": {"codebook_dim": 128}}, "codebook_dim: expected vector_quantization_hidden_dimension"),
        ({"encoder_valid_num_quantizers": 33}, "encoder_valid_num_quantizers: 33 is more than there are"),
        ({"encoder_valid_num_quantizers": 1}, "encoder_valid_num_quantizers: 1 .* all are semantic"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_encoder_config(written(tmp_path, **keys))


def test_a_tensor_of_another_shape_is_refused_by_name(folder: Path, config: EncoderConfig) -> None:
    with pytest.raises(CheckpointError, match=r"encoder\.encoder\.layers\.0\.conv\.weight has shape \[4, 1, 7\]"):
        CodecEncoder(replace(config, kernel=5), Weights(folder, torch.float32), 16)

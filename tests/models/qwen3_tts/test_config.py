"""Checkpoints that are broken, each in one place: the message names the file and the key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pega_omni_plugin.models.qwen3_tts.config import Sampling, read_config
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from pega_omni_plugin.nn.checkpoint import CheckpointError

CONFIG, CODEC, GENERATION = "config.json", "speech_tokenizer/config.json", "generation_config.json"
MISSING = object()


@pytest.fixture
def folder(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy to break, without its weights."""
    source = checkpoint_of("custom_voice")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path


def change(path: Path, key: str, value: Any) -> None:
    """Set ``key``, with dots for objects within, or remove it."""
    document = json.loads(path.read_text(encoding="utf-8"))
    *outer, last = key.split(".")
    section = document
    for name in outer:
        section = section[name]
    if value is MISSING:
        del section[last]
    else:
        section[last] = value
    path.write_text(json.dumps(document), encoding="utf-8")


def error_of(read: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as raised:
        read()
    return str(raised.value)


def test_the_tiny_checkpoint_is_read(checkpoint_of: Callable[[str], Path]) -> None:
    config = read_config(checkpoint_of("custom_voice"))
    talker = config.talker
    assert (config.variant, config.size) == ("custom_voice", "1b7")
    assert (talker.vocab, talker.code_vocab, talker.groups, talker.eos) == (3072, 2048, 16, 2150)
    assert (talker.stack.hidden, talker.predictor.hidden, talker.text_hidden) == (64, 32, 96)
    assert talker.dialects == {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
    assert (config.codec.sample_rate, config.codec.frame_samples, config.codec.quantizers) == (24_000, 1920, 16)
    assert config.generation.max_frames == 8192
    assert config.generation.repetition_penalty == 1.05


@pytest.mark.parametrize("name", [CONFIG, CODEC, GENERATION])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing; the checkpoint is incomplete, download it again"),
        ("{", "cannot be read as JSON"),
        ("\udcff", "cannot be read as JSON"),
        ("[]", "expected a JSON object, got list"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, name: str, content: str | None, message: str) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode(errors="surrogateescape"))
    error = error_of(lambda: read_config(folder))
    assert error.startswith(f"{path}: ")
    assert message in error


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        (CONFIG, "model_type", "qwen3", "expected 'qwen3_tts', got 'qwen3'"),
        (
            CONFIG,
            "tokenizer_type",
            "qwen3_tts_tokenizer_25hz",
            "only the 12 Hz tokenizer is supported, got 'qwen3_tts_tok",
        ),
        (CONFIG, "tts_model_type", "singer", "expected one of custom_voice, voice_design, base, got 'singer'"),
        (CONFIG, "tts_model_size", MISSING, "missing"),
        (CONFIG, "im_end_token_id", MISSING, "missing"),
        (CONFIG, "tts_pad_token_id", "151671", "expected an integer, got '151671'"),
        (CONFIG, "tts_bos_token_id", True, "expected an integer, got True"),
        (CONFIG, "talker_config", [], "expected an object, got []"),
        (CONFIG, "talker_config.hidden_size", MISSING, "missing"),
        (CONFIG, "talker_config.hidden_size", 64.5, "expected an integer, got 64.5"),
        (CONFIG, "talker_config.rms_norm_eps", "small", "expected a number, got 'small'"),
        (CONFIG, "talker_config.attention_bias", True, "attention with bias is not supported"),
        (CONFIG, "talker_config.attention_bias", 0, "expected true or false, got 0"),
        (CONFIG, "talker_config.sliding_window", 128, "a talker with sliding attention is not supported"),
        (CONFIG, "talker_config.codec_language_id", {"english": "2050"}, "expected an object of integers"),
        (CONFIG, "talker_config.spk_is_dialect", {"eric": "martian"}, "eric speaks 'martian', which codec_language_id"),
        (CONFIG, "talker_config.code_predictor_config", MISSING, "missing"),
        (CONFIG, "talker_config.code_predictor_config.num_code_groups", 15, "expected the talker's 16"),
        (CONFIG, "talker_config.code_predictor_config.vocab_size", None, "missing"),
        (CODEC, "output_sample_rate", MISSING, "missing"),
        (CODEC, "decoder_config.codebook_size", "2048", "expected an integer, got '2048'"),
        (CODEC, "decoder_config.upsample_rates", [8, 5, 4], "do not multiply to 1920"),
        (CODEC, "decoder_config.upsample_rates", 480, "expected a list of integers, got 480"),
        (CODEC, "decoder_config.upsampling_ratios", [2, "2"], "expected a list of integers above 0, got [2, '2']"),
        (CODEC, "decoder_config.upsampling_ratios", [2, 0], "expected a list of integers above 0, got [2, 0]"),
        (GENERATION, "temperature", "hot", "expected a number, got 'hot'"),
        (GENERATION, "top_k", 50.5, "expected an integer, got 50.5"),
        (GENERATION, "do_sample", "yes", "expected true or false, got 'yes'"),
    ],
)
def test_a_key_that_is_missing_or_wrong_is_named(folder: Path, name: str, key: str, value: Any, message: str) -> None:
    change(folder / name, key, value)
    error = error_of(lambda: read_config(folder))
    assert error.startswith(f"{folder / name}: {key}: ")
    assert message in error


def test_talker_and_speech_tokenizer_must_have_as_many_codebooks(folder: Path) -> None:
    change(folder / CODEC, "decoder_config.num_quantizers", 8)
    error = error_of(lambda: read_config(folder))
    assert error == (f"{folder / CONFIG}: talker_config.num_code_groups: 16, but the speech tokenizer has 8 codebooks")


def test_generation_settings_that_are_left_out_are_the_official_packages(folder: Path) -> None:
    (folder / GENERATION).write_text("{}")
    generation = read_config(folder).generation
    assert generation.talker == generation.predictor == Sampling(temperature=0.9, top_k=50, top_p=1.0)
    assert (generation.repetition_penalty, generation.max_frames) == (1.05, 2048)


def test_a_checkpoint_may_take_the_likeliest_codes_of_one_kind(folder: Path) -> None:
    change(folder / GENERATION, "subtalker_dosample", False)
    generation = read_config(folder).generation
    assert (generation.talker.temperature, generation.predictor.temperature) == (0.9, 0.0)
    change(folder / GENERATION, "do_sample", False)
    assert read_config(folder).generation.talker.temperature == 0.0


def test_speakers_are_known_in_lower_case(folder: Path) -> None:
    change(folder / CONFIG, "talker_config.spk_id", {"Eric": 2875})
    change(folder / CONFIG, "talker_config.spk_is_dialect", {"Eric": "sichuan_dialect"})
    talker = read_config(folder).talker
    assert talker.speakers == {"eric": 2875}
    assert talker.dialects == {"eric": "sichuan_dialect"}


# --- Weights that do not go with the configuration ---


@pytest.fixture
def whole(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy to break, weights included."""
    shutil.copytree(checkpoint_of("custom_voice"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(folder: Path) -> Qwen3TtsProgram:
    return Qwen3TtsProgram.load(folder, Qwen3TtsOptions(positions=128), {}, 1)


@pytest.mark.parametrize("name", ["model.safetensors", "speech_tokenizer/model.safetensors"])
def test_weights_that_are_missing_or_cut_off_are_named(whole: Path, name: str) -> None:
    path = whole / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert error_of(lambda: load(whole)).startswith(f"{path}: cannot be read as safetensors: ")
    path.write_bytes(b"")
    assert error_of(lambda: load(whole)).startswith(f"{path}: cannot be read as safetensors: ")
    path.unlink()
    assert error_of(lambda: load(whole)) == f"{path}: missing; the checkpoint is incomplete, download it again"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.safetensors", "talker.codec_head.weight"),
        ("model.safetensors", "talker.model.layers.1.self_attn.q_norm.weight"),
        ("model.safetensors", "talker.code_predictor.lm_head.14.weight"),
        ("model.safetensors", "talker.code_predictor.small_to_mtp_projection.bias"),
        ("speech_tokenizer/model.safetensors", "decoder.pre_transformer.norm.weight"),
        ("speech_tokenizer/model.safetensors", "decoder.decoder.0.conv.bias"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(whole: Path, name: str, tensor: str) -> None:
    path = whole / name
    tensors = load_file(path)
    right = tensors.pop(tensor)
    save_file(tensors, path)
    assert error_of(lambda: load(whole)) == f"{path}: tensor {tensor} is missing"
    tensors[tensor] = torch.cat((right, right))
    save_file(tensors, path)
    error = error_of(lambda: load(whole))
    assert error.startswith(f"{path}: tensor {tensor} has shape {list(tensors[tensor].shape)}, expected ")
    assert error.endswith(str(list(right.shape)))


def test_a_configuration_of_other_dimensions_than_the_weights_is_found(whole: Path) -> None:
    change(whole / CONFIG, "talker_config.intermediate_size", 100)
    assert "mlp.gate_proj.weight has shape [128, 64], expected [100, 64]" in error_of(lambda: load(whole))


def test_weights_of_either_precision_load_and_speak_alike(whole: Path) -> None:
    """The published talkers are in bfloat16; widened to float32 nothing changes."""
    path = whole / "model.safetensors"
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    narrow = load(whole).talker.codes
    save_file({name: tensor.float() for name, tensor in tensors.items()}, path)
    assert torch.equal(load(whole).talker.codes, narrow)

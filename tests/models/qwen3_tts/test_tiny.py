"""The tiny checkpoint: the same bytes everywhere, and what readers of the published one expect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from pega_omni_plugin.cli import main
from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.tiny_config import VARIANTS
from tests.goldens import digests, manifest

CASES = manifest()["cases"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder a case of the golden outputs."""
    folders = {case: tmp_path_factory.mktemp(case) for case in CASES}
    for case, folder in folders.items():
        tiny.write(folder, variant=CASES[case]["variant"], narrow=CASES[case]["narrow"])
    return folders


@pytest.fixture(scope="module")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["custom_voice"]


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_that_the_golden_outputs_were_made_with(case: str, checkpoints: dict[str, Path]) -> None:
    """Byte for byte, in every environment: the other one was the official package's, with other versions of all."""
    assert digests(checkpoints[case]) == CASES[case]["files"]


def test_every_variant_has_golden_outputs_and_those_that_are_published_in_two_widths_in_both() -> None:
    assert {case["variant"] for case in CASES.values()} == set(VARIANTS)
    assert {case["variant"] for case in CASES.values() if case["narrow"]} == {"custom_voice", "base"}


def test_an_unknown_variant_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variant: 'large' is not known; use one of custom_voice, voice_design, base"):
        tiny.write(tmp_path / "tiny", variant="large")
    assert not (tmp_path / "tiny").exists()


def test_the_command_writes_the_variant_with_dashes_or_underscores(tmp_path: Path) -> None:
    for name in ("voice-design", "voice_design"):
        assert main(["make-tiny", "qwen3-tts", str(tmp_path / name), "--variant", name]) == 0
        assert digests(tmp_path / name) == CASES["voice_design"]["files"]
    assert main(["make-tiny", "qwen3-tts", str(tmp_path / "narrow"), "--narrow"]) == 0
    assert digests(tmp_path / "narrow") == CASES["custom_voice_narrow"]["files"]


def test_writing_does_not_import_the_serving_stack(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pega_omni_plugin.models.qwen3_tts import tiny; "
        f"tiny.write(Path({str(tmp_path)!r})); "
        "sys.exit(any(name.split('.')[0] in ('vllm', 'vllm_omni') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("case", CASES)
def test_there_is_a_projection_only_between_different_widths(case: str, checkpoints: dict[str, Path]) -> None:
    config = json.loads((checkpoints[case] / "config.json").read_text())
    talker, narrow = config["talker_config"], CASES[case]["narrow"]
    tensors = load_file(checkpoints[case] / "model.safetensors")
    assert (talker["hidden_size"] == talker["code_predictor_config"]["hidden_size"]) == narrow
    assert config["tts_model_size"] == ("0b6" if narrow else "1b7")
    assert ("talker.code_predictor.small_to_mtp_projection.weight" in tensors) == (not narrow)


@pytest.mark.parametrize("case", CASES)
def test_only_custom_voice_has_voices_and_only_base_a_speaker_encoder(case: str, checkpoints: dict[str, Path]) -> None:
    talker = json.loads((checkpoints[case] / "config.json").read_text())["talker_config"]
    variant = CASES[case]["variant"]
    assert bool(talker["spk_id"]) == bool(talker["spk_is_dialect"]) == (variant == "custom_voice")
    assert ("sichuan_dialect" in talker["codec_language_id"]) == (variant == "custom_voice")
    tensors = load_file(checkpoints[case] / "model.safetensors")
    assert any(name.startswith("speaker_encoder.") for name in tensors) == (variant == "base")
    if variant == "base":  # a cloned voice stands in the talker's prompt
        assert tensors["speaker_encoder.fc.weight"].shape[0] == talker["hidden_size"]


def test_prompt_pieces_are_single_tokens_and_text_survives(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    # Prompts are cut after three tokens and before the last five: role, line end, and their like at the end.
    prompt = tokenizer.encode("<|im_start|>assistant\nHi, wörld 你好<|im_end|>\n<|im_start|>assistant\n")
    start, end, role = (config[f"{name}_token_id"] for name in ("im_start", "im_end", "assistant"))
    line = tokenizer.encode("\n")[0]
    assert prompt[:3] == [start, role, line]
    assert prompt[-5:] == [end, line, start, role, line]
    assert tokenizer.decode(prompt[3:-5]) == "Hi, wörld 你好"
    assert len(tokenizer) == config["talker_config"]["text_vocab_size"]
    assert max(prompt) < len(tokenizer)


def test_every_configured_id_is_in_its_vocabulary(checkpoint: Path) -> None:
    talker = json.loads((checkpoint / "config.json").read_text())["talker_config"]
    ids = [value for key, value in talker.items() if key.startswith("codec_") and isinstance(value, int)]
    ids += [*talker["codec_language_id"].values(), *talker["spk_id"].values()]
    books = talker["code_predictor_config"]["vocab_size"]
    assert all(books <= number < talker["vocab_size"] for number in ids)
    assert set(talker["spk_is_dialect"]) == set(talker["spk_id"])
    assert set(talker["spk_is_dialect"].values()) - {False} <= set(talker["codec_language_id"])


def test_nothing_has_a_value_that_would_hide_a_mistake(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "speech_tokenizer/model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    constant = {name for name, tensor in tensors.items() if tensor.numel() > 1 and tensor.float().std() < 1e-3}
    assert constant == set()


def test_the_end_of_speech_depends_on_the_constant_channel_alone(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())["talker_config"]
    head = tensors["talker.codec_head.weight"]
    end = config["codec_eos_token_id"]
    assert head[end].nonzero().flatten().tolist() == [0]
    assert head[:, 0].nonzero().flatten().tolist() == [end]
    for layer in range(config["num_hidden_layers"]):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert not tensors[f"talker.model.layers.{layer}.{name}.weight"][0].any()
    assert tensors["talker.model.codec_embedding.weight"][:, 0].unique().numel() == 1

"""The tiny checkpoint: the same bytes everywhere, and what readers of the published one expect."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from pega_omni_plugin.models.qwen3_tts import tiny

DIGESTS = {
    "custom_voice": "5439a4509a02c5357f968f01971a68c6e52df23e70bcb02c6c7e07ab1dbc41b4",
    "base": "555e8649bd813cab6e80ab05c6b2756e13acef3ea1815f6fb8f6a50f3d6ed522",
}
"""Of all files: other environments have to come to these, too."""


def digest(folder: Path) -> str:
    whole = sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole.update(str(path.relative_to(folder)).encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write(folder)
    return folder


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_every_write_gives_the_same_bytes(variant: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / "one", variant=variant)
    tiny.write(tmp_path / "two", variant=variant)
    assert digest(tmp_path / "one") == digest(tmp_path / "two") == DIGESTS[variant]


def test_an_unknown_variant_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variant: 'large' is not known; use one of custom_voice, base"):
        tiny.write(tmp_path / "tiny", variant="large")
    assert not (tmp_path / "tiny").exists()


def test_writing_does_not_import_the_serving_stack(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pega_omni_plugin.models.qwen3_tts import tiny; "
        f"tiny.write(Path({str(tmp_path)!r})); "
        "sys.exit(any(name.split('.')[0] in ('vllm', 'vllm_omni') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


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

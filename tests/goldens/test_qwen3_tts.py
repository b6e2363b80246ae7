"""The recorded outputs belong to the tiny checkpoints and to the recipes beside them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.tiny_config import PREDICTOR, TALKER
from tests.goldens import COLUMN_STRIDE, FOLDER, codes, load, manifest, reference_audio, uniforms

MANIFEST = manifest()
CASES = MANIFEST["cases"]


def test_the_recipes_give_what_was_recorded() -> None:
    assert sha256(reference_audio().astype("<i2").tobytes()).hexdigest() == MANIFEST["reference_audio"]
    np.testing.assert_array_equal(load("codec")["random/codes"], codes(seed=1, frames=30))
    for case, described in CASES.items():
        arrays = load(case)
        for name, request in described["requests"].items():
            if request["record"] == "sampled":
                used = arrays[f"{name}/uniforms"]
                np.testing.assert_array_equal(used, uniforms(request["uniforms_seed"], len(used)))


@pytest.mark.parametrize("case", CASES)
def test_recorded_logits_are_the_heads_products_with_the_recorded_hidden_states(case: str, tmp_path: Path) -> None:
    tiny.write(tmp_path, variant=CASES[case]["variant"], narrow=CASES[case]["narrow"])
    tensors = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    heads = [tensors[f"talker.code_predictor.lm_head.{number}.weight"] for number in range(15)]
    arrays = {name: torch.from_numpy(array) for name, array in load(case).items()}
    greedy = [name for name, request in CASES[case]["requests"].items() if request["record"] == "greedy"]
    assert greedy
    for name in greedy:
        logits = arrays[f"{name}/hidden"] @ tensors["talker.codec_head.weight"].T
        columns = [*range(0, TALKER["vocab_size"], COLUMN_STRIDE), TALKER["codec_eos_token_id"]]
        torch.testing.assert_close(logits[:, columns], arrays[f"{name}/logits"], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits.logsumexp(1), arrays[f"{name}/logits_lse"], rtol=0, atol=1e-5)
        columns = range(0, PREDICTOR["vocab_size"], COLUMN_STRIDE)
        hidden = arrays[f"{name}/predictor_hidden"]  # [frames, 15, width]
        logits = torch.stack([hidden[:, number] @ head.T for number, head in enumerate(heads)], dim=1)
        torch.testing.assert_close(logits[:, :, columns], arrays[f"{name}/predictor_logits"], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits.logsumexp(2), arrays[f"{name}/predictor_lse"][:2], rtol=0, atol=1e-5)
        # Codebooks 1 to 15 are drawn without any processor.
        assert torch.equal(logits.argmax(2), arrays[f"{name}/codes"][:2, 1:].long())


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 400_000

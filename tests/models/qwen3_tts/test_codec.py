"""The code predictor: group by group as all at once, rows and frames know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pega_omni_plugin.models.qwen3_tts.codec import CodePredictor
from pega_omni_plugin.models.qwen3_tts.config import read_config
from pega_omni_plugin.nn.attention import prefill_attention
from pega_omni_plugin.nn.checkpoint import Weights
from pega_omni_plugin.nn.transformer import rotary_table

Tensor = torch.Tensor
ROWS, GROUPS, VOCAB = 5, 16, 2048
NEAR = {"rtol": 1e-4, "atol": 1e-4}
CASES = ("custom_voice", "custom_voice_narrow")
"""With a projection between talker and predictor, and without."""


def make(folder: Path, dtype: torch.dtype = torch.float32) -> CodePredictor:
    with torch.inference_mode():
        return CodePredictor(read_config(folder).talker, Weights(folder, dtype), ROWS)


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of(request.param)


@pytest.fixture(scope="module")
def predictor(folder: Path) -> CodePredictor:
    return make(folder)


def frame_codes(rows: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (rows, GROUPS)))


def hidden_states(predictor: CodePredictor, rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, predictor.config.stack.hidden, generator=torch.Generator().manual_seed(seed))


def run(predictor: CodePredictor, hidden: Tensor, codes: Tensor) -> Tensor:
    """Logits of all groups, ``[rows, groups - 1, vocab]``, while ``codes`` are drawn."""
    seen: list[Tensor] = []

    def draw(group: int, logits: Tensor) -> Tensor:
        assert group == len(seen) + 1
        seen.append(logits.clone())
        return codes[:, group]

    with torch.inference_mode():
        drawn = predictor.frame(hidden, codes[:, 0], draw)
    assert torch.equal(torch.stack(drawn, dim=1), codes)
    return torch.stack(seen, dim=1)


def at_once(predictor: CodePredictor, folder: Path, hidden: Tensor, codes: Tensor) -> Tensor:
    """The same for one row, ``[groups - 1, vocab]``: all positions in one pass, from the checkpoint's tensors."""
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    prefix = "talker.code_predictor"
    names = ["talker.model.codec_embedding.weight"]
    names += [f"{prefix}.model.codec_embedding.{group}.weight" for group in range(GROUPS - 2)]
    entering = [hidden, *(tensors[name][codes[group]] for group, name in enumerate(names))]
    x = torch.stack(entering)
    if f"{prefix}.small_to_mtp_projection.weight" in tensors:
        projection = tensors[f"{prefix}.small_to_mtp_projection.weight"]
        x = x @ projection.T + tensors[f"{prefix}.small_to_mtp_projection.bias"]
    dims = predictor.config.predictor

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return prefill_attention(query, key, value, [(0, GROUPS)], dims.head_dim**-0.5).flatten(1)

    table = rotary_table(dims, GROUPS, Weights(folder, torch.float32))
    with torch.inference_mode():
        states = predictor.stack.forward(x, torch.arange(GROUPS), table, attend)[1:]
    heads = [tensors[f"{prefix}.lm_head.{group}.weight"] for group in range(GROUPS - 1)]
    return torch.stack([state @ head.T for state, head in zip(states, heads, strict=True)])


def test_group_by_group_is_as_all_at_once(predictor: CodePredictor, folder: Path) -> None:
    """Row by row, each with its own past."""
    hidden, codes = hidden_states(predictor, ROWS), frame_codes(ROWS)
    found = run(predictor, hidden, codes)
    assert found.shape == (ROWS, GROUPS - 1, VOCAB)
    for row in range(ROWS):
        torch.testing.assert_close(found[row], at_once(predictor, folder, hidden[row], codes[row]), **NEAR)


def test_the_first_and_the_last_code_of_a_book_are_codes_like_others(predictor: CodePredictor, folder: Path) -> None:
    hidden = hidden_states(predictor, 2)
    codes = torch.tensor([[0] * GROUPS, [VOCAB - 1] * GROUPS])
    found = run(predictor, hidden, codes)
    for row in range(2):
        torch.testing.assert_close(found[row], at_once(predictor, folder, hidden[row], codes[row]), **NEAR)


def test_a_frame_has_nothing_of_the_one_before(predictor: CodePredictor, folder: Path) -> None:
    hidden, codes = hidden_states(predictor, 3), frame_codes(3)
    fresh = run(make(folder), hidden, codes)
    run(predictor, 100 * hidden_states(predictor, ROWS, 1), frame_codes(ROWS, 1))
    assert torch.equal(run(predictor, hidden, codes), fresh)


def test_rows_know_nothing_of_each_other(predictor: CodePredictor) -> None:
    hidden, codes = hidden_states(predictor, ROWS), frame_codes(ROWS)
    together = run(predictor, hidden, codes)
    order = [3, 0, 4]
    torch.testing.assert_close(run(predictor, hidden[order], codes[order]), together[order], **NEAR)
    other = hidden.clone()
    other[1:] = 5
    torch.testing.assert_close(run(predictor, other, codes)[0], together[0], **NEAR)


def test_each_code_changes_what_comes_after_it_and_nothing_before(predictor: CodePredictor) -> None:
    hidden, codes = hidden_states(predictor, 1), frame_codes(1)
    logits = run(predictor, hidden, codes)[0]
    for group in (0, 1, 2, 9, 14):
        changed = codes.clone()
        changed[0, group] = (changed[0, group] + 1) % VOCAB
        found = run(predictor, hidden, changed)[0]
        assert torch.equal(found[:group], logits[:group])
        assert ((found[group:] - logits[group:]).abs().amax(dim=1) > 1e-3).all()


def test_bfloat16_is_near(predictor: CodePredictor, folder: Path) -> None:
    narrow = make(folder, torch.bfloat16)
    hidden, codes = hidden_states(predictor, ROWS), frame_codes(ROWS)
    found = run(narrow, hidden.bfloat16(), codes)
    expected = run(predictor, hidden, codes)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.05 * expected.norm()

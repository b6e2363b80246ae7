"""The talker: whole prompts and single steps agree, slots know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pega_omni_plugin.models.qwen3_tts.config import read_config
from pega_omni_plugin.models.qwen3_tts.prompt import NO_CODE, REFERENCE, SPEAKER, TalkerPrompt
from pega_omni_plugin.models.qwen3_tts.thinker import Talker
from pega_omni_plugin.nn.attention import DecodeRows
from pega_omni_plugin.nn.checkpoint import Weights

Tensor = torch.Tensor
SLOTS, POSITIONS = 4, 64
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("base")


@pytest.fixture(scope="module")
def talker(folder: Path) -> Talker:
    with torch.inference_mode():
        return Talker(read_config(folder).talker, Weights(folder, torch.float32), SLOTS, POSITIONS)


def inputs(length: int, seed: int = 0) -> Tensor:
    """What enters at so many positions, ``[length, hidden]``."""
    return torch.randn(length, 64, generator=torch.Generator().manual_seed(seed))


def step(talker: Talker, x: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
    rows = DecodeRows.prepare(slots, [position + 1 for position in positions], "cpu")
    with torch.inference_mode():
        return talker.step(x, torch.tensor(positions), rows)


def prefill(talker: Talker, embedded: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return talker.prefill(embedded, slots)


def test_steps_after_a_prompt_are_as_a_longer_prompt(talker: Talker) -> None:
    x = inputs(20)
    states = [prefill(talker, [x[:15]], [1])]
    states += [step(talker, x[place : place + 1].clone(), [1], [place]) for place in range(15, 20)]
    for length, state in zip(range(15, 21), states, strict=True):
        torch.testing.assert_close(state, prefill(talker, [x[:length]], [2]), **NEAR)


def test_prompts_that_are_prefilled_together_are_as_alone(talker: Talker) -> None:
    prompts = [inputs(length, seed) for seed, length in enumerate((9, 1, 30))]
    together = prefill(talker, prompts, [3, 1, 4])
    steps = step(talker, inputs(3, 9), [3, 1, 4], [9, 1, 30])
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(prefill(talker, [prompt], [2])[0], together[row], **NEAR)
        after = step(talker, inputs(3, 9)[row : row + 1], [2], [len(prompt)])
        torch.testing.assert_close(after[0], steps[row], **NEAR)


def test_what_a_prompt_is_made_of_is_left_as_it_is(talker: Talker) -> None:
    x = inputs(5)
    before = x.clone()
    prefill(talker, [x], [1])
    assert torch.equal(x, before)


def test_a_slot_has_nothing_of_what_it_held(talker: Talker) -> None:
    fresh = prefill(talker, [inputs(10)], [1]), step(talker, inputs(1, 7), [1], [10])
    prefill(talker, [inputs(60, 3)], [1])
    again = prefill(talker, [inputs(10)], [1]), step(talker, inputs(1, 7), [1], [10])
    for one, other in zip(fresh, again, strict=True):
        assert torch.equal(one, other)


def test_rows_of_padding_touch_no_slot(talker: Talker) -> None:
    prefill(talker, [inputs(8, 1), inputs(12, 2)], [1, 2])
    expected = step(talker, inputs(2, 5), [1, 2], [8, 12])
    padded = torch.cat((inputs(2, 5), inputs(2, 6)))
    found = step(talker, padded, [1, 2, 0, 0], [8, 12, 0, 0])
    torch.testing.assert_close(found[:2], expected, **NEAR)
    assert found.isfinite().all()
    torch.testing.assert_close(step(talker, inputs(2, 5), [1, 2], [8, 12]), expected, **NEAR)


def test_the_last_position_of_a_slot_can_be_filled(talker: Talker) -> None:
    x = inputs(POSITIONS)
    prefill(talker, [x[:-1]], [SLOTS])
    last = step(talker, x[-1:], [SLOTS], [POSITIONS - 1])
    torch.testing.assert_close(last, prefill(talker, [x], [1]), **NEAR)


def test_logits_are_those_of_codes_and_the_end(talker: Talker, folder: Path) -> None:
    head = load_file(folder / "model.safetensors")["talker.codec_head.weight"].float()
    hidden = inputs(3)
    whole = hidden @ head.T
    logits = talker.logits(hidden)
    assert (talker.allowed, logits.shape, logits.dtype) == (2048, (3, 2049), torch.float32)
    torch.testing.assert_close(logits[:, :2048], whole[:, :2048], **NEAR)
    torch.testing.assert_close(logits[:, 2048], whole[:, 2150], **NEAR)


def tables(folder: Path) -> list[Tensor]:
    """The codebooks' embeddings, group 0 first."""
    tensors = load_file(folder / "model.safetensors")
    rest = [tensors[f"talker.code_predictor.model.codec_embedding.{group}.weight"] for group in range(15)]
    return [table.float() for table in (tensors["talker.model.codec_embedding.weight"], *rest)]


def test_a_frame_enters_as_the_sum_of_its_codes(talker: Talker, folder: Path) -> None:
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 2048, (5, 16)))
    codes[0] = 0
    codes[1] = 2047
    expected = sum(table[codes[:, group]] for group, table in enumerate(tables(folder)))
    torch.testing.assert_close(talker.embed_codes(codes), expected, **NEAR)


def test_every_place_of_a_prompt_is_the_sum_of_its_tracks(talker: Talker, folder: Path) -> None:
    reference = np.random.default_rng(1).integers(0, 2048, (2, 16)).astype(np.int16)
    speaker = np.linspace(-1, 1, 64, dtype=np.float32)
    prompt = TalkerPrompt(
        text=[5, 6, 7, 8, 9, 10],
        codec=[NO_CODE, 2149, SPEAKER, REFERENCE, 0, REFERENCE],
        frames=1,
        speaker=speaker,
        reference=reference,
    )
    with torch.inference_mode():
        text = talker.embed_text(torch.tensor(prompt.text))
        added = talker.embed_prompt(prompt) - text
        frames = talker.embed_codes(torch.from_numpy(reference).long())
    table = tables(folder)[0]
    expected = torch.stack((torch.zeros(64), table[2149], torch.from_numpy(speaker), frames[0], table[0], frames[1]))
    torch.testing.assert_close(added, expected, **NEAR)

"""The layers against transformers' Qwen3, and against themselves step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3Model

from pega_omni_plugin.nn.attention import prefill_attention
from pega_omni_plugin.nn.checkpoint import CheckpointError, Weights
from pega_omni_plugin.nn.transformer import Stack, StackDims, rotary_table

Tensor = torch.Tensor
DIMS = StackDims(hidden=48, intermediate=80, layers=3, heads=4, kv_heads=2, head_dim=16, eps=1e-6, rope_theta=10_000.0)
POSITIONS = 40


@pytest.fixture(scope="module")
def reference() -> Qwen3Model:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=DIMS.hidden,
        intermediate_size=DIMS.intermediate,
        num_hidden_layers=DIMS.layers,
        num_attention_heads=DIMS.heads,
        num_key_value_heads=DIMS.kv_heads,
        head_dim=DIMS.head_dim,
        rms_norm_eps=DIMS.eps,
        rope_parameters={"rope_type": "default", "rope_theta": DIMS.rope_theta},
        attn_implementation="eager",
    )
    model = Qwen3Model(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms: their initial ones would hide a missing product
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def folder(reference: Qwen3Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stack")
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def stack(folder: Path) -> Stack:
    return Stack(DIMS, Weights(folder, torch.float32), "model")


@pytest.fixture(scope="module")
def table(folder: Path) -> Tensor:
    return rotary_table(DIMS, POSITIONS, Weights(folder, torch.float32))


def whole(stack: Stack, x: Tensor, table: Tensor, first: int = 0) -> Tensor:
    """All positions at once, each seeing those before it."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query.shape[1:] == (DIMS.heads, DIMS.head_dim)
        assert key.shape[1:] == value.shape[1:] == (DIMS.kv_heads, DIMS.head_dim)
        return prefill_attention(query, key, value, [(0, len(x))], DIMS.head_dim**-0.5).flatten(1)

    return stack.forward(x.clone(), torch.arange(first, first + len(x)), table, attend)


def inputs(rows: int = 20, seed: int = 1) -> Tensor:
    return torch.randn(rows, DIMS.hidden, generator=torch.Generator().manual_seed(seed))


def test_the_layers_are_those_of_qwen3(reference: Qwen3Model, stack: Stack, table: Tensor) -> None:
    x = inputs()
    with torch.no_grad():
        expected = reference(inputs_embeds=x[None]).last_hidden_state[0]
    torch.testing.assert_close(whole(stack, x, table), expected, rtol=1e-4, atol=1e-5)


def test_positions_matter_only_in_relation(stack: Stack, table: Tensor) -> None:
    """Rotary embedding: what is looked up in the table, and nothing else, says where a row stands."""
    x = inputs()
    torch.testing.assert_close(whole(stack, x, table, first=15), whole(stack, x, table), rtol=1e-3, atol=1e-4)
    stretched = table[torch.arange(0, POSITIONS, 2)]
    assert (whole(stack, x, stretched) - whole(stack, x, table)).abs().max() > 0.05


def test_step_by_step_is_as_all_at_once(stack: Stack, table: Tensor) -> None:
    """What is kept of the past is the caller's: here, all keys and values of each layer."""
    x = inputs()
    past: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(DIMS.layers)]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = past[layer]
        keys.append(key)
        values.append(value)
        seen = (torch.cat(kept).repeat_interleave(DIMS.heads // DIMS.kv_heads, dim=1) for kept in (keys, values))
        all_keys, all_values = seen
        scores = torch.einsum("hd,nhd->hn", query[0], all_keys) * DIMS.head_dim**-0.5
        return torch.einsum("hn,nhd->hd", scores.softmax(1), all_values).reshape(1, -1)

    rows = [stack.forward(x[n : n + 1].clone(), torch.tensor([n]), table, attend) for n in range(len(x))]
    torch.testing.assert_close(torch.cat(rows), whole(stack, x, table), rtol=1e-4, atol=1e-5)


def test_rows_at_the_same_position_know_nothing_of_each_other(stack: Stack, table: Tensor) -> None:
    def alone(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.repeat_interleave(DIMS.heads // DIMS.kv_heads, dim=1).flatten(1)

    x = inputs(5)
    together = stack.forward(x.clone(), torch.full((5,), 7), table, alone)
    for row in range(5):
        one = stack.forward(x[row : row + 1].clone(), torch.tensor([7]), table, alone)
        torch.testing.assert_close(one[0], together[row], rtol=1e-4, atol=1e-5)


def test_bfloat16_is_near(folder: Path, stack: Stack, table: Tensor) -> None:
    weights = Weights(folder, torch.bfloat16)
    narrow = Stack(DIMS, weights, "model")
    x = inputs(8)
    found = whole(narrow, x.bfloat16(), rotary_table(DIMS, POSITIONS, weights))
    assert found.dtype == torch.bfloat16
    expected = whole(stack, x, table)
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


def test_the_table_has_cosines_and_then_sines(table: Tensor) -> None:
    assert table.shape == (POSITIONS, DIMS.head_dim)
    for position in (0, 1, 39):
        for pair in (0, 3, 7):
            angle = torch.tensor(position / DIMS.rope_theta ** (2 * pair / DIMS.head_dim), dtype=torch.float64)
            assert abs(table[position, pair] - angle.cos()) < 1e-5
            assert abs(table[position, pair + DIMS.head_dim // 2] - angle.sin()) < 1e-5


def test_a_layer_that_is_missing_is_named(folder: Path) -> None:
    deeper = StackDims(48, 80, 4, 4, 2, 16, 1e-6, 10_000.0)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.3\..* is missing"):
        Stack(deeper, Weights(folder, torch.float32), "model")

"""Tensors by name and shape, from one file or from several, and what is said when one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pega_omni_plugin.nn.checkpoint import CheckpointError, Weights, read_json

MATRIX = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7
VECTOR = torch.arange(4, dtype=torch.bfloat16)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file({"matrix": MATRIX, "vector": VECTOR, "ids": torch.arange(3)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"matrix": MATRIX}, tmp_path / "a.safetensors")
    save_file({"vector": VECTOR}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"matrix": "a.safetensors", "vector": "b.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("kind", ["single", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_come_in_the_dtype_that_was_asked(
    request: pytest.FixtureRequest, kind: str, dtype: torch.dtype
) -> None:
    weights = Weights(request.getfixturevalue(kind), dtype)
    for name, stored in (("matrix", MATRIX), ("vector", VECTOR)):
        tensor = weights.take(name, *stored.shape)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, stored.to(dtype))
        assert name in weights
    assert "other" not in weights


def test_an_index_goes_before_a_file(sharded: Path) -> None:
    save_file({"matrix": MATRIX + 1}, sharded / "model.safetensors")
    assert torch.equal(Weights(sharded, torch.float32).take("matrix", 2, 3), MATRIX)


def error_of(folder: Path, name: str, *shape: int) -> str:
    with pytest.raises(CheckpointError) as raised:
        Weights(folder, torch.float32).take(name, *shape)
    return str(raised.value)


def test_a_tensor_that_is_not_there_is_named_with_the_file_that_should_have_it(single: Path) -> None:
    assert error_of(single, "bias", 3) == f"{single / 'model.safetensors'}: tensor bias is missing"


def test_so_it_is_in_an_index(sharded: Path) -> None:
    assert error_of(sharded, "bias", 3) == f"{sharded / 'model.safetensors.index.json'}: tensor bias is missing"


@pytest.mark.parametrize("shape", [(3, 2), (2,), (2, 3, 1), ()])
def test_another_shape_is_named_beside_the_right_one(single: Path, shape: tuple[int, ...]) -> None:
    wanted = f"tensor matrix has shape [2, 3], expected {list(shape)}"
    assert error_of(single, "matrix", *shape) == f"{single / 'model.safetensors'}: {wanted}"


def test_integers_are_no_weights(single: Path) -> None:
    assert "tensor ids has dtype torch.int64, expected floating point numbers" in error_of(single, "ids", 3)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing; the checkpoint is incomplete"):
        Weights(tmp_path, torch.float32)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_ends_early_cannot_be_read(single: Path, part: float) -> None:
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors") as raised:
        Weights(single, torch.float32)
    assert str(path) in str(raised.value)


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    weights = Weights(sharded, torch.float32)
    assert torch.equal(weights.take("matrix", 2, 3), MATRIX)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: missing"):
        weights.take("vector", 4)


def test_a_shard_without_the_tensor_that_the_index_says_is_named(sharded: Path) -> None:
    write_index(sharded, {"matrix": "b.safetensors"})
    assert error_of(sharded, "matrix", 2, 3).startswith(f"{sharded / 'b.safetensors'}: tensor matrix cannot be read")


@pytest.mark.parametrize("weight_map", [None, [], {"matrix": 1}, {"matrix": None}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: expected an object of file names"):
        Weights(tmp_path, torch.float32)


def test_json_comes_as_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"ä": 1}', encoding="utf-8")
    assert read_json(path) == {"ä": 1}
    for content, message in (("3", "expected a JSON object, got int"), ("{]", "cannot be read as JSON")):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            read_json(path)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_json(tmp_path)

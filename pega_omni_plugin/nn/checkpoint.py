"""Reading weights: every tensor is asked for by name and shape, and what is wrong is said by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class CheckpointError(ValueError):
    """A checkpoint's file is missing, cannot be read, or does not fit; the message names the file and the field."""


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from ``path``.

    Raises:
        CheckpointError: it is missing, or no JSON object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete, download it again") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(document).__name__}")
    return document


class Weights:
    """The tensors of ``folder/model.safetensors``, or of the shards that its index names.

    ``take`` reads one tensor at a time, so that a large checkpoint is never held twice.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._index = folder / "model.safetensors.index.json"
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        self._source = folder / "model.safetensors"
        if self._index.is_file():
            self._source = self._index
            shards = read_json(self._index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                raise CheckpointError(f"{self._index}: weight_map: expected an object of file names")
            self._where = {name: folder / shard for name, shard in shards.items()}
        else:
            self._where = dict.fromkeys(self._open(self._source).keys(), self._source)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor ``name`` in this reader's dtype and device.

        Raises:
            CheckpointError: there is none, or its shape is not ``shape``.
        """
        path = self._where.get(name)
        if path is None:
            raise CheckpointError(f"{self._source}: tensor {name} is missing")
        from safetensors import SafetensorError

        try:
            tensor: torch.Tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{path}: tensor {name} has dtype {tensor.dtype}, expected floating point numbers")
        return tensor.to(device=self.device, dtype=self.dtype)

    def _open(self, path: Path) -> Any:
        # Here, so that a machine without it can run and measure models with random weights.
        from safetensors import SafetensorError, safe_open

        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path}: missing; the checkpoint is incomplete, download it again") from error
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
        return self._files[path]

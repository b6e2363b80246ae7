"""The part of ``pega-omni doctor`` that looks at a model: its files, and its stage file."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from pathlib import Path

from pega_omni_plugin.doctor import Check, Gpu


def check_model(model: str) -> Generator[Check, None, int]:
    """Look at a model as the launch script takes it: a program's name, a checkpoint directory or a hub name.

    Returns the size of its weights in bytes, 0 where it has none or they are not here yet.
    """
    from pega_omni_plugin.registration import PIPELINES, program_directory

    if program_directory(model) is not None:
        yield Check("model", "ok", f"{model} is part of the package")
        return 0
    folder = Path(model).expanduser()
    if folder.is_dir():
        return (yield from _check_checkpoint(folder))
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        names = ", ".join(sorted(name for name in PIPELINES.values() if program_directory(name) is not None))
        fix = f"name a checkpoint directory, a model on the hub as owner/name, or one of: {names}"
        yield Check("model", "fail", f"{model}: no such directory", fix)
        return 0
    return (yield from _check_hub(model))


def packaged_stage_file(model: str | None) -> str | None:
    """The name of the stage file that a model starts with: a program of the package, or a checkpoint in a directory."""
    from pega_omni_plugin.registration import program_directory, program_of

    if model is None or program_directory(model) is not None:
        return model
    return program_of(Path(model).expanduser())


def check_stage(name: str, gpus: Sequence[Gpu]) -> Check:
    """A stage file: every key in it, and whether the devices of the program's parts are there."""
    from pega_omni_plugin.engine.config import ConfigError, find_stage_file, is_program_file, load_stage_file

    try:
        path = find_stage_file(name)
        if not is_program_file(path):
            return Check("stage", "note", f"{path.name} is for a pipeline of vLLM-Omni, which checks it at the start")
        config = load_stage_file(path)
    except ConfigError as error:
        return Check("stage", "fail", str(error), "correct the stage file")
    for part, settings in config.parts.items():
        _, _, index = settings.device.partition("cuda:")
        if settings.device.startswith("cuda") and int(index or 0) >= len(gpus):
            text = f"{path.name}: parts.{part}.device is {settings.device}, and {len(gpus)} GPUs are found"
            return Check("stage", "fail", text, "name a device that is there, or cpu")
    parts = [f"{name} on {part.device} in {part.dtype}" for name, part in config.parts.items()]
    text = f"{path.name}: {config.slots} slots, queue of {config.queue}, profile {config.profile}"
    return Check("stage", "ok", "; ".join([text, *parts]))


def _check_hub(name: str) -> Generator[Check, None, int]:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return (yield from _check_checkpoint(Path(found).parent))
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}:
        fix = f"unset HF_HUB_OFFLINE, or run `hf download {name}` where there is a network"
        yield Check("model", "fail", f"{name} is not in the hub cache and HF_HUB_OFFLINE is set", fix)
    else:
        yield Check("model", "note", f"{name} is not in the hub cache; the first start downloads it")
    return 0


def _check_checkpoint(folder: Path) -> Generator[Check, None, int]:
    """``config.json``, and every weight file that is there or that an index names; opens each, reads its header."""
    failures = []
    if problem := _config_problem(folder / "config.json"):
        failures.append(problem)
    files = set(folder.rglob("*.safetensors"))
    for index in folder.rglob("*.safetensors.index.json"):
        try:
            files |= {index.parent / name for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            failures.append(Check("model", "fail", f"{index} is no index of weights: {error!r}", _again(folder)))
    if not files:
        failures.append(Check("model", "fail", f"{folder}: no .safetensors files", _again(folder)))
    for file in sorted(files):
        if problem := _weights_problem(file, folder):
            failures.append(problem)
    yield from failures
    size = sum(file.stat().st_size for file in files if file.is_file())
    if not failures:
        yield Check("model", "ok", f"{folder}: config.json, {len(files)} weight files, {size / 1e9:.2f} GB")
    return size


def _config_problem(file: Path) -> Check | None:
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        return Check("model", "fail", f"{file} is missing", _again(file.parent))
    except ValueError as error:
        return Check("model", "fail", f"{file} is not JSON: {error}", _again(file.parent))
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return Check("model", "fail", f"{file} names no model_type", "name the directory of a supported checkpoint")
    return None


def _weights_problem(file: Path, folder: Path) -> Check | None:
    from safetensors import SafetensorError, safe_open

    try:
        with file.open("rb") as opened:
            if opened.read(20).startswith(b"version https://git"):
                return Check(
                    "model", "fail", f"{file} is a Git LFS pointer, not the weights", f"git -C {folder} lfs pull"
                )
        with safe_open(file, framework="numpy"):
            return None
    except FileNotFoundError:
        return Check("model", "fail", f"{file} is missing", _again(folder))
    except SafetensorError as error:
        return Check("model", "fail", f"{file} is damaged or cut short: {error}", _again(folder))


def _again(folder: Path) -> str:
    return f"fetch the checkpoint again: hf download OWNER/NAME --local-dir {folder}"

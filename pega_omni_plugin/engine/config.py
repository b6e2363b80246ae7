"""Stage files: what an engine is told about the program it runs, checked strictly.

A stage file is a vLLM-Omni deploy YAML. What is ours stands under ``additional_config`` of its stage and is checked
here, key by key, before a process is started and once more inside the engine.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pega_omni_plugin.engine.program import Front, Part, PartConfig, Program, ProgramInfo

PROGRAMS: Mapping[str, str] = {
    "sim": "pega_omni_plugin.models.sim.program:SimProgram",
    "piper": "pega_omni_plugin.models.piper.program:PiperProgram",
    "qwen3_tts": "pega_omni_plugin.models.qwen3_tts.program:Qwen3TtsProgram",
}
"""Program names that a stage file may use, and where each is."""

STAGE_CONFIGS = Path(__file__).parents[1] / "stage_configs"
"""The packaged stage files."""

_DEPLOY_KEYS = {
    "base_config",
    "pipeline",
    "async_chunk",
    "model_runner",
    "trust_remote_code",
    "dtype",
    "stages",
    "platforms",
}
_STAGE_KEYS = {
    "stage_id",
    "worker_cls",
    "devices",
    "env",
    "dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "enable_prefix_caching",
    "async_scheduling",
    "skip_tokenizer_init",
    "kv_cache_memory_bytes",
    "distributed_executor_backend",
    "default_sampling_params",
    "additional_config",
}


class ConfigError(ValueError):
    """A stage file is wrong; the message names the file or section, the key and what is allowed."""


class ChunkProfile(BaseModel):
    """Frames in the first message of a stream, and in a steady one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first: Annotated[int, Field(ge=1)]
    steady: Annotated[int, Field(ge=1)]


PROFILES: Mapping[str, ChunkProfile] = {
    "ttfa": ChunkProfile(first=1, steady=8),
    "balanced": ChunkProfile(first=2, steady=8),
    "throughput": ChunkProfile(first=4, steady=16),
}


class EngineConfig(BaseModel):
    """Our part of a stage file.

    ``queue`` bounds the requests that wait while all ``slots`` are taken. ``prompt_budget`` bounds the prompt units
    (characters or tokens, as the program counts) admitted in one step, so that admissions never stall running streams.
    ``stall_seconds`` without any audio, or ``request_seconds`` in all, ends a request with an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    program: Literal["sim", "piper", "qwen3_tts"]
    profile: Literal["ttfa", "balanced", "throughput"] = "balanced"
    chunks: ChunkProfile | None = None
    slots: Annotated[int, Field(ge=1, le=4096)] = 64
    queue: Annotated[int, Field(ge=0)] = 256
    prompt_budget: Annotated[int, Field(ge=1)] = 8192
    stall_seconds: Annotated[float, Field(gt=0)] = 60.0
    request_seconds: Annotated[float, Field(gt=0)] = 1800.0
    parts: Mapping[Part, PartConfig] = Field(default_factory=dict)
    options: Mapping[str, Any] = Field(default_factory=dict)

    @property
    def chunk_profile(self) -> ChunkProfile:
        """The named profile, unless the file spells its own chunks out."""
        return self.chunks or PROFILES[self.profile]


_NESTED_KEYS: Mapping[int | str, Collection[str]] = {
    "chunks": ChunkProfile.model_fields,
    "parts": [field.name for field in dataclasses.fields(PartConfig)],
}


def parse_engine(section: Mapping[str, Any], where: str) -> EngineConfig:
    """Check our part of a stage, the program's own options included.

    Raises:
        ConfigError: naming ``where`` and each wrong key.
    """
    try:
        config = EngineConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_reasons(error, EngineConfig.model_fields)}") from error
    parse_options(config, f"{where}.options")
    return config


def program_class(name: str) -> type[Program]:
    """Import the program that a stage file names."""
    module, _, attribute = PROGRAMS[name].partition(":")
    loaded: type[Program] = getattr(importlib.import_module(module), attribute)
    return loaded


def parse_options(config: EngineConfig, where: str = "options") -> Any:
    """Build the program's options dataclass from the stage file.

    Raises:
        ConfigError: naming ``where`` and each wrong key.
    """
    kind = program_class(config.program).Options
    _known(config.options, {field.name for field in dataclasses.fields(kind)}, where)
    try:
        return TypeAdapter(kind).validate_python(dict(config.options))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_reasons(error, ())}") from error


def make_front(description: Mapping[str, Any], info: ProgramInfo) -> Front:
    """The front of the program that an engine described (``ProgramWorker.describe``)."""
    config = EngineConfig(program=description["program"], options=description["options"])
    front: Front = program_class(config.program).front(Path(description["checkpoint"]), parse_options(config), info)
    return front


def load_stage_file(path: Path) -> EngineConfig:
    """Read a stage file and check every key in it, base files included.

    Raises:
        ConfigError: naming the file, the key and what is allowed there.
    """
    document = _read(path)
    stages = document["stages"]
    if len(stages) != 1:
        raise ConfigError(f"{path}: stages: a program runs in one stage, found {len(stages)}")
    if document.get("model_runner", "v1") != "v1":
        raise ConfigError(f"{path}: model_runner: programs run under v1, got {document['model_runner']!r}")
    return parse_engine(stages[0].get("additional_config") or {}, f"{path}: stages[0].additional_config")


def is_program_file(path: Path) -> bool:
    """Whether a deploy YAML selects one of our pipelines (others are vLLM-Omni's to check)."""
    seen: set[Path] = set()
    document = _load(path)
    while isinstance(document, dict) and "pipeline" not in document and isinstance(document.get("base_config"), str):
        seen.add(path.resolve())
        path = path.parent / document["base_config"]
        if path.resolve() in seen:
            raise ConfigError(f"{path}: base_config leads back to this file")
        document = _load(path)
    return isinstance(document, dict) and str(document.get("pipeline", "")).startswith("pega_")


def find_stage_file(name: str) -> Path:
    """A path as it is, or the file of that name among the packaged stage files.

    Raises:
        ConfigError: when neither exists; lists the names that do.
    """
    path = Path(name)
    if path.is_file():
        return path.resolve()
    packaged = STAGE_CONFIGS / (name if name.endswith(".yaml") else f"{name}.yaml")
    if path.name == name and packaged.is_file():
        return packaged
    known = ", ".join(sorted(entry.stem for entry in STAGE_CONFIGS.glob("*.yaml") if not entry.stem.startswith("_")))
    raise ConfigError(f"stage file {name!r}: no such file, and no packaged one of that name (there are: {known})")


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file at ``path``, which those in ``above`` name as their base, on top of its own base."""
    if path in above:
        raise ConfigError(f"{path}: base_config leads back to this file")
    document = _load(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(document).__name__}")
    _known(document, _DEPLOY_KEYS, str(path))
    stages = document.get("stages", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigError(f"{path}: stages: expected a list of mappings")
    for index, stage in enumerate(stages):
        _known(stage, _STAGE_KEYS, f"{path}: stages[{index}]")
        if not isinstance(stage.get("stage_id"), int):
            raise ConfigError(f"{path}: stages[{index}].stage_id: expected a number, got {stage.get('stage_id')!r}")
    base = document.pop("base_config", None)
    if base is None:
        return document | {"stages": stages}
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base_config: expected the name of a file, got {base!r}")
    below = _read((path.parent / base).resolve(), (*above, path.resolve()))
    merged = {stage["stage_id"]: stage for stage in below["stages"]}
    for stage in stages:
        merged[stage["stage_id"]] = merged.get(stage["stage_id"], {}) | stage
    return below | document | {"stages": list(merged.values())}


def _known(section: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    for key in section:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key!r}; known: {', '.join(sorted(keys))}")


def _reasons(error: ValidationError, fields: Collection[str]) -> str:
    parts = []
    for item in error.errors():
        key = ".".join(str(step) for step in item["loc"]) or "value"
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = _NESTED_KEYS.get(item["loc"][0], fields) if len(item["loc"]) > 1 else fields
            parts.append(f"unknown key {key!r}; known: {', '.join(sorted(known))}")
        else:
            parts.append(f"{key}: {item['msg']} (got {item['input']!r})")
    return "; ".join(parts)

"""What vLLM and vLLM-Omni are told about us: architectures, pipelines, stage files, configuration classes, routes.

``register`` is called by both plugin groups in every process that vLLM starts, plain ``vllm serve`` included, so it is
idempotent and imports nothing heavy that the process has not imported already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm_omni.config.stage_config import PipelineConfig

ARCHITECTURE = "PegaProgram"
"""The architecture name that our pipelines carry; it resolves to a class that only carries the name."""

PIPELINES = {"pega_sim": "sim", "pega_piper": "piper", "pega_qwen3_tts": "qwen3_tts"}
"""Our pipelines (which are also the ``model_type`` of programs without weights) and the program of each."""

TAKEN_OVER = {"qwen3_tts": "pega_qwen3_tts"}
"""``model_type`` of checkpoints that vLLM-Omni has a pipeline of its own for, and ours, which takes its place.

``PEGA_TAKE_OVER=0`` leaves vLLM-Omni's in place, and so does a stage file that is not one of ours."""

TAKE_OVER = "PEGA_TAKE_OVER"

_MODELS = Path(__file__).parent / "models"

_done = False
_take_over = True


def register() -> None:
    """Register everything, once a process."""
    global _done
    if _done:
        return
    _done = True
    _check_command_line()
    _register_configs()
    _register_pipelines()
    if _serves_http():
        from pega_omni_plugin.api.vllm_routes import install

        install()


def program_directory(name: str) -> Path | None:
    """The model directory of a program without weights (``sim``, ``piper``), or ``None`` for any other name."""
    folder = _MODELS / name / "checkpoint"
    return folder if f"pega_{name}" in PIPELINES and folder.is_dir() else None


def program_of(checkpoint: Path) -> str | None:
    """The program that runs a checkpoint in a directory, by its ``model_type``; ``None`` if there is none."""
    try:
        model_type = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"]
        return PIPELINES.get(TAKEN_OVER.get(model_type, model_type))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def takes_over(deploy_config: Path | None = None) -> bool:
    """Whether our pipelines take the place of vLLM-Omni's, given the stage file that a server was started with."""
    if os.environ.get(TAKE_OVER) == "0":
        return False
    from pega_omni_plugin.engine.config import is_program_file

    # vLLM-Omni takes names of its own stage files, too, which are no files from here.
    return deploy_config is None or (deploy_config.is_file() and is_program_file(deploy_config))


def _register_configs() -> None:
    from transformers import AutoConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from pega_omni_plugin.engine.hf_config import CONFIGS

    for kind in CONFIGS:
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
        _CONFIG_REGISTRY[kind.model_type] = kind


def _register_pipelines() -> None:
    from vllm import ModelRegistry
    from vllm_omni.config import register_pipeline
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig
    from vllm_omni.model_executor.models import OmniModelRegistry

    from pega_omni_plugin.engine.architecture import PegaProgram
    from pega_omni_plugin.engine.config import STAGE_CONFIGS

    for registry in (ModelRegistry, OmniModelRegistry):
        # The class, not its path: vLLM inspects a path in a process of its own, which costs a start-up.
        registry.register_model(ARCHITECTURE, PegaProgram)
    for name, program in PIPELINES.items():
        stage = StagePipelineConfig(
            stage_id=0,
            model_stage=name,
            execution_type=StageExecutionType.LLM_AR,
            input_sources=(),
            owns_tokenizer=True,
            final_output=True,
            final_output_type="audio",
            engine_output_type="audio",
            scheduler_cls="pega_omni_plugin.engine.scheduler.ProgramScheduler",
        )
        pipeline = PipelineConfig(
            model_type=name,
            model_arch=ARCHITECTURE,
            default_deploy_config_name=str(STAGE_CONFIGS / f"{program}.yaml"),
            stages=(stage,),
        )
        register_pipeline(partial(_resolve, pipeline), model_type=name)
        for model_type in [taken for taken, ours in TAKEN_OVER.items() if ours == name and _take_over]:
            # Past ``register_pipeline``, which warns of what is meant here.
            OMNI_PIPELINES[model_type] = partial(_resolve, pipeline)


def _resolve(pipeline: PipelineConfig, hf_config: PretrainedConfig | None) -> PipelineConfig:
    """The pipeline, once it is known to be the one that is served.

    vLLM-Omni's orchestrator polls its engines every millisecond unless it is told that the pipeline can be waited for;
    it reads that from the environment after it has resolved the pipeline. Waiting saves that millisecond per message.
    vLLM-Omni also asks every resolver when it searches for a model of another kind, which must not be changed.
    """
    model_type = None if hf_config is None else hf_config.model_type
    if pipeline.model_type == TAKEN_OVER.get(model_type, model_type):  # type: ignore[arg-type]
        os.environ.setdefault("VLLM_OMNI_EVENT_DRIVEN_ORCH", "1")
    return pipeline


def _serves_http() -> bool:
    """Whether this process is ``vllm serve``; engine and inspection processes must not import its API server."""
    return "vllm_omni.entrypoints.cli.serve" in sys.modules or "vllm_omni.entrypoints.cli.main" in sys.modules


def _check_command_line() -> None:
    """Check the stage file that ``vllm serve`` was given before anything starts.

    vLLM-Omni ignores keys it does not know, and would find ours wrong only inside the engine process.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--deploy-config", "--deploy_config", type=Path)
    parser.add_argument("--api-server-count", "--api_server_count", "-asc", default="1")
    known, rest = parser.parse_known_args(sys.argv[1:])
    global _take_over
    from pega_omni_plugin.engine.config import ConfigError, is_program_file, load_stage_file

    ours = False
    try:
        if known.deploy_config is not None and known.deploy_config.is_file():
            ours = is_program_file(known.deploy_config)
            if ours:
                load_stage_file(known.deploy_config)
        _take_over = takes_over(known.deploy_config)
    except ConfigError as error:
        sys.exit(f"pega-omni: {error}")
    ours |= any(_runs_by_itself(Path(argument)) for argument in rest)
    if known.api_server_count not in ("0", "1") and ours:
        # Further ones are spawned without plugins and fail without a reason.
        sys.exit("pega-omni: --api-server-count above 1: the queue is counted in one API server; leave the option out")


def _runs_by_itself(checkpoint: Path) -> bool:
    """Whether our program runs a directory's checkpoint when no stage file says so."""
    program = program_of(checkpoint)
    return program is not None and (_take_over or f"pega_{program}" not in TAKEN_OVER.values())

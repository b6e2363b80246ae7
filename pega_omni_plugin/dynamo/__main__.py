"""``python -m pega_omni_plugin.dynamo --model …``: a Dynamo worker."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pega_omni_plugin.engine.config import ConfigError, find_stage_file, is_program_file, load_stage_file
from pega_omni_plugin.nn.checkpoint import CheckpointError, read_json
from pega_omni_plugin.registration import PIPELINES, program_directory, program_of
from pega_omni_plugin.versions import check_versions

LAST_STATUS_PORT = 32_767
"""Dynamo 1.6.1 reads ``DYN_SYSTEM_PORT`` into a signed 16-bit number."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The worker's command line."""
    parser = argparse.ArgumentParser(prog="python -m pega_omni_plugin.dynamo", description="A Dynamo speech worker.")
    parser.add_argument("--model", default="piper", help="piper, sim, a checkpoint directory or a Hugging Face name")
    parser.add_argument("--served-model-name", nargs="+", default=[], help="names to serve under; the first is shown")
    parser.add_argument(
        "--stage-configs-path", help="a stage file, or the name of a packaged one (default: the model's own)"
    )
    parser.add_argument("--namespace", default="pega", help="Dynamo namespace (default: %(default)s)")
    parser.add_argument("--component", default="omni", help="Dynamo component (default: %(default)s)")
    return parser.parse_args(arguments)


def served_name(model: str) -> tuple[str, ...]:
    """The name without ``--served-model-name``: a program says it itself, a checkpoint goes by its directory."""
    if program_directory(model) is not None:
        return ()
    path = Path(model)
    return (path.resolve().name if path.is_dir() else model,)


def check_model(model: str) -> None:
    """Refuse a directory whose model no program of ours runs, before half a minute of start-up.

    Raises:
        ConfigError: naming the directory, its model type, and what is served.
    """
    config = Path(model) / "config.json"
    if config.is_file() and program_of(config.parent) is None:
        try:
            model_type = read_json(config).get("model_type")
        except CheckpointError as error:
            raise ConfigError(f"--model {model}: {error}") from error
        served = ", ".join(sorted(PIPELINES.values()))
        raise ConfigError(f"--model {model}: model type {model_type!r} has no program here; there are: {served}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the command line before anything heavy is imported, then serve."""
    known = parse(sys.argv[1:] if arguments is None else arguments)
    for problem in check_versions():
        sys.exit(f"pega-omni: {problem}")
    deploy_config: Path | None = None
    status_port = os.environ.get("DYN_SYSTEM_PORT") or "0"
    if not status_port.isdecimal() or int(status_port) > LAST_STATUS_PORT:
        sys.exit(f"pega-omni: DYN_SYSTEM_PORT {status_port}: Dynamo takes a number up to {LAST_STATUS_PORT}")
    try:
        check_model(known.model)
        if known.stage_configs_path is not None:
            deploy_config = find_stage_file(known.stage_configs_path)
            if not is_program_file(deploy_config):
                raise ConfigError(
                    f"--stage-configs-path {known.stage_configs_path}: its pipeline is none of this package's, and a "
                    "worker serves no others; name another stage file, or leave the option out"
                )
            load_stage_file(deploy_config)
    except ConfigError as error:
        sys.exit(f"pega-omni: {error}")

    import uvloop
    from dynamo.runtime.logging import configure_dynamo_logging

    from pega_omni_plugin.dynamo.worker import WorkerOptions, serve
    from pega_omni_plugin.registration import register

    configure_dynamo_logging()
    register()
    uvloop.run(
        serve(
            WorkerOptions(
                model=str(program_directory(known.model) or known.model),
                served=tuple(known.served_model_name) or served_name(known.model),
                deploy_config=None if deploy_config is None else str(deploy_config),
                namespace=known.namespace,
                component=known.component,
            )
        )
    )


if __name__ == "__main__":
    main()

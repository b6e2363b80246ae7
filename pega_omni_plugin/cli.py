"""The ``pega-omni`` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pega_omni_plugin.engine.config import ConfigError, find_stage_file, is_program_file, load_stage_file
from pega_omni_plugin.models.qwen3_tts.tiny_config import VARIANTS
from pega_omni_plugin.registration import program_directory

SERVED_NAMES = {"sim": "pega-omni-sim", "piper": "pega-omni-joe"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pega-omni", description="Speech, live voice and images on vLLM-Omni.")
    commands = parser.add_subparsers(dest="command", required=True)

    path = commands.add_parser("path", help="print the model directory of a program without weights")
    path.add_argument("name", choices=sorted(SERVED_NAMES))
    path.add_argument("--name", dest="served", action="store_true", help="print the name it is served under instead")
    path.set_defaults(run=_path)

    serve = commands.add_parser(
        "serve", help="vllm serve --omni with this package's defaults", add_help=False, prefix_chars="\0"
    )
    serve.add_argument("rest", nargs=argparse.REMAINDER)
    serve.set_defaults(run=_serve)

    for name, module, text in (
        ("say", "pega_omni_plugin.say", "speak a text into a WAV file"),
        ("doctor", "pega_omni_plugin.doctor", "check this machine and installation; every failure says its fix"),
    ):
        _plug_in(commands, name, module, text)
    bench = commands.add_parser("bench", help="load generators").add_subparsers(dest="bench", required=True)
    _plug_in(bench, "speech", "pega_omni_plugin.bench.speech", "load POST /v1/audio/speech and report")
    _plug_in(bench, "engine", "pega_omni_plugin.bench.engine", "what free-running streams do to those who arrive")
    tiny = commands.add_parser("make-tiny", help="write a tiny checkpoint with random weights")
    tiny.add_argument("family", choices=["qwen3-tts"])
    tiny.add_argument("folder", type=Path)
    tiny.add_argument("--variant", type=_underscored, choices=VARIANTS, default=VARIANTS[0])
    tiny.add_argument("--narrow", action="store_true", help="a talker as wide as its code predictor, as in the 0.6B")
    tiny.set_defaults(run=_make_tiny)

    known = parser.parse_args(arguments)
    status: int = known.run(known)
    return status


def _plug_in(commands: Any, name: str, module: str, text: str) -> None:
    """Add a sub-command whose module has ``add_arguments`` and ``run``."""
    loaded = importlib.import_module(module)
    parser = commands.add_parser(name, help=text, description=text)
    loaded.add_arguments(parser)
    parser.set_defaults(run=loaded.run)


def _underscored(variant: str) -> str:
    """Model names write ``custom-voice`` where configuration writes ``custom_voice``; both are understood."""
    return variant.replace("-", "_")


def _make_tiny(known: argparse.Namespace) -> int:
    from pega_omni_plugin.models.qwen3_tts.tiny import write

    write(known.folder, variant=known.variant, narrow=known.narrow)
    print(f"{known.folder}: a tiny Qwen3-TTS checkpoint, {known.variant}{', narrow' if known.narrow else ''}")
    return 0


def _path(known: argparse.Namespace) -> int:
    print(SERVED_NAMES[known.name] if known.served else program_directory(known.name))
    return 0


def _serve(known: argparse.Namespace) -> int:
    rest = list(known.rest)
    if not rest or rest[0].startswith("-"):
        print("usage: pega-omni serve MODEL [any option of vllm serve]; MODEL: piper, sim, a directory or a name")
        return 0 if rest in (["-h"], ["--help"]) else 2
    model, *options = rest
    try:
        options = _stage_file(options)
    except ConfigError as error:
        print(f"pega-omni: {error}", file=sys.stderr)
        return 1
    command = ["vllm", "serve", str(program_directory(model) or model), "--omni", "--disable-uvicorn-access-log"]
    if program_directory(model) is not None and "--served-model-name" not in options:
        command += ["--served-model-name", SERVED_NAMES[model]]
    executable = Path(sys.executable).parent / "vllm"
    # Set by some shells and images; costs every engine process seconds of start-up.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.execv(executable, [*command, *options])


def _stage_file(options: list[str]) -> list[str]:
    """The launch scripts' ``--stage-configs-path FILE|NAME`` as what ``vllm serve`` calls ``--deploy-config``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stage-configs-path")
    known, rest = parser.parse_known_args(options)
    if known.stage_configs_path is None:
        return rest
    path = find_stage_file(known.stage_configs_path)
    if is_program_file(path):
        load_stage_file(path)
    return [*rest, "--deploy-config", str(path)]


if __name__ == "__main__":
    sys.exit(main())

"""The ``pega-omni`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

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

    known = parser.parse_args(arguments)
    status: int = known.run(known)
    return status


def _path(known: argparse.Namespace) -> int:
    print(SERVED_NAMES[known.name] if known.served else program_directory(known.name))
    return 0


def _serve(known: argparse.Namespace) -> int:
    rest = list(known.rest)
    if not rest or rest[0].startswith("-"):
        print("usage: pega-omni serve MODEL [any option of vllm serve]; MODEL: piper, sim, a directory or a name")
        return 0 if rest in (["-h"], ["--help"]) else 2
    model, *options = rest
    command = ["vllm", "serve", str(program_directory(model) or model), "--omni", "--disable-uvicorn-access-log"]
    if program_directory(model) is not None and "--served-model-name" not in options:
        command += ["--served-model-name", SERVED_NAMES[model]]
    executable = Path(sys.executable).parent / "vllm"
    # Set by some shells and images; costs every engine process seconds of start-up.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.execv(executable, [*command, *options])


if __name__ == "__main__":
    sys.exit(main())

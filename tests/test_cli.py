"""The ``pega-omni`` command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pega_omni_plugin.cli import SERVED_NAMES, main
from pega_omni_plugin.registration import program_directory
from tests.harness import BIN


@pytest.mark.parametrize("name", sorted(SERVED_NAMES))
def test_path_prints_a_model_directory_and_its_served_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", name]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()
    assert main(["path", "--name", name]) == 0
    assert capsys.readouterr().out.strip() == SERVED_NAMES[name]


def test_served_names_are_those_of_the_programs() -> None:
    """The command line must know them without loading the programs."""
    from pega_omni_plugin.models.piper.program import PiperOptions, PiperProgram
    from pega_omni_plugin.models.sim.program import SimOptions, SimProgram

    sim = SimProgram.load(Path(), SimOptions(), {}, 1)
    checkpoint = program_directory("piper")
    assert checkpoint is not None
    piper = PiperProgram.load(checkpoint, PiperOptions(), {}, 1)
    assert {"sim": sim.info.model, "piper": piper.info.model} == SERVED_NAMES
    piper.close()


def served(*arguments: str, tmp_path: Path) -> list[str]:
    """What ``pega-omni serve`` would run: a stand-in for ``vllm`` prints its arguments."""
    stand_in = tmp_path / "vllm"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "bytecode:$PYTHONDONTWRITEBYTECODE"\n')
    stand_in.chmod(0o755)
    python = tmp_path / "python"
    python.symlink_to(BIN / "python")
    code = "import sys; sys.executable = sys.argv.pop(1); from pega_omni_plugin.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [BIN / "python", "-c", code, str(python), "serve", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return ran.stdout.splitlines()


def test_serve_becomes_vllm_serve_omni(tmp_path: Path) -> None:
    command = served("sim", "--port", "8123", tmp_path=tmp_path)
    assert command[0] == "serve"
    assert command[1].endswith("models/sim/checkpoint")
    assert {"--omni", "--served-model-name", "pega-omni-sim"} <= set(command)
    assert command[-3:] == ["--port", "8123", "bytecode:"]


def test_serve_keeps_a_given_served_name_and_other_models(tmp_path: Path) -> None:
    command = served("some/model", "--served-model-name", "mine", tmp_path=tmp_path)
    assert command[1] == "some/model"
    assert command.count("--served-model-name") == 1


def test_serve_without_a_model_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "MODEL" in capsys.readouterr().out
    assert main(["serve", "--help"]) == 0


def test_serve_takes_a_stage_file_by_name(tmp_path: Path) -> None:
    command = served("sim", "--stage-configs-path", "sim", tmp_path=tmp_path)
    at = command.index("--deploy-config")
    assert command[at + 1].endswith("stage_configs/sim.yaml")


def test_a_wrong_stage_file_is_told_before_anything_starts(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("pipeline: pega_sim\nstages:\n  - stage_id: 0\n    additional_config: {program: sim, slotz: 3}\n")
    for command in (
        [BIN / "pega-omni", "serve", "sim", "--stage-configs-path", wrong],
        [BIN / "python", "-m", "pega_omni_plugin.dynamo", "--model", "sim", "--stage-configs-path", wrong],
    ):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode != 0
        assert "slotz" in ran.stderr
        assert "slots" in ran.stderr

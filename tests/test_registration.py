"""What vLLM is told about us, as far as it can be checked without vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pega_omni_plugin import registration
from pega_omni_plugin.engine.config import PROGRAMS, STAGE_CONFIGS, load_stage_file

SIM = STAGE_CONFIGS / "sim.yaml"


@pytest.mark.parametrize(("pipeline", "program"), registration.PIPELINES.items())
def test_every_pipeline_has_a_program_a_stage_file_and_a_model_directory(pipeline: str, program: str) -> None:
    assert program in PROGRAMS
    assert load_stage_file(STAGE_CONFIGS / f"{program}.yaml").program == program
    directory = registration.program_directory(program)
    assert directory is not None
    assert json.loads((directory / "config.json").read_text()) == {
        "model_type": pipeline,
        "architectures": [registration.ARCHITECTURE],
    }


def test_other_names_are_no_programs() -> None:
    assert registration.program_directory("qwen3_tts") is None
    assert registration.program_directory("../sim") is None


def wrong(folder: Path) -> Path:
    path = folder / "wrong.yaml"
    path.write_text("pipeline: pega_sim\nstages:\n  - stage_id: 0\n    additional_config: {program: sim, slotz: 3}\n")
    return path


@pytest.mark.parametrize("form", ["--deploy-config {}", "--deploy-config={}", "--deploy_config {}"])
def test_vllm_serve_refuses_a_wrong_stage_file_at_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = form.format(wrong(tmp_path)).split()
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model", "--omni", *arguments, "--port", "1"])
    with pytest.raises(SystemExit, match="slotz"):
        registration._check_command_line()


@pytest.mark.parametrize(
    "arguments", [[], ["--deploy-config", str(SIM)], ["--deploy-config", "nowhere.yaml"], ["--port", "1"]]
)
def test_other_command_lines_are_left_alone(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model", "--omni", *arguments])
    registration._check_command_line()


@pytest.mark.parametrize("option", ["--api-server-count 2", "--api-server-count=4", "-asc 2"])
def test_more_than_one_api_server_is_refused_for_our_programs_only(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm", "serve", str(tmp_path), "--omni", *option.split()])
    registration._check_command_line()
    ours = str(registration.program_directory("sim"))
    monkeypatch.setattr("sys.argv", ["vllm", "serve", ours, "--omni", *option.split()])
    with pytest.raises(SystemExit, match="api-server-count"):
        registration._check_command_line()


def test_upstream_stage_files_are_vllm_omnis_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("pipeline: qwen3_tts\nanything: 1\n")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model", "--omni", "--deploy-config", str(path)])
    registration._check_command_line()

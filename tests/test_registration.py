"""What vLLM and vLLM-Omni are told about us, and what they make of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pega_omni_plugin import registration
from pega_omni_plugin.engine.config import PROGRAMS, STAGE_CONFIGS, ConfigError, load_stage_file
from pega_omni_plugin.models.qwen3_tts import tiny

SIM = STAGE_CONFIGS / "sim.yaml"
QWEN3_TTS = STAGE_CONFIGS / "qwen3_tts.yaml"
UPSTREAM = STAGE_CONFIGS / "upstream_qwen3_tts.yaml"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-TTS, whose model type vLLM-Omni knows as its own."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-voice"
    tiny.write(folder)
    return folder


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What registering decides once a process is put back, and nothing was decided before."""
    with patch.dict(os.environ):
        os.environ.pop(registration.TAKE_OVER, None)
        monkeypatch.setattr(registration, "_take_over", True)
        yield


def command(monkeypatch: pytest.MonkeyPatch, model: str | Path, *arguments: str | Path) -> None:
    """What ``vllm serve`` was started with."""
    monkeypatch.setattr("sys.argv", ["vllm", "serve", str(model), "--omni", *map(str, arguments)])


@pytest.mark.parametrize(("pipeline", "program"), registration.PIPELINES.items())
def test_every_pipeline_has_a_program_and_a_stage_file(pipeline: str, program: str) -> None:
    assert program in PROGRAMS
    assert load_stage_file(STAGE_CONFIGS / f"{program}.yaml").program == program


def test_what_is_taken_over_goes_to_a_pipeline_of_ours() -> None:
    assert set(registration.TAKEN_OVER.values()) <= set(registration.PIPELINES)
    assert not set(registration.TAKEN_OVER) & set(registration.PIPELINES)


@pytest.mark.parametrize("program", ["sim", "piper"])
def test_a_program_without_weights_has_a_model_directory(program: str) -> None:
    directory = registration.program_directory(program)
    assert directory is not None
    assert registration.program_of(directory) == program
    assert json.loads((directory / "config.json").read_text()) == {
        "model_type": f"pega_{program}",
        "architectures": [registration.ARCHITECTURE],
    }


def test_other_names_are_no_programs() -> None:
    assert registration.program_directory("qwen3_tts") is None
    assert registration.program_directory("../sim") is None


def test_a_checkpoint_is_run_by_the_program_for_its_model_type(checkpoint: Path) -> None:
    assert registration.program_of(checkpoint) == "qwen3_tts"


@pytest.mark.parametrize(
    "config",
    [
        b'{"model_type": "llama"}',
        b'{"architectures": ["PegaProgram"]}',
        b'{"model_type": null}',
        b'{"model_type": ["qwen3_tts"]}',
        b'["qwen3_tts"]',
        b"3",
        b"{",
        b"\xff",
    ],
)
def test_a_directory_of_another_kind_has_no_program(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    assert registration.program_of(tmp_path) is None


def test_what_is_no_checkpoint_has_no_program(tmp_path: Path) -> None:
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "folder", tmp_path / "nothing", Path("x" * 5000), Path("owner/name")):
        assert registration.program_of(path) is None


def test_ours_take_over_unless_told_otherwise_or_the_stage_file_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM-Omni has a file of the last name, which it finds without its folder.
    expected = {None: True, QWEN3_TTS: True, UPSTREAM: False, Path("qwen3_tts.yaml"): False}
    assert {path: registration.takes_over(path) for path in expected} == expected
    monkeypatch.setenv("PEGA_TAKE_OVER", "1")
    assert {path: registration.takes_over(path) for path in expected} == expected
    monkeypatch.setenv("PEGA_TAKE_OVER", "0")
    assert {path: registration.takes_over(path) for path in expected} == dict.fromkeys(expected, False)


def test_a_stage_file_that_cannot_be_read_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not YAML"):
        registration.takes_over(path)


@pytest.mark.parametrize(
    ("arguments", "take_over"),
    [
        ([], True),
        (["--deploy-config", QWEN3_TTS], True),
        (["--deploy-config", UPSTREAM], False),
        (["--deploy-config", "qwen3_tts.yaml"], False),
    ],
)
def test_the_command_line_decides_who_runs_a_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any], take_over: bool
) -> None:
    command(monkeypatch, checkpoint, *arguments)
    registration._check_command_line()
    assert registration._take_over is take_over
    monkeypatch.setenv("PEGA_TAKE_OVER", "0")
    registration._check_command_line()
    assert registration._take_over is False


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


@pytest.mark.parametrize("arguments", [[], ["--deploy-config", QWEN3_TTS]])
def test_more_than_one_api_server_is_refused_for_a_checkpoint_that_we_run(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any]
) -> None:
    command(monkeypatch, checkpoint, "--api-server-count", "2", *arguments)
    with pytest.raises(SystemExit, match="api-server-count"):
        registration._check_command_line()
    command(monkeypatch, checkpoint, "--api-server-count", "1", *arguments)
    registration._check_command_line()


def test_api_servers_of_a_checkpoint_that_vllm_omni_runs_are_its_own_matter(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(monkeypatch, checkpoint, "--api-server-count", "2", "--deploy-config", UPSTREAM)
    registration._check_command_line()
    monkeypatch.setenv("PEGA_TAKE_OVER", "0")
    command(monkeypatch, checkpoint, "--api-server-count", "2")
    registration._check_command_line()


def test_with_take_over_off_a_stage_file_of_ours_or_a_program_without_weights_is_still_ours(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEGA_TAKE_OVER", "0")
    command(monkeypatch, checkpoint, "-asc", "2")
    registration._check_command_line()
    for model, arguments in ((checkpoint, ["--deploy-config", QWEN3_TTS]), (registration.program_directory("sim"), [])):
        command(monkeypatch, model, "-asc", "2", *arguments)
        with pytest.raises(SystemExit, match="api-server-count"):
            registration._check_command_line()


@pytest.mark.parametrize("text", ["a: [", "pipeline: pega_sim\nstages: 3\n", "\0"])
def test_a_broken_stage_file_is_what_is_told_whatever_else_is_wrong(
    text: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    for take_over in ("1", "0"):
        monkeypatch.setenv("PEGA_TAKE_OVER", take_over)
        for arguments in (["--deploy-config", path], ["-asc", "2", "--deploy-config", path]):
            command(monkeypatch, checkpoint, *arguments)
            with pytest.raises(SystemExit, match=r"^pega-omni: .*broken\.yaml: "):
                registration._check_command_line()


def test_upstream_stage_files_are_vllm_omnis_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("pipeline: qwen3_tts\nanything: 1\n")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model", "--omni", "--deploy-config", str(path)])
    registration._check_command_line()


def resolved(model: Path, deploy_config: Path | None = None) -> Any:
    """The pipeline that vLLM-Omni chooses, after it has asked us what there is."""
    from vllm_omni.config.config_factory import StageConfigFactory
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, QWEN3_TTS_PIPELINE
    from vllm_omni.engine.arg_utils import register_omni_models_to_vllm

    register_omni_models_to_vllm()  # vLLM-Omni's plugin, which is loaded with ours
    # Whatever else registered in this process.
    theirs = {name: OMNI_PIPELINES[name] for name in OMNI_PIPELINES if name not in registration.PIPELINES}
    with patch.dict(OMNI_PIPELINES, theirs | {"qwen3_tts": QWEN3_TTS_PIPELINE}, clear=True):
        registration._register_configs()
        registration._register_pipelines()
        return StageConfigFactory.get_pipeline_config(
            str(model), trust_remote_code=False, deploy_config_path=deploy_config and str(deploy_config)
        )


EVENT_DRIVEN = "VLLM_OMNI_EVENT_DRIVEN_ORCH"


def test_a_checkpoints_own_model_type_resolves_to_our_pipeline(checkpoint: Path) -> None:
    os.environ.pop(EVENT_DRIVEN, None)
    pipeline = resolved(checkpoint)
    assert (pipeline.model_type, pipeline.model_arch) == ("pega_qwen3_tts", registration.ARCHITECTURE)
    assert pipeline.default_deploy_config_name == str(QWEN3_TTS)
    (stage,) = pipeline.stages
    assert stage.scheduler_cls == "pega_omni_plugin.engine.scheduler.ProgramScheduler"
    assert os.environ[EVENT_DRIVEN] == "1"


def test_with_take_over_off_it_resolves_to_vllm_omnis(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.pop(EVENT_DRIVEN, None)
    monkeypatch.setattr(registration, "_take_over", False)
    pipeline = resolved(checkpoint)
    assert (pipeline.model_type, len(pipeline.stages)) == ("qwen3_tts", 2)
    assert EVENT_DRIVEN not in os.environ


def test_a_stage_file_of_ours_chooses_our_pipeline_in_any_case(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_take_over", False)
    assert resolved(checkpoint, QWEN3_TTS).model_type == "pega_qwen3_tts"


@pytest.mark.parametrize("program", ["sim", "piper"])
def test_a_program_without_weights_resolves_to_its_pipeline_and_waits_for_events(program: str) -> None:
    os.environ.pop(EVENT_DRIVEN, None)
    directory = registration.program_directory(program)
    assert directory is not None
    assert resolved(directory).model_type == f"pega_{program}"
    assert os.environ[EVENT_DRIVEN] == "1"


def test_what_the_user_chose_for_the_orchestrator_stays(checkpoint: Path) -> None:
    os.environ[EVENT_DRIVEN] = "0"
    resolved(checkpoint)
    assert os.environ[EVENT_DRIVEN] == "0"

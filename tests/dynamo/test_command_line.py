"""The worker's command line, checked before anything heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pega_omni_plugin.dynamo.__main__ import LAST_STATUS_PORT, check_model, main, parse, served_name
from pega_omni_plugin.engine.config import ConfigError
from pega_omni_plugin.registration import program_directory


def checkpoint(folder: Path, model_type: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_the_embedded_voice_is_the_default() -> None:
    assert parse([]).model == "piper"


def test_a_checkpoint_goes_by_its_directory_and_a_hub_model_by_its_name(tmp_path: Path) -> None:
    assert served_name("sim") == ()
    assert served_name(str(checkpoint(tmp_path / "voice-1", "x"))) == ("voice-1",)
    assert served_name("owner/voice-2") == ("owner/voice-2",)


def test_a_model_without_a_program_is_refused_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'llama'.*piper, qwen3_tts, sim"):
        check_model(str(checkpoint(tmp_path / "other", "llama")))
    check_model(str(program_directory("sim")))
    check_model(str(checkpoint(tmp_path / "speech", "qwen3_tts")))
    check_model("owner/unknown")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b'["qwen3_tts"]', "expected a JSON object, got list"),
        (b"3", "expected a JSON object, got int"),
        (b"{", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"{}", "model type None has no program here"),
        (b'{"model_type": ["qwen3_tts"]}', "has no program here"),
    ],
)
def test_a_configuration_of_another_shape_is_refused_by_its_file(tmp_path: Path, config: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ConfigError) as refused:
        check_model(str(tmp_path))
    assert str(refused.value).startswith(f"--model {tmp_path}: ")
    assert said in str(refused.value)
    with pytest.raises(SystemExit, match=r"^pega-omni: --model "):
        main(["--model", str(tmp_path)])


@pytest.mark.parametrize("port", ["x", "-1", str(LAST_STATUS_PORT + 1)])
def test_a_status_port_that_dynamo_cannot_take_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", port)
    with pytest.raises(SystemExit, match=f"DYN_SYSTEM_PORT {port}"):
        main(["--model", "sim"])


def test_an_unknown_stage_file_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SystemExit, match=r"nowhere.*piper, qwen3_tts.*, sim"):
        main(["--model", "sim", "--stage-configs-path", "nowhere"])


def test_a_stage_file_of_another_pipeline_is_refused_at_once() -> None:
    """The engine would find out after a minute, under pages of tracebacks."""
    with pytest.raises(SystemExit, match=r"^pega-omni: --stage-configs-path upstream_qwen3_tts: its pipeline is none"):
        main(["--model", "sim", "--stage-configs-path", "upstream_qwen3_tts"])

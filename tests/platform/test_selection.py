"""Which platform is chosen, and what it does to configurations: in this process, without an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import vllm.platforms
import vllm_omni.platforms
from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

from pega_omni_plugin import platform
from pega_omni_plugin.platform.omni_cpu import CpuOmniPlatform
from pega_omni_plugin.platform.vllm_cpu import StageCpuPlatform
from pega_omni_plugin.platform.workers import CpuARWorker, CpuGenerationWorker


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    # vLLM's CPU settings end up in the environment.
    with mock.patch.dict(os.environ):
        yield


def configured(executor: str, **model: object) -> str:
    """The executor of a configuration that asked for ``executor``, once the platform has seen it."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(hf_config=None, use_mla=False, **model)
    config.parallel_config.distributed_executor_backend = executor
    StageCpuPlatform.check_and_update_config(config)
    return config.parallel_config.distributed_executor_backend


def test_the_cpu_build_runs_on_our_platforms() -> None:
    assert type(vllm.platforms.current_platform) is StageCpuPlatform
    assert type(vllm_omni.platforms.current_omni_platform) is CpuOmniPlatform


def test_entry_points_name_importable_classes_and_stay_callable_after_the_import() -> None:
    for _ in range(2):
        assert resolve_obj_by_qualname(platform.vllm_platform()) is StageCpuPlatform
        assert resolve_obj_by_qualname(platform.omni_platform()) is CpuOmniPlatform


def test_an_accelerator_build_keeps_its_own_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platforms, "cpu_platform_plugin", lambda: None)
    assert platform.vllm_platform() is None
    assert platform.omni_platform() is None


def test_a_stage_keeps_its_worker_in_its_own_process() -> None:
    assert configured("uni", stage_id=0, use_v2_model_runner=False) == "uni"


def test_an_executor_that_was_asked_for_is_kept() -> None:
    assert configured("mp", stage_id=0, use_v2_model_runner=False) == "mp"


def test_models_outside_vllm_omni_are_configured_as_vllm_does() -> None:
    assert configured("uni") == "mp"


def test_the_second_model_runner_is_refused_before_a_process_starts() -> None:
    with pytest.raises(NotImplementedError, match=r"model_runner: v2 .*set `model_runner: v1`"):
        configured("uni", stage_id=0, use_v2_model_runner=True)


@pytest.mark.parametrize("kind", [CpuARWorker, CpuGenerationWorker])
def test_workers_refuse_it_too_where_vllm_did_not_ask_our_platform(kind: type[CpuARWorker]) -> None:
    worker = object.__new__(kind)
    worker.model_config = SimpleNamespace(use_v2_model_runner=True)
    with pytest.raises(NotImplementedError, match="model_runner: v2"):
        worker.init_device()


def test_everything_that_vllm_omni_asks_of_a_platform_is_answered() -> None:
    package = Path(vllm_omni.__file__).parent
    sources = [path for path in package.rglob("*.py") if path.parts[len(package.parts)] != "platforms"]
    asked = {name for path in sources for name in re.findall(r"\bcurrent_omni_platform\.(\w+)", path.read_text())}
    assert {"empty_cache", "get_device_memory", "synchronize"} <= asked
    ours = CpuOmniPlatform()
    # vLLM answers None to a name that it does not know; what is called then fails elsewhere.
    assert sorted(name for name in asked if getattr(ours, name) is None) == []


def test_questions_without_arguments_do_not_raise() -> None:
    ours = CpuOmniPlatform()
    free, total = ours.get_device_memory()
    assert 0 < free <= total
    assert ours.get_free_memory() > 0
    assert ours.get_device_total_memory(device_id=3) == total
    assert 0 < ours.max_memory_allocated() <= ours.max_memory_reserved()
    assert ours.get_torch_device(ours.current_device()).type == "cpu"
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        assert getattr(ours, name)() is None


def test_devices_of_a_stage_do_not_bind_it_to_a_numa_node() -> None:
    os.environ.pop("CPU_VISIBLE_MEMORY_NODES", None)
    CpuOmniPlatform.set_device_control_env_var("1")
    assert os.environ["PEGA_CPU_DEVICES"] == "1"
    assert "CPU_VISIBLE_MEMORY_NODES" not in os.environ


def test_a_cpu_section_of_a_deploy_config_applies() -> None:
    assert CpuOmniPlatform().device_name == "cpu"

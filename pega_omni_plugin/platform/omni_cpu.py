"""vLLM-Omni's view of a CPU: workers, attention, devices, memory."""

from __future__ import annotations

import resource

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_memory_node_info
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

VIRTUAL_DEVICES = 16
"""How many devices a CPU pretends to be. Stages on different ones are initialised at the same time, stages that share
one in turn (a two-stage pipeline: 27 s against 35 s)."""


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the questions that vLLM-Omni asks on top.

    What vLLM-Omni calls and neither base class answers must be defined here: vLLM's ``Platform`` looks an unknown name
    up in ``torch.cpu`` and answers ``None`` where that fails too, which then fails far away as "NoneType is not
    callable".
    """

    # The enumeration has no CPU. `device_name` stays "cpu", so a `platforms: cpu:` section of a deploy config applies.
    _omni_enum = OmniPlatformEnum.OOT
    # A stage's `devices` are exported under this name. vLLM's own, CPU_VISIBLE_MEMORY_NODES, would bind the stage to
    # the memory of that NUMA node.
    device_control_env_var = "PEGA_CPU_DEVICES"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        """Worker of stages that generate tokens."""
        return "pega_omni_plugin.platform.workers.CpuARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Worker of stages that generate without sampling (vocoders)."""
        return "pega_omni_plugin.platform.workers.CpuGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """Where vLLM-Omni's deploy configs are, relative to site-packages."""
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        """Worker of diffusion stages."""
        return "pega_omni_plugin.platform.diffusion.CpuDiffusionWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """The one attention that diffusion models have here, for every head size.

        Raises:
            ValueError: when the configuration selects another one.
        """
        if selected_backend is not None and selected_backend.upper() != "TORCH_SDPA":
            raise ValueError(
                f"diffusion attention backend {selected_backend!r} does not run on CPU; "
                "set `diffusion_attention_config` to TORCH_SDPA or leave it out"
            )
        return "pega_omni_plugin.platform.diffusion.CpuSdpaBackend"

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        """No: flash attention is a GPU kernel."""
        return False

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """No: compiling needs a C++ compiler at run time and takes longer than the small models that run here."""
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        """No: there are no graphs to capture."""
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        """No: the weights are there already."""
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """Every rank and every virtual device is the one CPU."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """Virtual devices, see ``VIRTUAL_DEVICES``."""
        return VIRTUAL_DEVICES

    @classmethod
    def current_device(cls) -> int:
        """Index of the current device; ``torch.cpu`` answers with a string."""
        return 0

    @classmethod
    def get_device_version(cls) -> str | None:
        """A CPU has no driver whose version matters."""
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs asynchronously."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is no caching allocator."""

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Bytes of RAM that are available, and in all, under the container's limit."""
        memory = get_memory_node_info()
        return memory.available_memory, memory.total_memory

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Bytes of RAM that are available."""
        return cls.get_device_memory()[0]

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of RAM in all; ``device_id`` is a virtual device, not a NUMA node."""
        return cls.get_device_memory()[1]

    @classmethod
    def max_memory_reserved(cls, device: torch.device | int | None = None) -> int:
        """Bytes at the peak of this process's resident set; unlike a GPU's, it cannot be reset."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @classmethod
    def max_memory_allocated(cls, device: torch.device | int | None = None) -> int:
        """As ``max_memory_reserved``: the process has no allocator of its own to tell the two apart."""
        return cls.max_memory_reserved()

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | int | None = None) -> None:
        """Does nothing: the kernel keeps the peak for the life of the process."""

"""The CPU platform of vLLM-Omni, which ships platforms for accelerators only.

Two halves, because vLLM and vLLM-Omni each choose a platform of their own: vLLM's decides how a stage's engine is
configured (``vllm_cpu``), vLLM-Omni's decides which workers and which diffusion attention it runs (``omni_cpu``).
Both stand aside unless the installed vLLM is the CPU build.

This module is imported while vLLM itself is being imported, so it imports nothing at the top. The modules are not
named after the functions below: importing a submodule binds its name here, and the entry points would then find it in
place of the function.
"""

from __future__ import annotations


def vllm_platform() -> str | None:
    """Entry point of ``vllm.platform_plugins``: the class to use, or ``None`` on an accelerator build."""
    return "pega_omni_plugin.platform.vllm_cpu.StageCpuPlatform" if _cpu_build() else None


def omni_platform() -> str | None:
    """Entry point of ``vllm_omni.platform_plugins``: the class to use, or ``None`` on an accelerator build."""
    return "pega_omni_plugin.platform.omni_cpu.CpuOmniPlatform" if _cpu_build() else None


def _cpu_build() -> bool:
    from vllm.platforms import cpu_platform_plugin

    return cpu_platform_plugin() is not None

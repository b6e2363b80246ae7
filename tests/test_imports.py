"""Imports point one way, and what is imported at the start of every process stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pega_omni_plugin

NAME = "pega_omni_plugin"
ROOT = Path(pega_omni_plugin.__file__).parent
FILES = {
    ".".join((NAME, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

LAYERS = (
    ("versions",),
    ("nn",),
    ("models",),
    ("engine",),
    ("engine.client",),
    ("audio", "live"),
    ("api", "platform", "upstream"),
    ("registration",),
    ("bench", "dynamo"),
    ("cli", "doctor", "doctor_model", "say"),
)
"""From the lowest up; a module imports its own part and those of lower layers. The last is the command, one part."""

ENGINE_OF_OTHERS = ("vllm", "vllm_omni", "transformers")
MAY_KNOW_ENGINE = (
    "registration",
    "platform",
    "upstream",
    "engine.kernels",
    "engine.scheduler",
    "engine.worker",
    "engine.client",
    "engine.architecture",
    "engine.hf_config",
    # Runs scheduler and worker in its own process.
    "bench.step_engine",
    # Where our routes meet vLLM-Omni's application; the import stands in the function that installs them.
    "api.vllm_routes",
)
WEB = ("fastapi", "starlette", "uvicorn")
NN_KNOWS = ("torch", "numpy", "safetensors", "triton")
NO_WEB = ("nn", "models", "engine", "audio")


def imports(module: str, source: str) -> Iterator[str]:
    """Every module that a source imports anywhere in it, by full name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else str(node.module)


def inside(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def place(name: str) -> tuple[int, str]:
    """The layer of a module (its name without ours before it) and the part of the layer."""
    for layer in reversed(range(len(LAYERS))):
        for part in LAYERS[layer]:
            # The engine's client stands over the rest of its folder.
            if inside(name, (part,)) and (part != "engine" or not inside(name, ("engine.client",))):
                return layer, part
    raise AssertionError(f"{name} is in no layer: put it into one")


def wrong(module: str, imported: str) -> str | None:
    """Why ``module`` may not import ``imported``, if so."""
    own, root = module.removeprefix(f"{NAME}."), imported.split(".")[0]
    if root != NAME:
        if root in ENGINE_OF_OTHERS and not inside(own, MAY_KNOW_ENGINE):
            return f"only {', '.join(MAY_KNOW_ENGINE)} may import {root}"
        if root == "dynamo" and not inside(own, ("dynamo",)):
            return "only dynamo/ may import dynamo"
        if root in WEB and inside(own, NO_WEB):
            return f"{root} is for the parts that serve HTTP"
        if inside(own, ("nn",)) and root not in NN_KNOWS and root not in sys.stdlib_module_names:
            return f"nn/ knows {', '.join(NN_KNOWS)} only"
        return None
    target = imported.removeprefix(f"{NAME}.")
    if own == NAME or target == NAME:
        return None if target == NAME else "the package itself imports nothing of its own"
    if inside(own, ("models",)):
        if target == "engine.program" or inside(target, (".".join(own.split(".")[:2]), "nn")):
            return None
        return "a model imports its own family, nn/ and engine.program only"
    (layer, part), (below, other) = place(own), place(target)
    command = below == layer == len(LAYERS) - 1
    return None if below < layer or other == part or command else f"{part} is not above {other}"


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module: str) -> None:
    reasons = {name: wrong(module, name) for name in imports(module, FILES[module].read_text())}
    assert {name: reason for name, reason in reasons.items() if reason} == {}


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("nn.attention", "vllm.attention"),
        ("nn.attention", "scipy"),
        ("nn.attention", f"{NAME}.models.sim.program"),
        ("models.sim.program", "starlette.responses"),
        ("models.sim.program", "transformers"),
        ("models.sim.program", "dynamo.llm"),
        ("models.sim.program", f"{NAME}.engine.config"),
        ("models.sim.program", f"{NAME}.api.errors"),
        ("models.sim.program", f"{NAME}.models.piper.program"),
        ("engine.shared", "vllm"),
        ("engine.shared", f"{NAME}.engine.client"),
        ("engine.worker", f"{NAME}.audio.wav"),
        ("engine.stream", "fastapi"),
        ("audio.wav", f"{NAME}.api.errors"),
        ("api.speech", "vllm_omni.entrypoints"),
        ("api.speech", f"{NAME}.dynamo.mapping"),
        ("api.speech", f"{NAME}.registration"),
        ("bench.load", f"{NAME}.dynamo.mapping"),
        ("bench.load", f"{NAME}.cli"),
        ("registration", f"{NAME}.cli"),
    ],
)
def test_each_rule_finds_what_breaks_it(module: str, imported: str) -> None:
    assert wrong(f"{NAME}.{module}", imported)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("nn.attention", "torch.nn"),
        ("nn.attention", "math"),
        ("models.sim.program", f"{NAME}.engine.program"),
        ("models.piper.program", f"{NAME}.models.piper.voice"),
        ("models.qwen3_tts.talker", f"{NAME}.nn.attention"),
        ("engine.worker", "vllm.v1.worker"),
        ("engine.client", f"{NAME}.engine.wire"),
        ("api.routes", "fastapi"),
        ("dynamo.worker", "dynamo.runtime"),
        ("dynamo.__main__", f"{NAME}.registration"),
        ("doctor", NAME),
    ],
)
def test_each_rule_allows_what_it_should(module: str, imported: str) -> None:
    assert wrong(f"{NAME}.{module}", imported) is None


def test_imports_in_functions_and_of_submodules_are_found() -> None:
    source = f"def f():\n    from {NAME}.engine import client, wire\n    import vllm.config as c\n"
    assert set(imports("m", source)) == {f"{NAME}.engine.client", f"{NAME}.engine.wire", "vllm.config"}


@pytest.mark.parametrize(
    "module", ["", ".engine.program", ".engine.config", ".cli", ".registration", ".doctor", ".platform"]
)
def test_what_every_process_imports_pulls_in_nothing_heavy(module: str) -> None:
    script = f"import sys, {NAME}{module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert NAME in loaded
    assert {"torch", "dynamo", *ENGINE_OF_OTHERS, *WEB} & set(loaded) == set()

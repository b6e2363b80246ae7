"""One tiny checkpoint of each case of the golden outputs, written once; programs and fronts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.front import Qwen3TtsFront
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from tests.goldens import manifest

Checkpoint = Callable[[str], Path]
Load = Callable[..., Qwen3TtsProgram]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of a case, such as ``custom_voice`` or ``base_narrow``. Nobody writes into it."""
    cases: Mapping[str, Any] = manifest()["cases"]

    @cache
    def write(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        tiny.write(folder, variant=cases[case]["variant"], narrow=cases[case]["narrow"])
        return folder

    return write


@pytest.fixture(scope="session")
def load(checkpoint_of: Checkpoint) -> Load:
    """``load(case, slots=2, **options)``: a program in float32 on the CPU, the same one for the same arguments."""

    @cache
    def program(case: str = "custom_voice", slots: int = 2, **options: Any) -> Qwen3TtsProgram:
        asked = Qwen3TtsOptions(**{"positions": 256} | options)
        return Qwen3TtsProgram.load(checkpoint_of(case), asked, {}, slots)

    return program


@pytest.fixture(scope="session")
def front_of(checkpoint_of: Checkpoint, load: Load) -> Callable[[str], Qwen3TtsFront]:
    """The front of a case with room for 256 positions."""

    @cache
    def front(case: str) -> Qwen3TtsFront:
        program = load(case)
        return Qwen3TtsFront(checkpoint_of(case), program.options, program.info.default_voice)

    return front


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run with one thread, as servers do unless told otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""One loaded voice for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pega_omni_plugin.engine.program import Part, PartConfig
from pega_omni_plugin.models.piper.program import PiperOptions, PiperProgram
from pega_omni_plugin.models.piper.voice import JoeVoice
from tests.models.piper.drive import CHECKPOINT


@pytest.fixture(scope="session")
def joe() -> JoeVoice:
    return JoeVoice()


@pytest.fixture(scope="session")
def program() -> Iterator[PiperProgram]:
    # A stage file may leave the choice open, or spell out what this voice is.
    parts: dict[Part, PartConfig] = {
        "codec": PartConfig(),
        "decoder": PartConfig(device="cpu", dtype="float32", graphs=False),
    }
    loaded = PiperProgram.load(CHECKPOINT, PiperOptions(threads=2), parts, slots=4)
    yield loaded
    loaded.close()

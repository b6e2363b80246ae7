"""One loaded voice for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pega_omni_plugin.engine.program import PartConfig
from pega_omni_plugin.models.piper.program import PiperOptions, PiperProgram
from pega_omni_plugin.models.piper.voice import JoeVoice
from tests.models.piper.drive import CHECKPOINT


@pytest.fixture(scope="session")
def joe() -> JoeVoice:
    return JoeVoice()


@pytest.fixture(scope="session")
def program() -> Iterator[PiperProgram]:
    loaded = PiperProgram.load(CHECKPOINT, PiperOptions(threads=2), {"codec": PartConfig()}, slots=4)
    yield loaded
    loaded.close()

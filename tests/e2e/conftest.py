"""Servers shared by the end-to-end tests; each is started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Server, stage_file, vllm_serve

SLOTS = 64
QUEUE = 160


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The simulator under ``vllm serve --omni``, 10 ms a step so that things overlap."""
    folder: Path = tmp_path_factory.mktemp("sim")
    config = stage_file(folder, "sim", slots=SLOTS, queue=QUEUE, profile="ttfa", options={"step_base_us": 10_000})
    with vllm_serve(folder, "sim", "--deploy-config", str(config)) as server:
        yield server

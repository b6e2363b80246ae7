from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.bench.server import serving

# A test must not fail because the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="package")
def server() -> Iterator[str]:
    with serving() as url:
        yield url

"""What one test puts in place, the next must not find."""

from __future__ import annotations

import pytest

from pega_omni_plugin.nn import kernels


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that loads a program puts vLLM's operations in place for its whole process, which here is all tests'."""
    monkeypatch.setattr(kernels, "_used", None)

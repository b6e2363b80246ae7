"""Triton's kernels without a GPU. Whether they are interpreted is decided when Triton is imported, once a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def interpret(script: str) -> str:
    """Run a script in a process of its own in which kernels are interpreted; returns what it printed."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout

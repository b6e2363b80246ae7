"""Shell scripts under test run with a PATH of our choosing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = """
    awk bash basename cat chmod cp cut date dirname df env flock grep head mkdir mktemp printf readlink rm sed
    setpriv setsid sha256sum sleep sort tail timeout xargs
"""


class Shell:
    """A folder of commands that stands in for PATH, and a clone's skeleton to run ``launch/`` in."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.root = folder / "a clone"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.fail(f"{tool} is not installed"))
        shutil.copytree(ROOT / "launch", self.root / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        (self.root / "requirements").mkdir()
        (self.root / "pyproject.toml").write_text("[project]\n")
        for name in ("cpu", "cpu-dev", "cuda", "uv"):
            (self.root / "requirements" / f"{name}.txt").write_text(f"{name}==1\n")
        self.calls = folder / "calls"

    def command(self, name: str, script: str) -> None:
        """Put a command on PATH; ``$CALLS`` is a file to note calls in."""
        file = self.bin / name
        file.unlink(missing_ok=True)
        file.write_text(f"#!{self.bin}/bash\n{script}\n")
        file.chmod(0o755)

    def environment(self, **extra: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.root), "CALLS": str(self.calls), **extra}

    def run(self, script: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run ``script`` as bash, ``launch/env.sh`` sourced, in the clone."""
        return subprocess.run(
            [self.bin / "bash", "-euo", "pipefail", "-c", f"source launch/env.sh; {script}"],
            cwd=self.root,
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def noted(self) -> list[str]:
        """The calls that commands have noted."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)

"""Servers that a comparison starts: each in a session of its own, waited for, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

STOP_SECONDS = 60.0
"""From SIGTERM to SIGKILL. vLLM-Omni ends its stages one after another, in 3 to 10 s."""

_POLL_SECONDS = 0.1
_TAIL_LINES = 30

NOT_INHERITED = ("PYTHONDONTWRITEBYTECODE", "VLLM_PLUGINS", "PEGA_TAKE_OVER", "VLLM_OMNI_EVENT_DRIVEN_ORCH")
"""What would make a server start slower, or another one than was meant."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What the launch scripts set too: more threads than one a process compete on few cores."""


class ServerFailed(Exception):
    """A server did not start, or is gone; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started. ``arguments`` may hold ``{port}``; ``ready_path`` answers 200 once it serves."""

    name: str
    arguments: Sequence[str]
    ready_path: str
    environment: Mapping[str, str]


class ServerProcess:
    """A running server; use as a context manager. Its log is ``<name>.log`` in ``folder``."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.name = command.name
        self.log = folder / f"{command.name}.log"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._ready_path = command.ready_path
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [argument.replace("{port}", str(port)) for argument in command.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**server_environment(os.environ), **command.environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the server's first process lives. Its end is seen without reaping it, so that its number, which is
        the session's, stays taken."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait_until_ready(self, seconds: float) -> None:
        """Return once the server answers; raises ``ServerFailed`` when it ends, or does not within ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(self.url + self._ready_path, timeout=2.0):
                    return
            except OSError:  # not listening yet, or an answer other than 200
                time.sleep(_POLL_SECONDS)
        raise ServerFailed(f"{self.name}: not ready within {seconds:g} s\n{self._tail()}")

    def check(self) -> None:
        """Raise ``ServerFailed`` if the server has ended."""
        if not self.running:
            raise ServerFailed(f"{self.name}: the server ended by itself\n{self._tail()}")

    def cpu_seconds(self) -> float:
        """Processor time of the processes that live now, since each began."""
        return sum(member.cpu_seconds for member in _session(self._process.pid))

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM to the first process; when it has ended, or after ``seconds``, SIGKILL to all that is left."""
        if self._process.returncode is not None:
            return
        try:
            if self.running:
                os.kill(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + seconds
            while self.running and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        finally:
            for member in _session(self._process.pid):
                try:
                    os.kill(member.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has just ended
            self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def server_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of every server: what is inherited, less what would change it."""
    kept = {name: value for name, value in inherited.items() if name not in NOT_INHERITED}
    executables = Path(sys.executable).parent
    return kept | {"PATH": f"{executables}:{kept.get('PATH', os.defpath)}"} | ENVIRONMENT


class _Member(NamedTuple):
    pid: int
    cpu_seconds: float


def _session(number: int) -> Iterator[_Member]:
    """The live processes of a session, from proc(5)."""
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name, which may hold anything: state, parent, group, session, ... user and system time.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == number and fields[0] != "Z":
            yield _Member(int(entry.name), (int(fields[11]) + int(fields[12])) / ticks)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port

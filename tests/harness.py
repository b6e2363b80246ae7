"""Real servers for tests: on free ports, ended by pid, and found again by a mark in their environment."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import httpx
import yaml

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
STAGE_CONFIGS = ROOT / "stage_configs"
MARK = "PEGA_TEST_SERVER"


def free_port() -> int:
    """A port that nobody listens on now; below 32,768, since Dynamo 1.6.1 takes no other for its status server."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def server_environment(**extra: str) -> dict[str, str]:
    """What the launch scripts set: bytecode on, one thread a process, nothing from a hub."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    fixed = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return kept | {"PATH": f"{BIN}:{kept['PATH']}"} | fixed | extra


def stage_file(folder: Path, program: str, **section: object) -> Path:
    """A stage file for ``program`` with some of its settings replaced; ``options`` are merged."""
    document = yaml.safe_load((STAGE_CONFIGS / f"{program}.yaml").read_text())
    document["base_config"] = str(STAGE_CONFIGS / "_engine.yaml")
    engine = document["stages"][0]["additional_config"]
    options = {**engine.get("options", {}), **section.pop("options", {})}  # type: ignore[dict-item]
    engine.update(section, options=options)
    path = folder / f"{program}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


class Server:
    """A server process, its log and its children."""

    def __init__(self, command: Sequence[str], log: Path, port: int, **environment: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._mark = uuid.uuid4().hex
        self._sessions: set[int] = set()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=log.parent,
                env=server_environment(**environment, **{MARK: self._mark}),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        assert self.survivors(10.0) == [], "the server left processes behind"

    def wait_for(self, path: str, seconds: float = 180.0, containing: str = "") -> Self:
        """Return once ``GET path`` answers 200 with ``containing`` in it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before it was ready:\n{self.tail()}")
            try:
                answer = httpx.get(self.url + path, timeout=2.0)
            except httpx.TransportError:
                pass
            else:
                self.family()
                if answer.status_code == 200 and containing in answer.text:
                    return self
            time.sleep(0.2)
        raise AssertionError(f"GET {path} did not answer within {seconds:g} s:\n{self.tail()}")

    def wait_for_line(self, text: str, seconds: float = 180.0) -> Self:
        """Return once the log has ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before it was ready:\n{self.tail()}")
            assert time.monotonic() < deadline, f"no {text!r} within {seconds:g} s:\n{self.tail()}"
            time.sleep(0.2)
        self.family()
        return self

    def family(self) -> list[int]:
        """Pids of the server and all that it started and that lives.

        A mark in the environment finds those in other sessions; the sessions ever seen find those that have written
        their title over their environment, as vLLM's engines do.
        """
        alive = _processes(self._mark)
        self._sessions.update(process.session for process in alive if process.marked)
        return [process.pid for process in alive if process.marked or process.session in self._sessions]

    def engine(self) -> int:
        """Pid of the engine process."""
        engines = self.engines()
        assert len(engines) == 1, f"expected one engine process, found {engines}"
        return engines[0]

    def engines(self) -> list[int]:
        """Pids of all engine processes."""
        return [pid for pid in self.family() if "StageEngineCoreProc" in command_of(pid)]

    def survivors(self, seconds: float) -> list[str]:
        """What is still there of the process group after at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while (alive := self.family()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{pid} {command_of(pid)}" for pid in alive]

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and SIGKILL to all of the family after ``seconds``; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                for pid in self.family():
                    os.kill(pid, signal.SIGKILL)
                self.process.wait()
                raise AssertionError(f"did not stop within {seconds:g} s of SIGTERM:\n{self.tail()}") from None
        return self.process.returncode

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def vllm_serve(folder: Path, model: str, *arguments: str, **environment: str) -> Server:
    """``pega-omni serve MODEL`` (which becomes ``vllm serve --omni``), ready."""
    port = free_port()
    command = [str(BIN / "pega-omni"), "serve", model, "--host", "127.0.0.1", "--port", str(port), *arguments]
    return Server(command, folder / f"serve-{port}.log", port, **environment).wait_for("/readyz")


def launch(folder: Path, *arguments: str, **environment: str) -> Server:
    """``launch/agg_omni_audio.sh``: frontend and workers, ready when the script says so."""
    port = free_port()
    command = [str(ROOT / "launch" / "agg_omni_audio.sh"), "--port", str(port), *arguments]
    return Server(command, folder / f"launch-{port}.log", port, **environment).wait_for_line("curl ")


class _Process(NamedTuple):
    pid: int
    session: int
    marked: bool


def _processes(mark: str) -> list[_Process]:
    """All live processes, and which of them have ``mark`` in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            marked = wanted in (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if fields[0] != "Z":
            found.append(_Process(int(entry.name), int(fields[3]), marked))
    return found


def command_of(pid: int) -> str:
    """The command line of a process, or nothing when it is gone."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""

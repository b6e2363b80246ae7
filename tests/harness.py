"""Real servers for tests: started on free ports in a process group of their own, ended by pid, looked over after."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx
import yaml

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
STAGE_CONFIGS = ROOT / "stage_configs"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
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
        self._seen: set[int] = set()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=log.parent,
                env=server_environment(**environment),
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
                if answer.status_code == 200 and containing in answer.text:
                    return self
            self.family()
            time.sleep(0.2)
        raise AssertionError(f"GET {path} did not answer within {seconds:g} s:\n{self.tail()}")

    def family(self) -> list[int]:
        """Pids of the server's process group that live now; all ever seen are remembered."""
        alive = _group(self.process.pid)
        self._seen.update(alive)
        return alive

    def engine(self) -> int:
        """Pid of the engine process."""
        engines = [pid for pid in self.family() if "StageEngineCoreProc" in _command(pid)]
        assert len(engines) == 1, f"expected one engine process, found {engines}"
        return engines[0]

    def survivors(self, seconds: float) -> list[str]:
        """What is still there of the process group after at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while (alive := _group(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{pid} {_command(pid)}" for pid in alive]

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and after ``seconds`` SIGKILL to the group; returns the exit status."""
        self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
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


def _group(leader: int) -> list[int]:
    """Live members of a process group, zombies left out."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            members.append(int(entry.name))
    return members


def _command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""

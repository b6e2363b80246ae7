from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from pega_omni_plugin.bench.processes import Command, ServerFailed, ServerProcess, server_environment

SERVE = """
import http.server, signal, subprocess, sys
port, stubborn, child = sys.argv[1:]
if stubborn == "yes":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if child == "yes":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def command(script: str, *arguments: str, ready: str = "/ready") -> Command:
    return Command("server", [sys.executable, "-c", script, *arguments], ready, {})


def family(server: ServerProcess) -> list[psutil.Process]:
    first = psutil.Process(server._process.pid)
    return [first, *first.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not alive


def test_a_server_is_waited_for_and_ended_with_what_it_started(tmp_path: Path) -> None:
    with ServerProcess(command(SERVE, "{port}", "no", "yes"), tmp_path) as server:
        server.wait_until_ready(20)
        processes = family(server)
        assert len(processes) == 2
    assert gone(processes)
    assert server._process.returncode == -signal.SIGTERM


def test_a_server_that_ignores_sigterm_is_killed_after_the_deadline(tmp_path: Path) -> None:
    server = ServerProcess(command(SERVE, "{port}", "yes", "yes"), tmp_path)
    server.wait_until_ready(20)
    processes = family(server)
    server.stop(seconds=0.3)
    assert gone(processes)
    assert server._process.returncode == -signal.SIGKILL
    server.stop()  # once more does nothing


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_servers_end_when_the_run_does_not(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), ServerProcess(command(SERVE, "{port}", "no", "yes"), tmp_path) as server:
        server.wait_until_ready(20)
        processes = family(server)
        raise error
    assert gone(processes)


def test_interrupted_stopping_still_ends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    server = ServerProcess(command(SERVE, "{port}", "yes", "yes"), tmp_path)
    server.wait_until_ready(20)
    processes = family(server)
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    monkeypatch.undo()
    assert gone(processes)


def test_children_are_ended_though_the_server_ended_first(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with ServerProcess(command(script), tmp_path) as server:
        while server.running:
            time.sleep(0.02)
        (orphan,) = [
            process
            for process in psutil.process_iter()
            if process.status() != psutil.STATUS_ZOMBIE and _session_of(process.pid) == server._process.pid
        ]
    assert gone([orphan])


def _session_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def test_a_server_that_ends_before_it_is_ready_fails_with_the_end_of_its_log(tmp_path: Path) -> None:
    with ServerProcess(command("print('no such model'); raise SystemExit(2)"), tmp_path) as server:
        with pytest.raises(ServerFailed, match="server: the server ended by itself\nno such model"):
            server.wait_until_ready(20)
        with pytest.raises(ServerFailed, match="ended by itself"):
            server.check()


def test_a_server_that_never_becomes_ready_fails_after_the_deadline(tmp_path: Path) -> None:
    with ServerProcess(command(SERVE, "{port}", "no", "no", ready="/busy"), tmp_path) as server:
        with pytest.raises(ServerFailed, match="not ready within 1 s"):
            server.wait_until_ready(1)
        assert server.running


def test_processor_time_is_that_of_the_whole_session(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; burn = 'import time\\nwhile time.process_time() < 0.3: pass\\ntime.sleep(600)';"
        "subprocess.Popen([sys.executable, '-c', burn]); time.sleep(600)"
    )
    with ServerProcess(command(script), tmp_path) as server:
        deadline = time.monotonic() + 30
        while server.cpu_seconds() < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_environment_is_that_of_the_launch_scripts() -> None:
    inherited = {"PATH": "/usr/bin", "HOME": "/home/a", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "8"}
    inherited |= {"VLLM_PLUGINS": "others", "PEGA_TAKE_OVER": "0"}
    environment = server_environment(inherited)
    assert environment["HOME"] == "/home/a"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert not {"PYTHONDONTWRITEBYTECODE", "VLLM_PLUGINS", "PEGA_TAKE_OVER"} & set(environment)

"""Children that live together: real processes, started by a real script."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT

HEAD = f"""
set -euo pipefail
source {ROOT}/launch/processes.sh
trap 'exit 0' INT TERM HUP
trap pega_stop EXIT
"""
TAIL = """
pega_watch
echo "$PEGA_ENDED ended with $PEGA_STATUS"
exit 1
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Script:
    """A running script; ``pids`` are the numbers that its children wrote into files of ``folder``."""

    def __init__(self, folder: Path, body: str, **environment: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            ["bash", "-c", HEAD + body + TAIL],
            cwd=folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pid(self, name: str) -> int:
        file = self.folder / name
        eventually(lambda: file.exists() and file.read_text().endswith("\n"))
        return int(file.read_text())

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(body: str, **environment: str) -> Script:
        started.append(Script(tmp_path, body, **environment))
        return started[-1]

    yield start
    for script in started:
        if script.process.poll() is None:
            script.process.terminate()
            script.process.communicate(timeout=60)


def test_when_one_child_dies_it_is_named_and_the_others_end(run: Callable[..., Script]) -> None:
    script = run(
        """
        pega_start steady bash -c 'echo $$ > steady; exec sleep 600'
        pega_start "worker 2" bash -c 'while [[ ! -e steady ]]; do sleep 0.05; done; exit 7'
        """
    )
    assert script.finish() == (1, "worker 2 ended with 7\n")
    assert not alive(script.pid("steady"))


def test_a_killed_child_is_reported_with_the_status_of_its_signal(run: Callable[..., Script]) -> None:
    script = run("pega_start worker bash -c 'echo $$ > worker; exec sleep 600'")
    os.kill(script.pid("worker"), signal.SIGKILL)
    assert script.finish() == (1, "worker ended with 137\n")


def test_what_a_dead_child_leaves_behind_is_killed(run: Callable[..., Script]) -> None:
    script = run("""pega_start worker bash -c 'trap "" TERM; sleep 600 & echo $! > engine; echo $$ > worker; wait'""")
    engine = script.pid("engine")
    os.kill(script.pid("worker"), signal.SIGKILL)
    assert script.finish()[0] == 1
    eventually(lambda: not alive(engine))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_child_and_is_no_failure(run: Callable[..., Script], number: signal.Signals) -> None:
    script = run(
        """
        pega_start one bash -c 'echo $$ > one; exec sleep 600'
        pega_start two bash -c 'echo $$ > two; exec sleep 600'
        """
    )
    pids = [script.pid("one"), script.pid("two")]
    script.process.send_signal(number)
    assert script.finish() == (0, "")
    assert not any(map(alive, pids))


def test_children_may_finish_what_they_serve(run: Callable[..., Script]) -> None:
    script = run(
        """
        pega_start worker bash -c 'trap "sleep 0.3; echo drained > done; exit" TERM; echo $$ > worker
            while :; do sleep 0.05; done'
        """
    )
    script.pid("worker")
    script.process.terminate()
    assert script.finish() == (0, "")
    assert (script.folder / "done").read_text() == "drained\n"


def test_an_engine_is_not_told_to_stop_before_its_worker(run: Callable[..., Script]) -> None:
    script = run(
        """
        pega_start worker bash -c '
            bash -c "trap \\"echo told > told; exit\\" TERM; echo \\$\\$ > engine; while :; do sleep 0.05; done" &
            trap "kill -0 $! && echo served > served; exit" TERM
            while [[ ! -e engine ]]; do sleep 0.05; done; echo $$ > worker; while :; do sleep 0.05; done'
        """
    )
    script.pid("worker")
    engine = script.pid("engine")
    script.process.terminate()
    assert script.finish()[0] == 0
    assert (script.folder / "served").exists()
    assert not (script.folder / "told").exists()
    eventually(lambda: not alive(engine))


def test_a_child_that_does_not_end_is_killed_and_named(run: Callable[..., Script]) -> None:
    script = run(
        """pega_start deaf bash -c 'trap "" TERM; echo $$ > deaf; while :; do sleep 0.05; done'""",
        PEGA_STOP_SECONDS="1",
    )
    deaf = script.pid("deaf")
    script.process.terminate()
    assert script.finish() == (0, "pega-omni: deaf is killed\n")
    assert not alive(deaf)


def test_a_second_signal_kills_at_once(run: Callable[..., Script]) -> None:
    script = run(
        """
        pega_start deaf bash -c 'trap "echo told > told" TERM; echo $$ > deaf; while :; do sleep 0.05; done'
        """,
        PEGA_STOP_SECONDS="600",
    )
    deaf = script.pid("deaf")
    script.process.terminate()
    eventually((script.folder / "told").exists)
    script.process.terminate()
    assert script.finish()[0] == 0
    assert not alive(deaf)


def test_children_end_when_the_script_itself_is_killed(run: Callable[..., Script]) -> None:
    script = run("pega_start worker bash -c 'echo $$ > worker; exec sleep 600'")
    worker = script.pid("worker")
    script.process.kill()
    eventually(lambda: not alive(worker))

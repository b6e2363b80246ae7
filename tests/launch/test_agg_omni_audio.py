"""The launch script, in a clone whose environment holds stand-ins for the servers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT, Shell
from tests.launch.test_processes import alive, eventually

# Plays Dynamo's frontend: one instance for every worker that has registered in the folder that both are given.
FRONTEND = """
import http.server, json, os, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        workers = sorted(pathlib.Path(os.environ["DYN_FILE_KV"]).glob("worker*"))
        models = [{"id": "pega-omni-sim"}] if workers else []
        answer = {"data": models, "instances": [{"instance_id": worker.name} for worker in workers]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *arguments):
        pass
host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--http-host", "--http-port"))
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""

# Stands in for the environment's interpreter.
PYTHON = f"""
echo "$$ $*" >> "$CALLS"
case "$*" in
  "-m dynamo.frontend"*) exec {sys.executable} "$HOME/frontend.py" "$@" ;;
  "-m pega_omni_plugin.dynamo"*)
    echo "$DYN_FILE_KV" > "$HOME/registry"
    echo > "$DYN_FILE_KV/worker$$"
    exec sleep 600
    ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def clone(shell: Shell) -> Shell:
    """A clone that is set up, as far as the script can tell."""
    shell.command("python3.11", f'exec {sys.executable} "$@"')
    for name in ("pega_omni_plugin", "stage_configs"):
        (shell.root / name).symlink_to(ROOT / name)
    (shell.root / "frontend.py").write_text(FRONTEND)
    (shell.root / ".venv/bin").mkdir(parents=True)
    shell.command("stand-in", PYTHON)
    (shell.root / ".venv/bin/python").symlink_to(shell.bin / "stand-in")
    shell.command("pega-omni", '[[ $* == "path --name sim" ]] && echo pega-omni-sim')
    (shell.root / ".venv/bin/pega-omni").symlink_to(shell.bin / "pega-omni")
    assert shell.run("pega_stamp cpu > .venv/.pega-stamp").returncode == 0
    return shell


class Launch:
    """A running launch script."""

    def __init__(self, clone: Shell, *arguments: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.clone = clone
        self.log = clone.root / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [clone.root / "launch/agg_omni_audio.sh", "--port", str(self.port), *arguments],
                cwd=clone.root,
                env=clone.environment(**environment),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, text: str) -> None:
        def seen() -> bool:
            assert self.process.poll() is None or text in self.log.read_text(), self.log.read_text()
            return text in self.log.read_text()

        eventually(seen)

    def started(self, module: str) -> list[tuple[int, str]]:
        """Process number and arguments of every child that runs ``module``."""
        calls = [call.partition(" ") for call in self.clone.noted()]
        return [(int(pid), rest) for pid, _, rest in calls if rest.startswith(f"-m {module}")]

    def gone(self) -> bool:
        """Whether nothing is left: children, port, registry."""
        with socket.socket() as probe:
            refused = probe.connect_ex(("127.0.0.1", self.port)) != 0
        pids = [int(call.partition(" ")[0]) for call in self.clone.noted()]
        registry = Path((self.clone.root / "registry").read_text().strip())
        return refused and not any(map(alive, pids)) and not registry.exists()


@pytest.fixture
def launch(clone: Shell) -> Iterator[Launch]:
    launch = Launch(clone, "--model", "sim", "--workers", "02", "--namespace", "tests", PEGA_STOP_SECONDS="20")
    yield launch
    if launch.process.poll() is None:
        launch.process.terminate()
    launch.process.wait(60)


def refused(clone: Shell, *arguments: str, **environment: str) -> str:
    """What the script says on its way out, having started and installed nothing."""
    done = subprocess.run(
        [clone.root / "launch/agg_omni_audio.sh", *arguments],
        cwd=clone.root,
        env=clone.environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert clone.noted() == []
    assert done.stdout == ""
    return done.stderr


# The fixture asks for "02" workers: a shell takes 08 for a broken octal number, and starts none.
def test_when_all_workers_are_there_a_request_to_paste_is_printed(launch: Launch) -> None:
    launch.wait_for("speech.wav")
    assert len(launch.started("pega_omni_plugin.dynamo")) == 2
    assert f"curl http://127.0.0.1:{launch.port}/v1/audio/speech" in launch.log.read_text()
    assert '"model": "pega-omni-sim"' in launch.log.read_text()


def test_the_stock_frontend_is_started_with_the_no_delay_extension(launch: Launch) -> None:
    launch.wait_for("speech.wav")
    [(_, frontend)] = launch.started("dynamo.frontend")
    assert "--frontend-route-extension pega_omni_plugin.dynamo.nodelay:provider" in frontend
    assert f"--http-host 127.0.0.1 --http-port {launch.port} --discovery-backend file" in frontend


def test_further_arguments_reach_every_worker(launch: Launch) -> None:
    launch.wait_for("speech.wav")
    for _, worker in launch.started("pega_omni_plugin.dynamo"):
        assert worker == "-m pega_omni_plugin.dynamo --model sim --namespace tests"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_frees_the_port(launch: Launch, number: signal.Signals) -> None:
    launch.wait_for("speech.wav")
    launch.process.send_signal(number)
    assert launch.process.wait(60) == 0
    assert launch.gone()


def test_a_signal_while_starting_ends_everything(clone: Shell) -> None:
    # No worker registers, so that the script waits.
    clone.command("stand-in", PYTHON.replace('echo > "$DYN_FILE_KV/worker$$"\n', ""))
    launch = Launch(clone, "--model", "sim")
    eventually(lambda: len(clone.noted()) == 3 and (clone.root / "registry").exists())
    launch.process.terminate()
    assert launch.process.wait(60) == 0
    assert launch.gone()
    assert "speech.wav" not in launch.log.read_text()


@pytest.mark.parametrize(("module", "name"), [("pega_omni_plugin.dynamo", "worker"), ("dynamo.frontend", "frontend")])
def test_when_one_process_dies_the_others_end_and_it_is_named(launch: Launch, module: str, name: str) -> None:
    launch.wait_for("speech.wav")
    pid, _ = launch.started(module)[0]
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
    assert launch.process.wait(60) == 1
    assert launch.gone()
    assert f"pega-omni: {name}" in launch.log.read_text()
    assert "ended with status 137" in launch.log.read_text()


def test_a_stage_file_and_a_model_from_the_environment_reach_the_worker(clone: Shell) -> None:
    launch = Launch(clone, "--stage-configs-path=sim", MODEL="sim")
    launch.wait_for("speech.wav")
    [(_, worker)] = launch.started("pega_omni_plugin.dynamo")
    assert worker == "-m pega_omni_plugin.dynamo --model sim --stage-configs-path sim"
    launch.process.terminate()
    assert launch.process.wait(60) == 0


def test_a_taken_port_is_said_at_once_with_the_fix(clone: Shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(clone, "--port", str(port))
    assert f"port {port} on 127.0.0.1 is taken" in message
    assert "choose another port" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port 70000: expected a number from 1 to 65535"),
        (["--port", "http"], "--port http: expected a number"),
        (["--workers", "0"], "--workers 0: expected a number"),
        (["--workers"], "--workers needs a value"),
        (["--model", "./nowhere"], "--model ./nowhere: no such directory"),
        (["--model", "smi"], "or one of: piper sim"),
        (["--model", "launch"], "has no config.json"),
        (["--stage-configs-path", "fast"], "none of that name in stage_configs/ (there are: piper qwen3_tts"),
        (["--stage-configs-path", "_engine"], "no such file"),
        (["--host", "192.0.2.1"], "host 192.0.2.1 is no address of this machine"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(clone: Shell, arguments: list[str], message: str) -> None:
    assert message in refused(clone, *arguments)


def test_a_registry_that_only_one_process_sees_is_refused(clone: Shell) -> None:
    assert "mem works within one process only" in refused(clone, DYN_DISCOVERY_BACKEND="mem")


def test_help_is_printed_without_a_set_up(shell: Shell) -> None:
    done = shell.run("exec launch/agg_omni_audio.sh --help")
    assert done.returncode == 0
    assert "--stage-configs-path" in done.stdout
    assert not (shell.root / ".venv").exists()


@pytest.mark.parametrize(("port", "workers"), [("abc", "1"), ("32768", "1"), ("32767", "2")])
def test_status_ports_that_dynamo_cannot_take_are_refused(clone: Shell, port: str, workers: str) -> None:
    assert f"DYN_SYSTEM_PORT={port}" in refused(clone, "--workers", workers, DYN_SYSTEM_PORT=port)

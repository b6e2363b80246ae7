"""The set-up: what it builds on, when it installs, and what it says when it cannot."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Shell

# Notes its calls; makes what the real one makes, as far as the set-up looks at it.
UV = r"""
echo "uv $*" >> "$CALLS"
case "$1 ${2:-}" in
  "--version ") echo "uv ${UV_VERSION:-0.13.9} (x86_64)" ;;
  "cache dir") echo "$HOME/uv-cache" ;;
  venv*)
    venv=${!#}
    mkdir -p "$venv/bin"
    echo "VIRTUAL_ENV='$venv'" > "$venv/bin/activate"
    printf '#!%s\n%s\n' "$BASH" 'echo "venv-python $*" >> "$CALLS"; echo /packages' > "$venv/bin/python"
    chmod +x "$venv/bin/python"
    ;;
  "pip sync")
    while [[ -n ${HOLD:-} && -e $HOLD ]]; do sleep 0.05; done
    exit "${SYNC_STATUS:-0}"
    ;;
esac
"""


@pytest.fixture
def ready(shell: Shell) -> Shell:
    """A machine with Python 3.11 and a recent uv."""
    shell.command("python3.11", f'exec {sys.executable} "$@"')
    shell.command("uv", UV)
    return shell


def syncs(shell: Shell) -> list[str]:
    return [call.rpartition("/")[2] for call in shell.noted() if call.startswith("uv pip sync")]


def test_python_3_11_is_preferred(shell: Shell) -> None:
    shell.command("python3.11", "echo /opt/eleven 3.11.9")
    shell.command("python3.12", "echo /opt/twelve 3.12.3")
    assert shell.run("pega_python").stdout == "/opt/eleven\n"


def test_a_stand_in_that_starts_nothing_is_passed_over(shell: Shell) -> None:
    shell.command("python3.11", "echo 'version manager: no such version' >&2; exit 127")
    shell.command("python3.12", "echo /opt/twelve 3.12.3")
    assert shell.run("pega_python").stdout == "/opt/twelve\n"


def test_without_a_fitting_python_the_message_says_what_was_found_and_the_fix(shell: Shell) -> None:
    shell.command("python3", f'[[ $2 == *version_info* ]] || exit 1; exec {sys.executable} -c "print(str(), 3.13)"')
    done = shell.run("pega_python")
    assert done.returncode == 1
    assert "python3 is 3.13;" in done.stderr
    assert "install python3.11" in done.stderr
    assert "PEGA_PYTHON" in done.stderr


def test_the_probe_asks_a_real_interpreter(shell: Shell) -> None:
    shell.command("python3.11", f'exec {sys.executable} "$@"')
    assert Path(shell.run("pega_python").stdout.strip()).samefile(sys.executable)


def test_a_named_python_is_the_only_candidate(shell: Shell) -> None:
    shell.command("python3.11", "echo /opt/eleven 3.11.9")
    done = shell.run("pega_python", PEGA_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "/nowhere/python" in done.stderr


def test_a_recent_uv_on_path_is_used(ready: Shell) -> None:
    assert ready.run("pega_uv python3.11").stdout == f"{ready.bin}/uv\n"


@pytest.mark.parametrize("version", [None, "0.4.30"])
def test_without_a_recent_uv_a_pinned_one_is_installed(ready: Shell, version: str | None) -> None:
    (ready.bin / "uv").unlink()
    if version is not None:
        ready.command("uv", f"echo uv {version}")
    ready.command("own", 'echo "own $*" >> "$CALLS"')
    ready.command("maker", 'mkdir -p "$3/bin"; for name in python uv; do cp "${0%/*}/own" "$3/bin/$name"; done')
    assert ready.run("pega_uv maker").stdout == f"{ready.root}/.uv/bin/uv\n"
    [install] = [call for call in ready.noted() if "pip install" in call]
    assert f"--require-hashes -r {ready.root}/requirements/uv.txt" in install
    # It is found again the next time.
    ready.run("pega_uv maker")
    assert len([call for call in ready.noted() if "pip install" in call]) == 1


def test_a_python_without_venv_is_named_with_the_package_that_brings_it(shell: Shell) -> None:
    shell.command("maker", "echo 'ensurepip is not available' >&2; exit 1")
    done = shell.run("pega_uv maker")
    assert done.returncode == 1
    assert "python3.11-venv" in done.stderr


@pytest.mark.parametrize(
    ("nvidia_smi", "chosen", "device"),
    [
        ("echo 'GPU 0: NVIDIA H200'", "", "cuda"),
        ("echo 'No devices were found'", "", "cpu"),
        ("echo 'no driver' >&2; exit 9", "", "cpu"),
        (None, "", "cpu"),
        ("echo 'GPU 0: NVIDIA H200'", "cpu", "cpu"),
        (None, "cuda", "cuda"),
    ],
)
def test_the_device_is_found_or_chosen(shell: Shell, nvidia_smi: str | None, chosen: str, device: str) -> None:
    if nvidia_smi is not None:
        shell.command("nvidia-smi", nvidia_smi)
    assert shell.run("pega_device", PEGA_DEVICE=chosen).stdout == f"{device}\n"


def test_an_unknown_device_is_refused(ready: Shell) -> None:
    done = ready.run("pega_setup", PEGA_DEVICE="tpu")
    assert done.returncode == 1
    assert "PEGA_DEVICE=tpu: expected cpu or cuda" in done.stderr
    assert syncs(ready) == []


def test_set_up_installs_once(ready: Shell) -> None:
    first = ready.run("pega_setup")
    assert first.returncode == 0, first.stderr
    assert "about 8 GB on disk" in first.stderr.splitlines()[0]
    assert syncs(ready) == ["cpu.txt"]
    [editable] = [call for call in ready.noted() if "--editable" in call]
    assert "--no-deps" in editable
    assert any(call.startswith("venv-python -m compileall") for call in ready.noted())

    before = ready.noted()
    second = ready.run("pega_setup")
    assert (second.returncode, second.stderr) == (0, "")
    assert ready.noted() == before


def test_packages_are_installed_only_with_their_hashes_and_into_the_clone(ready: Shell) -> None:
    ready.run("pega_setup", VIRTUAL_ENV="/somebody/else")
    [sync] = [call for call in ready.noted() if call.startswith("uv pip sync")]
    assert "--require-hashes" in sync
    assert f"--python {ready.root}/.venv/bin/python" in sync


@pytest.mark.parametrize("changed", ["requirements/cpu.txt", "pyproject.toml"])
def test_a_changed_list_or_project_is_installed_anew(ready: Shell, changed: str) -> None:
    ready.run("pega_setup")
    with (ready.root / changed).open("a") as file:
        file.write("# changed\n")
    assert ready.run("pega_setup").returncode == 0
    assert syncs(ready) == ["cpu.txt", "cpu.txt"]


def test_a_set_up_for_development_serves_as_one_for_running(ready: Shell) -> None:
    ready.run("pega_setup dev")
    ready.run("pega_setup")
    assert syncs(ready) == ["cpu-dev.txt"]


def test_a_set_up_for_running_does_not_serve_for_development(ready: Shell) -> None:
    ready.run("pega_setup")
    ready.run("pega_setup dev")
    assert syncs(ready) == ["cpu.txt", "cpu-dev.txt"]


def test_another_device_is_another_list(ready: Shell) -> None:
    ready.run("pega_setup")
    ready.run("pega_setup", PEGA_DEVICE="cuda")
    assert syncs(ready) == ["cpu.txt", "cuda.txt"]


def test_a_failed_download_is_tried_again_the_next_time(ready: Shell) -> None:
    failed = ready.run("pega_setup", SYNC_STATUS="2")
    assert failed.returncode == 1
    assert "check the network" in failed.stderr
    assert ready.run("pega_setup").returncode == 0
    assert ready.run("pega_setup").stderr == ""
    assert syncs(ready) == ["cpu.txt", "cpu.txt"]


def test_a_failed_update_does_not_leave_the_old_set_up_standing(ready: Shell) -> None:
    ready.run("pega_setup")
    assert ready.run("pega_setup dev", SYNC_STATUS="2").returncode == 1
    ready.run("pega_setup")
    assert syncs(ready) == ["cpu.txt", "cpu-dev.txt", "cpu.txt"]


def test_a_moved_clone_makes_its_environment_anew(ready: Shell) -> None:
    ready.run("pega_setup")
    ready.root = ready.root.rename(ready.root.with_name("elsewhere"))
    assert ready.run("pega_setup").returncode == 0
    made = [call for call in ready.noted() if call.startswith("uv venv")]
    assert made[0].endswith(f" {ready.root.with_name('a clone')}/.venv")
    assert made[1].endswith(f" {ready.root}/.venv")
    assert len(made) == 2


def test_too_little_space_is_refused_with_numbers_before_anything_is_made(ready: Shell) -> None:
    ready.command("df", "echo Filesystem 1024-blocks Used Available Capacity Mounted; echo /dev/x 9 9 3906250 50% /")
    done = ready.run("pega_setup")
    assert done.returncode == 1
    assert f"8 GB of free space are needed in {ready.root}, 4 GB are free" in done.stderr
    assert syncs(ready) == []
    assert not (ready.root / ".venv").exists()
    assert ready.run("pega_setup", PEGA_MIN_FREE_GB="4").returncode == 0


def test_of_two_set_ups_at_once_one_waits_for_the_other(ready: Shell, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    start = [ready.bin / "bash", "-c", "source launch/env.sh; pega_setup"]
    environment = ready.environment(HOLD=str(hold))

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(start, cwd=ready.root, env=environment, stderr=subprocess.PIPE, text=True)

    first = begin()
    while not syncs(ready):
        assert first.poll() is None
        time.sleep(0.02)
    second = begin()
    assert second.stderr is not None
    assert "another set-up runs in this clone" in second.stderr.readline()
    hold.unlink()
    assert first.wait(30) == second.wait(30) == 0
    assert syncs(ready) == ["cpu.txt"]
    first.communicate()
    second.communicate()


def test_servers_start_with_bytecode_and_one_thread_a_process(shell: Shell) -> None:
    show = 'echo "${PYTHONDONTWRITEBYTECODE-unset} $OMP_NUM_THREADS $VLLM_CPU_OMP_THREADS_BIND $VLLM_CACHE_ROOT"'
    done = shell.run(f"bash -c '{show}'", PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout == f"unset 1 nobind {shell.root}/.cache/vllm\n"


def test_settings_of_the_caller_stay(shell: Shell) -> None:
    show = 'echo "$OMP_NUM_THREADS $VLLM_CPU_OMP_THREADS_BIND $VLLM_CACHE_ROOT"'
    given = {"OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_CACHE_ROOT": "/cache"}
    assert shell.run(f"bash -c '{show}'", **given).stdout == "4 auto /cache\n"

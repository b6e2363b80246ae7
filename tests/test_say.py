"""``pega-omni say``."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest

from pega_omni_plugin.api.errors import ApiError
from pega_omni_plugin.audio.wav import wav_header
from pega_omni_plugin.cli import main
from pega_omni_plugin.say import split_wav


def frames(path: Path) -> tuple[int, int]:
    with wave.open(str(path)) as file:
        return file.getframerate(), file.getnframes()


def test_the_simulator_speaks_in_this_process(tmp_path: Path) -> None:
    target = tmp_path / "a.wav"
    assert main(["say", "ten chars.", "--model", "sim", "-o", str(target)]) == 0
    assert frames(target) == (24_000, 8 * 1920)
    assert main(["say", "ten chars.", "--model", "sim", "--speed", "2", "-o", str(target)]) == 0
    assert frames(target) == (24_000, 4 * 1920)


def test_the_text_may_come_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: "ten chars.", raising=False)
    assert main(["say", "-", "--model", "sim", "-o", str(tmp_path / "a.wav")]) == 0
    assert "0.64 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "--model", "sim"], "input is empty"),
        (["\udcff", "--model", "sim"], "UTF-8"),
        (["hi", "--model", "sim", "--voice", "nobody"], "nobody"),
        (["hi", "--model", "somewhere/else"], "--base-url"),
        (["hi", "--base-url", "http://127.0.0.1:9"], "is the server running"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["say", *arguments, "-o", str(tmp_path / "a.wav")]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("cut", [1, 43, 44, 45, 100])
def test_a_wav_header_may_come_in_pieces(cut: int) -> None:
    body = wav_header(16_000) + bytes(range(100))
    rate, pieces = split_wav(iter([body[:cut], body[cut:]]))
    assert rate == 16_000
    assert b"".join(pieces) == bytes(range(100))


def test_an_answer_that_is_no_wav_is_refused() -> None:
    with pytest.raises(ApiError, match="ends after 3 bytes"):
        split_wav(iter([b"abc"]))

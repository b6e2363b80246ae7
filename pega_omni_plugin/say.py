"""``pega-omni say``: one text to one WAV file, by the program itself in this process or by a running server."""

from __future__ import annotations

import argparse
import sys
import wave
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pega_omni_plugin.api.errors import ApiError
from pega_omni_plugin.api.requests import check_speech
from pega_omni_plugin.audio.wav import HEADER_BYTES
from pega_omni_plugin.engine.config import (
    STAGE_CONFIGS,
    ConfigError,
    load_stage_file,
    parse_options,
    program_class,
)
from pega_omni_plugin.engine.program import Admission, Program, RequestError
from pega_omni_plugin.nn.checkpoint import CheckpointError
from pega_omni_plugin.registration import program_directory, program_of

_SLOT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("text", help="what to say; - reads it from standard input")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the WAV file to write")
    parser.add_argument(
        "--model",
        default="piper",
        help="piper (default), sim or a checkpoint's directory; a served model with --base-url",
    )
    parser.add_argument("--voice", help="a voice of the model (default: its own)")
    parser.add_argument("--speed", type=float, help="1.0 is the voice's own pace")
    parser.add_argument("--base-url", help="ask this server, as in http://127.0.0.1:8000, instead of speaking here")


def run(known: argparse.Namespace) -> int:
    """Speak; returns the exit status."""
    text = sys.stdin.read() if known.text == "-" else known.text
    if any("\ud800" <= char <= "\udfff" for char in text):
        print("pega-omni: the text is not valid UTF-8", file=sys.stderr)
        return 1
    fields = {"input": text, "voice": known.voice, "speed": known.speed}
    document = {key: value for key, value in fields.items() if value is not None}
    try:
        seconds = _ask(known, document) if known.base_url else _speak(known, document)
    except (ApiError, ConfigError, CheckpointError, RequestError, OSError) as error:
        print(f"pega-omni: {error}", file=sys.stderr)
        return 1
    print(f"{known.output}: {seconds:.2f} s of speech")
    return 0


def _speak(known: argparse.Namespace, document: dict[str, Any]) -> float:
    checkpoint = program_directory(known.model) or Path(known.model)
    name = program_of(checkpoint)
    if name is None:
        raise ConfigError(f"model {known.model!r} cannot speak in this process; start a server and name it: --base-url")
    config = load_stage_file(STAGE_CONFIGS / f"{name}.yaml")
    kind, options = program_class(config.program), parse_options(config)
    program = kind.load(checkpoint, options, config.parts, slots=_SLOT)
    try:
        call = check_speech(document, program.info, (program.info.model,))
        prompt = kind.front(checkpoint, options, program.info).prepare(call.speech)
        program.prefill([Admission(_SLOT, call.speech, prompt)])
        return _write(known.output, program.info.sample_rate, _steps(program))
    finally:
        program.close()


def _steps(program: Program) -> Iterator[bytes]:
    while True:
        (output,) = program.step([_SLOT])
        if output.error is not None:
            raise ApiError(output.error)
        yield output.pcm.astype("<i2", copy=False).tobytes()
        if output.finish is not None:
            return


def _ask(known: argparse.Namespace, document: dict[str, Any]) -> float:
    import httpx

    body = document | {"response_format": "wav"} | ({} if known.model == "piper" else {"model": known.model})
    try:
        with httpx.stream("POST", f"{known.base_url}/v1/audio/speech", json=body, timeout=600) as answer:
            if answer.status_code != 200:
                raise ApiError(f"{known.base_url} answered {answer.status_code}: {answer.read().decode()}")
            rate, pieces = split_wav(answer.iter_bytes())
            return _write(known.output, rate, pieces)
    except httpx.HTTPError as error:
        raise ApiError(f"{known.base_url}: {error}; is the server running?") from error


def split_wav(pieces: Iterator[bytes]) -> tuple[int, Iterator[bytes]]:
    """Sample rate and samples of a streamed WAV. Raises ``ApiError`` when it ends inside its header."""
    head = b""
    while len(head) < HEADER_BYTES:
        try:
            head += next(pieces)
        except StopIteration:
            raise ApiError(f"the answer is no WAV: it ends after {len(head)} bytes") from None
    return int.from_bytes(head[24:28], "little"), chain([head[HEADER_BYTES:]], pieces)


def _write(path: Path, sample_rate: int, pieces: Iterator[bytes]) -> float:
    with path.open("wb") as opened, wave.open(opened, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        for piece in pieces:
            file.writeframesraw(piece)
        return file.tell() / sample_rate

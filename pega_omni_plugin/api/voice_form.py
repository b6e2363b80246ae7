"""From the body of ``POST /v1/audio/voices`` to a checked request, the first mistake answered by name.

Two forms are taken: the multipart form of OpenAI's API, with the recording as a file, and a JSON object, with the
recording as a data URL or base64. Fields of other servers are taken under their names too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Message, Receive

from pega_omni_plugin.api.errors import BodyTooLarge, InvalidRequest
from pega_omni_plugin.api.requests import parse_json
from pega_omni_plugin.api.voices import MAX_NAME_CHARS, VoiceNameError, check_name
from pega_omni_plugin.audio.recording import RecordingError, decode_data

MAX_BODY_BYTES = 20 << 20

MAX_TEXT_CHARS = 4096
"""Of a transcript and of a description."""

MAX_LANGUAGE_CHARS = 64

RECORDING = ("audio_sample", "audio", "ref_audio")
TRANSCRIPT = ("transcript", "ref_text")
DESCRIPTION = ("description", "prompt", "speaker_description")
IGNORED = ("consent", "type")
"""OpenAI's: a recording's id of the speaker's consent, and which of the two kinds of request this is."""

FIELDS = ("name", *RECORDING, *TRANSCRIPT, *DESCRIPTION, "language", *IGNORED)

_PARAM_CHARS = 100


@dataclass(frozen=True)
class VoiceRequest:
    """A voice to be made. ``data`` is an encoded recording, not yet decoded, ``audio_field`` the field it came in."""

    name: str
    data: bytes | None
    transcript: str | None
    description: str | None
    language: str | None
    audio_field: str = RECORDING[0]


async def parse_voice_form(request: Request) -> VoiceRequest:
    """Read and check a body of at most ``MAX_BODY_BYTES``.

    Raises:
        InvalidRequest: naming the first field that is wrong and what is allowed.
        BodyTooLarge: the body is over the limit; the rest of it is not read.
        starlette.requests.ClientDisconnect: the caller left.
    """
    bounded = Request(request.scope, _bounded(request.receive))
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return _check(await _multipart(bounded))
    if kind == "application/json":
        return _check(parse_json(await bounded.body()))
    raise InvalidRequest(
        f"the content type is {reprlib.repr(kind)}; multipart/form-data and application/json are allowed"
    )


def _bounded(receive: Receive) -> Receive:
    """``receive``, until it has given more than is allowed."""
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is over {MAX_BODY_BYTES} bytes; send a shorter recording, or mp3 or flac")
        return message

    return bounded


async def _multipart(request: Request) -> dict[str, str | bytes]:
    """The fields of a form; files as bytes."""
    parser = MultiPartParser(
        request.headers,
        request.stream(),  # type: ignore[arg-type]
        max_files=1,
        max_fields=len(FIELDS),
        # The whole is bounded.
        max_part_size=MAX_BODY_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message}") from error
    except UnicodeError as error:
        raise InvalidRequest("the form cannot be read in the charset it names; send UTF-8") from error
    try:
        fields: dict[str, str | bytes] = {}
        for name, value in form.multi_items():
            if name in fields:
                raise InvalidRequest(f"{reprlib.repr(name)} stands twice in the form", param=name[:_PARAM_CHARS])
            fields[name] = await value.read() if isinstance(value, UploadFile) else value
    finally:
        await form.close()
    return fields


def _check(fields: Mapping[str, Any]) -> VoiceRequest:
    for field in fields:
        if field not in FIELDS:
            raise InvalidRequest(
                f"unknown field {reprlib.repr(field)}; known fields: {', '.join(FIELDS)}", param=field[:_PARAM_CHARS]
            )
    named = _text(fields, ("name",), MAX_NAME_CHARS)
    if named is None:
        raise InvalidRequest("field 'name' is missing", param="name")
    try:
        name = check_name(named)
    except VoiceNameError as error:
        raise InvalidRequest(str(error), param="name") from error
    audio_field, data = _recording(fields)
    transcript = _text(fields, TRANSCRIPT, MAX_TEXT_CHARS)
    description = _text(fields, DESCRIPTION, MAX_TEXT_CHARS)
    if data is None and transcript is not None:
        said = _given(fields, TRANSCRIPT)
        raise InvalidRequest(f"{said} is what a recording says, and there is none; send {audio_field}", param=said)
    if data is None and description is None:
        raise InvalidRequest(f"a voice needs {audio_field} or a description; send one of them", param=audio_field)
    language = _text(fields, ("language",), MAX_LANGUAGE_CHARS)
    return VoiceRequest(name, data, transcript, description, language, audio_field)


def _given(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Which of the names of one thing was sent. Forms send fields that were left out as empty text."""
    given = [name for name in names if fields.get(name) not in (None, "")]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} say the same; send one of them", param=given[1])
    return given[0] if given else None


def _text(fields: Mapping[str, Any], names: tuple[str, ...], max_chars: int) -> str | None:
    field = _given(fields, names)
    if field is None:
        return None
    value = fields[field]
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be text", param=field)
    if len(value) > max_chars:
        raise InvalidRequest(f"{field}: {len(value)} characters, at most {max_chars} are allowed", param=field)
    # Half of a surrogate pair is no text, whatever charset it came in.
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequest(f"{field} has a NUL character or half a surrogate pair in it; remove it", param=field)
    return value.strip() or None


def _recording(fields: Mapping[str, Any]) -> tuple[str, bytes | None]:
    field = _given(fields, RECORDING)
    if field is None:
        return RECORDING[0], None
    value = fields[field]
    if isinstance(value, str):
        try:
            return field, decode_data(value)
        except RecordingError as error:
            raise InvalidRequest(f"{field} {error}", param=field) from error
    if not isinstance(value, bytes):
        raise InvalidRequest(f"{field} must be a file, a data URL or base64", param=field)
    if not value:
        raise InvalidRequest(f"{field} is an empty file; send a wav, flac, mp3 or ogg file", param=field)
    return field, value

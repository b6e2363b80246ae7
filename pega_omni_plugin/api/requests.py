"""From a request body to a checked ``Speech``: every rule before the engine, the first broken one answered."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from pega_omni_plugin.api.errors import InvalidRequest, ModelNotFound
from pega_omni_plugin.api.voices import StoredVoice
from pega_omni_plugin.engine.program import Option, ProgramInfo, Speech

Format = Literal["wav", "pcm"]

SEED = Option("integer", "Reproduces the draws of a request", minimum=0, maximum=2**63 - 1)
"""An option of every program."""

EXTENSIONS = ("language", "seed", "task_type", "cfg_scale", "ref_audio", "ref_text", "max_new_tokens")
"""Top-level fields of other speech servers, taken as the ``extra`` key of the same name."""

_VOICES_SHOWN = 12
_PARAM_CHARS = 100

# Messages repeat what was sent in brief: it may be a megabyte, or nested deeper than repr can follow.
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = 100
_BRIEF.maxlevel = 2


class VoiceReference(BaseModel):
    """A voice as an object."""

    model_config = ConfigDict(extra="ignore")

    id: StrictStr


class SpeechRequest(BaseModel):
    """The body of ``POST /v1/audio/speech``."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = Field(None, description="A served model; optional, there is one")
    input: StrictStr = Field(description="The text to speak")
    voice: StrictStr | VoiceReference | None = Field(None, description="A voice's id, or an object with it")
    instructions: StrictStr | None = Field(None, description="How to speak, for models that follow instructions")
    instruct: StrictStr | None = Field(None, description="The same under another server's name")
    response_format: StrictStr | None = Field(None, description="wav (default) or pcm")
    stream_format: StrictStr | None = Field(None, description="audio (default) or sse")
    stream: StrictBool | None = Field(None, description="Accepted; every response streams")
    speed: StrictFloat | StrictInt | None = Field(None, description="1.0 is the voice's own pace")
    extra: dict[str, Any] | None = Field(None, description="Options that the model declares")
    language: StrictStr | None = None
    seed: StrictInt | None = None
    task_type: StrictStr | None = None
    cfg_scale: StrictFloat | StrictInt | None = None
    ref_audio: StrictStr | None = None
    ref_text: StrictStr | None = None
    max_new_tokens: StrictInt | None = None
    user: StrictStr | None = Field(None, description="Accepted and not used")


@dataclass(frozen=True, slots=True)
class SpeechCall:
    """A checked request: what to speak, in a stored voice where one was named, and how the answer is framed."""

    speech: Speech
    format: Format
    sse: bool
    stored: StoredVoice | None = None


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object.

    Raises:
        InvalidRequest: it is not JSON, or not an object.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_json_type(document)}")
    return document


def no_stored_voice(name: str) -> StoredVoice | None:
    """The store of programs whose voices are their own."""
    return None


def check_speech(
    document: Mapping[str, Any],
    info: ProgramInfo,
    served: Collection[str],
    stored: Callable[[str], StoredVoice | None] = no_stored_voice,
) -> SpeechCall:
    """Check a speech request against what is served; ``stored`` finds a stored voice by id or name.

    Raises:
        InvalidRequest: naming the first field that is wrong and what is allowed.
        ModelNotFound: ``model`` is another one.
    """
    for name in document:
        # Before the schema, which would list every one of a megabyte of them.
        if name not in SpeechRequest.model_fields:
            known = ", ".join(SpeechRequest.model_fields)
            raise InvalidRequest(f"unknown field {_BRIEF.repr(name)}; known fields: {known}", param=name[:_PARAM_CHARS])
    try:
        request = SpeechRequest.model_validate(document)
    except ValidationError as error:
        raise _shape(error, document) from error
    if request.model is not None and request.model not in served:
        raise ModelNotFound(
            f"model {_BRIEF.repr(request.model)} is not served here; served: {', '.join(sorted(served))}",
            param="model",
            code="model_not_found",
        )
    response_format = request.response_format or "wav"
    if response_format not in ("wav", "pcm"):
        raise InvalidRequest(
            f"response_format {_BRIEF.repr(response_format)} is not one of wav, pcm", param="response_format"
        )
    stream_format = request.stream_format or "audio"
    if stream_format not in ("audio", "sse"):
        raise InvalidRequest(
            f"stream_format {_BRIEF.repr(stream_format)} is not one of audio, sse", param="stream_format"
        )
    if not request.input.strip():
        raise InvalidRequest("input is empty; send the text to speak", param="input")
    _check_text("input", request.input, info)
    voice, stored_voice = _voice(request, info, stored)
    speech = Speech(
        input=request.input,
        voice=voice,
        instructions=_instructions(request, info),
        speed=_speed(request.speed, info),
        **_extra(request, info),
    )
    return SpeechCall(speech, response_format, stream_format == "sse", stored_voice)  # type: ignore[arg-type]


def _check_text(field: str, text: str, info: ProgramInfo) -> None:
    if len(text) > info.max_input_chars:
        raise InvalidRequest(
            f"{field}: {len(text)} characters, at most {info.max_input_chars} are allowed", param=field
        )
    if "\0" in text:
        raise InvalidRequest(f"{field} has a NUL character at position {text.index(chr(0))}; remove it", param=field)


def _voice(
    request: SpeechRequest, info: ProgramInfo, stored: Callable[[str], StoredVoice | None]
) -> tuple[str, StoredVoice | None]:
    name = request.voice.id if isinstance(request.voice, VoiceReference) else request.voice
    brings_recording = bool(request.ref_audio or (request.extra or {}).get("ref_audio"))
    if name is None or (info.clones == "recording" and brings_recording):
        # Beside a recording a voice is a label: clients that must send one fill in anything.
        return info.default_voice, None
    known = {voice.id.lower(): voice.id for voice in info.voices}
    ours = known.get(name.lower()) or info.aliases.get(name.lower())
    if ours is not None:
        return ours, None
    found = stored(name)
    if found is not None:
        _check_stored(found, info)
        return info.default_voice, found
    listed = list(known.values())
    shown = ", ".join(listed[:_VOICES_SHOWN]) + (", …" if len(listed) > _VOICES_SHOWN else "")
    raise InvalidRequest(
        f"voice {_BRIEF.repr(name)} is unknown; GET /v1/audio/voices lists all: {shown}", param="voice"
    )


def _check_stored(voice: StoredVoice, info: ProgramInfo) -> None:
    if info.clones == "recording" and not voice.has_audio:
        raise InvalidRequest(f"voice {voice.id} has no recording, which model {info.model} imitates", param="voice")
    if info.clones == "description" and not voice.description:
        raise InvalidRequest(f"voice {voice.id} has no description, which model {info.model} follows", param="voice")


def _instructions(request: SpeechRequest, info: ProgramInfo) -> str | None:
    if request.instructions and request.instruct:
        raise InvalidRequest("instructions and instruct say the same; send one of them", param="instruct")
    text = request.instructions or request.instruct
    if not text:
        return None
    field = "instructions" if request.instructions else "instruct"
    if not info.instructions:
        raise InvalidRequest(f"model {info.model} does not follow {field}; leave the field out", param=field)
    _check_text(field, text, info)
    return text


def _speed(speed: float | None, info: ProgramInfo) -> float:
    slowest, fastest = info.speeds
    if speed is None:
        return 1.0
    if speed != 1 and slowest == fastest:
        raise InvalidRequest(f"speed {speed:g}: model {info.model} speaks at its own pace; leave it out", param="speed")
    if not slowest <= speed <= fastest:
        raise InvalidRequest(f"speed {speed:g} is not between {slowest:g} and {fastest:g}", param="speed")
    return float(speed)


def _extra(request: SpeechRequest, info: ProgramInfo) -> dict[str, Any]:
    extra = dict(request.extra or {})
    fields = dict.fromkeys(extra, "extra")
    for name in EXTENSIONS:
        value = getattr(request, name)
        if value is None:
            continue
        if name in extra:
            raise InvalidRequest(f"{name} stands both in the body and in extra; send one of them", param=name)
        extra[name] = value
        fields[name] = name
    options = {"seed": SEED} | dict(info.options)
    for key in sorted(extra):
        option, field = options.get(key), fields[key]
        where = "extra: " if field == "extra" else ""
        if option is None:
            known = ", ".join(sorted(options))
            raise InvalidRequest(
                f"{where}model {info.model} has no option {_BRIEF.repr(key)}; it has: {known}", param=field
            )
        if not _accepts(option, extra[key]):
            raise InvalidRequest(f"{where}{key} must be {_wanted(option)}, got {_BRIEF.repr(extra[key])}", param=field)
    seed = extra.pop("seed", None)
    return {"extra": extra, "seed": secrets.randbits(63) if seed is None else seed}


def _accepts(option: Option, value: Any) -> bool:
    if option.kind == "choice":
        return value in option.choices
    if option.kind == "boolean":
        return isinstance(value, bool)
    if option.kind == "text":
        return isinstance(value, str) and (option.maximum is None or len(value) <= option.maximum)
    kinds = (int,) if option.kind == "integer" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    low, high = option.minimum, option.maximum
    return (low is None or value >= low) and (high is None or value <= high)


def _wanted(option: Option) -> str:
    if option.kind == "choice":
        return f"one of {', '.join(option.choices)}"
    if option.kind == "boolean":
        return "true or false"
    if option.kind == "text":
        return "text" if option.maximum is None else f"text of at most {option.maximum} characters"
    kind = "an integer" if option.kind == "integer" else "a number"
    if option.minimum is None or option.maximum is None:
        return kind
    return f"{kind} from {option.minimum} to {option.maximum}"


def _shape(error: ValidationError, document: Mapping[str, Any]) -> InvalidRequest:
    """The first field that is missing or of a wrong type."""
    problem = error.errors()[0]
    name = str(problem["loc"][0])
    if problem["type"] == "missing":
        return InvalidRequest(f"field {name!r} is missing", param=name)
    wanted = "Input should be a string, or an object whose id is one" if name == "voice" else problem["msg"]
    return InvalidRequest(f"{name} has the wrong type: {wanted}, got {_json_type(document[name])}", param=name)


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")

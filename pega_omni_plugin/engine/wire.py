"""How a checked request travels from the API process to the engine process, and how an ending travels back.

vLLM-Omni carries a request's ``additional_information`` untouched. A request is one JSON string in it; the reason for
an ending is one JSON string in ``stop_reason``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from pega_omni_plugin.engine.program import FinishReason, ProgramInfo, Prompt, Speech

KEY = "pega"


@dataclass(frozen=True, slots=True)
class _Envelope:
    speech: Speech
    prompt: Prompt


_ENVELOPE = TypeAdapter(_Envelope)
_INFO = TypeAdapter(ProgramInfo)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ended: why, and how many frames it had."""

    finish: FinishReason
    frames: int


def encode_speech(speech: Speech, prompt: Prompt) -> dict[str, Any]:
    """The ``additional_information`` of a speech request and its prompt."""
    return {KEY: [orjson.dumps(_Envelope(speech, prompt)).decode()]}


def decode_speech(information: Any) -> tuple[Speech, Prompt]:
    """What ``encode_speech`` wrote, on the engine's side. Raises ``ValueError`` for a request that is not ours."""
    entry = information.entries.get(KEY) if information is not None else None
    try:
        envelope = _ENVELOPE.validate_json(entry.list_data[0] if entry is not None and entry.list_data else b"")
    except ValidationError as error:
        raise ValueError(
            "the request was not made by this package's API; send speech requests to /v1/audio/speech"
        ) from error
    return envelope.speech, envelope.prompt


def encode_ending(ending: Ending) -> str:
    """For ``stop_reason``."""
    return orjson.dumps(asdict(ending)).decode()


def decode_ending(text: str) -> Ending:
    """What ``encode_ending`` wrote."""
    return Ending(**orjson.loads(text))


def encode_info(info: ProgramInfo) -> bytes:
    """Program info as JSON."""
    return _INFO.dump_json(info)


def decode_info(text: bytes) -> ProgramInfo:
    """What ``encode_info`` wrote."""
    return _INFO.validate_json(text)

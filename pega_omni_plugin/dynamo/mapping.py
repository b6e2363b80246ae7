"""Between the requests and answers of Dynamo's request plane and those of our API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import dynamo.llm.exceptions as dynamo_errors
import pybase64

from pega_omni_plugin.api.errors import ApiError, InvalidRequest

HEALTH_CHECK = "_HEALTH_CHECK"

_FRONTEND_ONLY = {"extra_args", "nvext", "data_source"}


def speech_document(request: Mapping[str, Any]) -> dict[str, Any]:
    """The body of ``POST /v1/audio/speech`` that the frontend was sent.

    The frontend keeps the fields it knows at the top, moves the others under ``extra_args.media_passthrough`` and
    guidance under ``nvext``.

    Raises:
        InvalidRequest: for what this path cannot do.
    """
    if request.get("data_source") == "url":
        raise InvalidRequest("data_source url: audio is not stored here; leave the field out", param="data_source")
    document = {key: value for key, value in request.items() if key not in _FRONTEND_ONLY and value is not None}
    document |= (request.get("extra_args") or {}).get("media_passthrough") or {}
    guidance = (request.get("nvext") or {}).get("cfg_scale")
    if guidance is not None:
        document.setdefault("cfg_scale", guidance)
    if document.get("stream_format") == "sse":
        raise InvalidRequest(
            "stream_format sse: the Dynamo frontend sends raw audio only; leave the field out", param="stream_format"
        )
    return document


def audio_item(request_id: str, model: str, data: bytes, output_format: str, *, last: bool = False) -> dict[str, Any]:
    """A piece of audio as the frontend wants it."""
    pieces = [{"output_format": output_format, "b64_json": pybase64.b64encode(data).decode()}] if data else []
    return {
        "id": request_id,
        "object": "audio.speech",
        "model": model,
        "status": "completed" if last else "in_progress",
        "progress": 100 if last else 0,
        "created": int(time.time()),
        "data": pieces,
    }


def dynamo_error(error: ApiError) -> Exception:
    """What to raise so that the frontend answers with this error's status.

    ``WorkerUnavailable`` and its kin would take the worker out of routing for seconds and are never used.
    """
    if error.status == 400:
        return dynamo_errors.InvalidArgument(error.message)
    return dynamo_errors.HttpError(error.status, error.message)

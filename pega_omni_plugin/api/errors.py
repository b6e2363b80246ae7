"""Errors in OpenAI's shape, one type per kind of mistake, mapped to HTTP in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from pega_omni_plugin.engine.errors import EngineBusy, EngineDead, EngineError, EngineTimeout

RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """Answered as ``{"error": {"message", "type", "param", "code"}}`` with ``status``."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers besides the content type."""
        return {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}


class InvalidRequest(ApiError):
    """The body is wrong; ``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class ModelNotFound(ApiError):
    """``model`` is not served here."""

    status = 404
    type = "invalid_request_error"


class NotFound(ApiError):
    """There is no such thing here."""

    status = 404
    type = "invalid_request_error"


class VoiceTaken(ApiError):
    """A voice cannot be kept beside those there are."""

    status = 409
    type = "invalid_request_error"


class BodyTooLarge(ApiError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"


class Overloaded(ApiError):
    """The queue is full."""

    status = 429


class Unavailable(ApiError):
    """The engine is gone or not ready."""

    status = 503


class TimedOut(ApiError):
    """The engine did not answer in time."""

    status = 504


def from_engine(error: EngineError) -> ApiError:
    """The answer to an engine's failure."""
    if isinstance(error, EngineBusy):
        return Overloaded(str(error), code="engine_overloaded")
    if isinstance(error, EngineDead):
        return Unavailable(f"the engine has stopped: {error}", code="engine_dead")
    if isinstance(error, EngineTimeout):
        return TimedOut(str(error), code="engine_timeout")
    return ApiError(str(error))


def response(error: ApiError) -> Response:
    """The HTTP answer."""
    return Response(
        orjson.dumps(error.body), status_code=error.status, headers=dict(error.headers), media_type="application/json"
    )

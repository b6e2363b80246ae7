"""What can go wrong between the API and the engine, one type per kind."""

from __future__ import annotations


class EngineError(Exception):
    """Any of the below."""


class EngineBusy(EngineError):
    """All slots are taken and the queue is full; nothing was submitted."""


class EngineTimeout(EngineError):
    """The engine lives but did not answer in time."""


class RequestFailed(EngineError):
    """The engine ended this request with an error; others go on."""


class CallFailed(EngineError):
    """A control call was refused or raised inside the engine."""


class EngineDead(EngineError):
    """The engine process is gone, and with it everything it was doing."""

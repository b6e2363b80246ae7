"""Ending a serving process whose engine is gone."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os

from pega_omni_plugin.engine.errors import EngineDead

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3.0
"""From the engine's death to the server's exit: callers get their errors in it."""


def end_process(reason: EngineDead) -> None:
    """End this process with status 1 soon: whoever supervises it starts a new one."""
    logger.error("%s: this server ends with status 1", reason)
    asyncio.get_running_loop().call_later(GRACE_SECONDS, exit_now)


def exit_now() -> None:
    """Kill what this process started and end with status 1; an orderly shutdown waits for a dead engine for ever."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)

"""An extension of Dynamo's frontend: no delay on its connections.

The frontend (1.6.1) leaves Nagle's algorithm on, so on a kept connection the last chunk of a stream waits for the
client's delayed acknowledgement, 40 ms on Linux. Sockets accepted from a listener inherit its options there, so it is
enough to set ``TCP_NODELAY`` on the listeners of the frontend's process once they are open. Load it with
``--frontend-route-extension pega_omni_plugin.dynamo.nodelay:provider``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dynamo.llm import FrontendRoute

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 0.1
_LOOK_FOR_SECONDS = 60.0

_running: list[asyncio.Task[None]] = []
_ports: list[int] = []


def provider() -> list[Any]:
    """Called by the frontend inside its event loop, before it listens."""
    _running.append(asyncio.get_running_loop().create_task(_watch()))
    return [FrontendRoute("GET", "/pega/nodelay", lambda context: {"ports": _ports})]


async def _watch() -> None:
    done: set[int] = set()
    for _ in range(int(_LOOK_FOR_SECONDS / _LOOK_EVERY_SECONDS)):
        for descriptor, listener in listeners():
            with listener:
                if descriptor not in done:
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    done.add(descriptor)
                    _ports.append(listener.getsockname()[1])
                    logger.info("no delay on connections to port %d", _ports[-1])
        await asyncio.sleep(_LOOK_EVERY_SECONDS)


def listeners() -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP listeners: each descriptor, and a copy of the socket, which the caller closes."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not str(Path(f"/proc/self/fd/{name}").readlink()).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        stream = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if stream and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield int(name), copy
        else:
            copy.close()

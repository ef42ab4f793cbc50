"""Serves an ASGI application on a port, on the caller's own event loop: the gateway of a run, and `rollover serve`.

Owns the listening socket. What is answered is the application's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import Receive

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_CLIENT_KEEPS_S = 3600  # an idle connection: the client closes it first, so that no request meets its end


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process has handlers of its own."""
        yield


class HttpServer:
    """`app` on `port` (0: a free one) of `host`. ValueError where it cannot be had: it begins with `name`, the key or
    the option that gave the port."""

    def __init__(self, app: Any, port: int = 0, host: str = LOOPBACK, name: str = "port") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Of asyncio only connections of a socket that says its protocol have TCP_NODELAY: without it each answer over a
        # connection that is kept waits some 40 ms for an acknowledgement.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(_BACKLOG)  # or another process could take the port before `start`
        except (OSError, OverflowError) as error:
            self._socket.close()
            reason = getattr(error, "strerror", None) or error
            where = "" if host == LOOPBACK else f" of {host}"
            raise ValueError(f"{name} = {port}{where} cannot be served: {reason}. Use 0, a free one") from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        config = uvicorn.Config(
            app, log_level="critical", lifespan="off", ws="none", timeout_keep_alive=_CLIENT_KEEPS_S, access_log=False
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Returns when connections are taken."""
        self._serving = asyncio.ensure_future(self._server.serve([self._socket]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()

    async def close(self, grace_s: float = 0.0) -> None:
        """End every connection, and free the port. An answer that is being sent has `grace_s` seconds to its end."""
        if self._serving is not None:
            self._server.should_exit, self._server.force_exit = True, not grace_s
            if grace_s:
                await asyncio.wait([self._serving], timeout=grace_s)
                self._server.force_exit = True
            await asyncio.wait([self._serving])
        self._socket.close()


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass

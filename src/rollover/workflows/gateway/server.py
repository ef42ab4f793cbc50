"""Serves a gateway on a port of this machine, on the run's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

HOST = "127.0.0.1"
_CLIENT_KEEPS_S = 3600  # an idle connection: the client closes it first, so that no request meets its end


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The run has handlers of its own."""
        yield


class GatewayServer:
    """`app` on `port` (0: a free one). ValueError where the port is taken."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            raise ValueError(f"workflow.port = {port} cannot be served: {error.strerror}. Use 0, a free one") from error
        self.base_url = f"http://{HOST}:{self._socket.getsockname()[1]}/v1"
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

    async def close(self) -> None:
        """End every connection, and free the port."""
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait([self._serving])
        self._socket.close()

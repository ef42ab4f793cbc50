"""Serves an ASGI application on a port, on the caller's own event loop: the only HTTP server of ours.

    rollover serve, rollover view, the gateway of a run ──▶ HttpServer ──▶ Guard ──▶ their application

Owns the listening socket, and the end of a process that serves until a signal (`end_of_service`). Every application is
behind a Guard (http_guard.py). What is answered is the application's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.types import Receive

from rollover.http_guard import Guard

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_CLIENT_KEEPS_S = 3600  # an idle connection: the client closes it first, so that no request meets its end
_EXIT_CODES: dict[int, int] = {signal.SIGTERM: 0, signal.SIGINT: 130}
END_S = 8.0
"""Seconds from the signal to the end of a server's process: less than whoever started it waits before SIGKILL."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the process has its own handlers."""
        yield


class HttpServer:
    """`app` on `port` (0: a free one) of `host`. ValueError where it cannot be had: it begins with `name`, the key or
    the option that gave the port. `token` and `is_public`: see Guard; without a token no other machine may reach it.
    """

    def __init__(
        self,
        app: Any,
        port: int = 0,
        host: str = LOOPBACK,
        name: str = "port",
        *,
        token: str = "",
        is_public: Callable[[str], bool] | None = None,
    ) -> None:
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
            Guard(app, token, is_public),
            log_level="critical",
            lifespan="off",
            ws="none",
            timeout_keep_alive=_CLIENT_KEEPS_S,
            access_log=False,
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


def end_of_service(limit_s: float = END_S) -> asyncio.Future[int]:
    """Return a future of the exit code: 0 by SIGTERM, 130 by Ctrl-C. For the main thread, on its event loop.

    The process ends `limit_s` seconds after the signal, whatever it does: code of a library may hold the event loop up,
    or a thread may hang in a read. So a thread waits for signals, and not the event loop.
    """
    loop = asyncio.get_running_loop()
    code_future: asyncio.Future[int] = loop.create_future()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in _EXIT_CODES:
        signal.signal(number, lambda *_: None)  # without a handler in Python nothing is written to the pipe

    def watch() -> None:
        code: int | None = None
        while code is None:
            code = next((_EXIT_CODES[number] for number in os.read(woken, 1) if number in _EXIT_CODES), None)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: code_future.done() or code_future.set_result(code))
        time.sleep(limit_s)
        os.write(2, f"rollover: the server did not end within {limit_s:g} s of the signal: killed\n".encode())
        os._exit(code)

    threading.Thread(target=watch, daemon=True, name="signals").start()
    return code_future


async def body_of(request: Request, most_bytes: int) -> bytes | int:
    """Return a request's body, or the number of its bytes where it has more than `most_bytes`.

    A longer one is read to its end, so that its client reads why it is refused, and not kept.
    """
    chunks: list[bytes] = []
    num = 0
    async for chunk in request.stream():
        num += len(chunk)
        if num > most_bytes:
            chunks.clear()
        else:
            chunks.append(chunk)
    return num if num > most_bytes else b"".join(chunks)


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass

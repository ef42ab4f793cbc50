"""Serves the dashboard until the process is told to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence

from rollover.http_server import HttpServer
from rollover.view.app import make_app
from rollover.view.run_data import RunData

_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}


async def serve(runs: Sequence[RunData], host: str, port: int, token: str, ready: Callable[[str], None]) -> int:
    """0 by SIGTERM, 130 by Ctrl-C. `ready` gets the URL when it answers. ValueError where the port cannot be had."""
    server = HttpServer(make_app(runs, host, token), port, host, "--port")
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()
    for number, code in _CODES.items():
        loop.add_signal_handler(number, lambda code=code: told.done() or told.set_result(code))
    await server.start()
    ready(server.url)
    for run in runs:
        threading.Thread(target=run.read_ahead, name="read_ahead", daemon=True).start()
    try:
        return await told
    finally:
        await server.close()

"""Serves the dashboard until the process is told to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rollover.http_server import HttpServer, end_of_service
from rollover.plugins.dashboard.app import is_of_page, make_app
from rollover.plugins.dashboard.run_data import RunData


async def serve(runs: Sequence[RunData], host: str, port: int, token: str, ready: Callable[[str], None]) -> int:
    """0 by SIGTERM, 130 by Ctrl-C. `ready` gets the URL when it answers. ValueError where the port cannot be had."""
    server = HttpServer(make_app(runs), port, host, "--port", token=token, is_public=is_of_page)
    told = end_of_service()
    await server.start()
    ready(server.url)
    for run in runs:
        threading.Thread(target=run.read_ahead, name="read_ahead", daemon=True).start()
    try:
        return await told
    finally:
        await server.close()

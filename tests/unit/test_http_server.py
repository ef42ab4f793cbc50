"""What every server of ours is to its clients: answers at once."""

from __future__ import annotations

import asyncio
import http.client
import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollover.http_server import HttpServer

HELD_BACK_S = 0.04  # of Linux, for an answer whose second half waits until the client acknowledged the first


def test_an_answer_over_a_connection_that_is_kept_is_not_held_back() -> None:
    """The quickest of many, so that a busy machine is no matter: held back, each takes as long."""
    app = Starlette(routes=[Route("/", _answer)])
    assert asyncio.run(_quickest(app)) < HELD_BACK_S / 2


async def _answer(request: Request) -> JSONResponse:
    return JSONResponse({"told": True})


async def _quickest(app: Starlette) -> float:
    server = HttpServer(app)
    await server.start()
    try:
        return await asyncio.to_thread(_ask, server.port)
    finally:
        await server.close()


def _ask(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    took = []
    for _ in range(30):
        begun = time.perf_counter()
        connection.request("GET", "/")
        assert connection.getresponse().read() == b'{"told":true}'
        took.append(time.perf_counter() - begun)
    connection.close()
    return min(took[10:])  # the first packets of a connection are acknowledged at once

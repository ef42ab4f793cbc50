"""The dashboard over HTTP: the page and its parts, and what it asks as JSON.

    GET /                                the page: main.js, page.css, vendor/... (nothing of a run is in them)
    GET /api/runs                        the runs by number, as their "state" (RunData.state)
    GET /api/runs/0/<question>?<query>   RunData.answer
    GET /api/compare/<question>?<query>  the runs beside each other

Only GET. The page may run no script but its own files (Content-Security-Policy), and no page of another site can ask
(http_guard.py, which HttpServer puts before this). With a token every question needs it, in `Authorization: Bearer`;
the page, which is public, takes it from the end of its address, which a browser sends to nobody.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollover.http_server import HttpServer, end_of_service
from rollover.plugins.dashboard.compare import RunComparison
from rollover.plugins.dashboard.page_files import CONTENT_TYPES, page_files
from rollover.plugins.dashboard.query import NotFound
from rollover.plugins.dashboard.run_data import RunData

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",  # a newer version of the page may have the same address
}
_SMALL, _FAST = 1024, 1  # bytes that are not worth packing; what packing may cost


def is_of_page(path: str) -> bool:
    """Return whether the path is one of the page's files, which hold nothing of a run."""
    return not path.startswith("/api/")


def make_app(runs: Sequence[RunData]) -> ASGIApp:
    """Return the ASGI application. It goes behind a Guard with `is_of_page` as its public paths."""
    several = RunComparison(runs)

    def answer(question: Callable[[], Any]) -> Response:
        try:
            return _json(question())
        except NotFound as error:
            return _refused(404, str(error.args[0]))
        except ValueError as error:
            return _refused(400, str(error))
        except RecursionError:
            return _refused(400, "what is recorded there is nested too deeply to be told")

    def of_run(request: Request) -> Response:
        number, name = request.path_params["number"], request.path_params["name"]
        run = next((run for place, run in enumerate(runs) if str(place) == number), None)
        if run is None:
            return _refused(404, f"there is no run {number:.20}: there are {len(runs)}")
        return answer(lambda: run.answer(name, request.query_params))

    def of_several(request: Request) -> Response:
        return answer(lambda: several.answer(request.path_params["name"], request.query_params))

    api = Starlette(
        routes=[
            Route("/api/runs", lambda request: answer(lambda: [run.state() for run in runs])),
            Route("/api/runs/{number}/{name}", of_run),
            Route("/api/compare/{name}", of_several),
        ]
    )
    return _Front(GZipMiddleware(api, _SMALL, _FAST), _Page())


class _Page:
    """The files of the page, each at its name."""

    def __init__(self) -> None:
        self._files = page_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix("/") or "index.html"
        if name in self._files:
            kind = CONTENT_TYPES[Path(name).suffix]
            await Response(self._files[name], media_type=kind)(scope, receive, send)
        else:
            await _refused(404, "there is no such page")(scope, receive, send)


class _Front:
    """Refuses changes, and says to the browser what its answers may do."""

    def __init__(self, api: ASGIApp, page: ASGIApp) -> None:
        self._api, self._page = api, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        if scope["type"] != "http":
            return
        answer: ASGIApp
        if scope["method"] not in ("GET", "HEAD"):
            answer = _refused(405, "there is nothing here to change")
        else:
            answer = self._page if is_of_page(scope["path"]) else self._api
        await answer(scope, receive, with_headers)


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


def _json(value: Any) -> Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


def _refused(status: int, message: str) -> Response:
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    return Response(body, status, media_type="application/json")

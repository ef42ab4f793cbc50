"""The dashboard over HTTP: the page with its files, and JSON answers to its queries.

    GET /                             the page: main.js, page.css, vendor/... (without data of a run)
    GET /api/runs                     the runs by number, as their "state" (RunData.state)
    GET /api/runs/0/<name>?<query>    RunData.answer
    GET /api/compare/<name>?<query>   the runs beside each other

Only GET. The page may run no script but its own files (Content-Security-Policy), and pages of other sites cannot send
requests (http_guard.py, which HttpServer puts in front). With a token every API request needs it, in `Authorization:
Bearer`; the page itself is public and takes the token from the fragment of its address, which browsers do not send.
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
_SMALL, _FAST = 1024, 1  # bytes that are not worth compressing; compression level


def is_of_page(path: str) -> bool:
    """Return whether the path is one of the page's files, which have no data of a run."""
    return not path.startswith("/api/")


def make_app(runs: Sequence[RunData]) -> ASGIApp:
    """Return the ASGI application, to be served behind a Guard with `is_of_page` as its public paths."""
    several = RunComparison(runs)

    def answer(query: Callable[[], Any]) -> Response:
        try:
            return _json(query())
        except NotFound as error:
            return _refused(404, str(error.args[0]))
        except ValueError as error:
            return _refused(400, str(error))
        except RecursionError:
            return _refused(400, "the record is nested too deeply to be shown")

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
    return _SecurityMiddleware(GZipMiddleware(api, _SMALL, _FAST), _Page())


class _Page:
    """ASGI application of the page's files."""

    def __init__(self) -> None:
        self._files = page_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix("/") or "index.html"
        if name in self._files:
            kind = CONTENT_TYPES[Path(name).suffix]
            await Response(self._files[name], media_type=kind)(scope, receive, send)
        else:
            await _refused(404, "there is no such page")(scope, receive, send)


class _SecurityMiddleware:
    """Rejects other methods than GET, and adds the security headers."""

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
    """Serve until a signal: returns 0 after SIGTERM, 130 after Ctrl-C. ValueError if the port is taken.

    `ready` gets the URL when the server accepts requests.
    """
    server = HttpServer(make_app(runs), port, host, "--port", token=token, is_public=is_of_page)
    end = end_of_service()
    await server.start()
    ready(server.url)
    for run in runs:
        threading.Thread(target=run.read_ahead, name="read_ahead", daemon=True).start()
    try:
        return await end
    finally:
        await server.close()


def _json(value: Any) -> Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


def _refused(status: int, message: str) -> Response:
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    return Response(body, status, media_type="application/json")

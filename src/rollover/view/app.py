"""The dashboard over HTTP: the page and its parts, and what it asks as JSON.

    GET /                                the page: main.js, page.css, vendor/... (nothing of a run is in them)
    GET /api/runs                        the runs by number, as their "state" (RunData.state)
    GET /api/runs/0/<question>?<query>   RunData.answer
    GET /api/compare/<question>?<query>  the runs beside each other

Owns who may ask. Only GET. The page may run no script but its own files (Content-Security-Policy), and no other page of
the browser can ask: a request must name this server as its host (a name that somebody points to 127.0.0.1 is refused),
and of a run only the page itself may ask (a browser says of a picture or script in whose page it is).
With a token every question needs it, in `Authorization: Bearer`; the page takes it from the end of its address, which a
browser sends to nobody.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollover.engine.server.guard import TokenGuard
from rollover.track.sinks import to_json
from rollover.view.not_there import NotThere
from rollover.view.parts import CONTENT_TYPES, page_files
from rollover.view.run_data import RunData
from rollover.view.several import Several

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


def make_app(runs: Sequence[RunData], host: str, token: str = "") -> ASGIApp:
    """An ASGI application for a server that listens on `host`. `token` "": nobody needs one."""
    several = Several(runs)

    def answer(question: Callable[[], Any]) -> Response:
        try:
            return _json(question())
        except NotThere as error:
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
    return _Front(GZipMiddleware(TokenGuard(api, token), _SMALL, _FAST), _Page(), host)


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
    """Refuses what is not asked of this host, and says to the browser what its answers may do."""

    def __init__(self, api: ASGIApp, page: ASGIApp, host: str) -> None:
        self._api, self._page, self._host = api, page, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        if scope["type"] != "http":
            return
        asked = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        answer: ASGIApp
        if len(asked) != 1 or not is_named(asked[0], self._host):
            answer = _refused(403, "this server has another name: open the address that `rollover view` printed")
        elif scope["path"].startswith("/api/") and _of_another_site(scope):
            answer = _refused(403, "a page of another site may not ask")
        elif scope["method"] not in ("GET", "HEAD"):
            answer = _refused(405, "there is nothing here to change")
        else:
            answer = self._api if scope["path"].startswith("/api/") else self._page
        await answer(scope, receive, with_headers)


def _of_another_site(scope: Scope) -> bool:
    """Whether a browser says so (Sec-Fetch-Site); other programs say nothing, and typed addresses are "none"."""
    said = [value for name, value in scope["headers"] if name == b"sec-fetch-site"]
    return any(value not in (b"same-origin", b"none") for value in said)


def is_named(asked: str, host: str) -> bool:
    """Whether a request's host header means a server that listens on `host`.

    An address is never a name that somebody else could point here. Of names only localhost and `host` itself are this
    server's; one that listens everywhere has any, and a token.
    """
    name = asked.rsplit(":", 1)[0] if not asked.endswith("]") and ":" in asked else asked
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return name in ("localhost", host.lower()) or host in ("0.0.0.0", "::")


def _json(value: Any) -> Response:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a configuration may have an infinity
        text = json.dumps(to_json(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


def _refused(status: int, message: str) -> Response:
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    return Response(body, status, media_type="application/json")

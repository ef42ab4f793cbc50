"""Access control of every HTTP server of ours: requests of web pages of other sites, and requests without the token.

HttpServer puts a Guard before each application. vLLM loads it as `--middleware rollover.http_guard.Guard`, in an
environment of its own: only the standard library is imported here.

A server without a token listens on this machine alone, but so does every browser on it, and a browser sends requests
for any page it shows. Three headers, which a page cannot set, tell them apart:

    Host            a page whose own name was pointed to 127.0.0.1 (DNS rebinding) has that name here
    Origin          a POST of another page, and every CORS request, has the page's address here, or "null"
    Sec-Fetch-Site  images, scripts and forms of another page, which may have no Origin, are "cross-site" or "same-site"
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

TOKEN_VARIABLE = "ROLLOVER_SERVER_TOKEN"
_OF_THE_USER = (b"same-origin", b"none")  # Sec-Fetch-Site: the server's own page; an address that was typed
_MOST_SHOWN = 100
_Asgi = Callable[[Any, Any, Any], Awaitable[None]]


def token() -> str:
    """Return the token of this process's environment, or "" if there is none."""
    return os.environ.get(TOKEN_VARIABLE, "")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # other names may be of any machine


def check_open_to(host: str) -> None:
    """Raise ValueError if other machines could reach a server on `host` and there is no token."""
    if token() or is_loopback(host):
        return
    raise ValueError(
        f"--host {host} can be reached from other machines: set a token in the environment variable {TOKEN_VARIABLE},"
        " for this server and for its clients, or use --host 127.0.0.1"
    )


class Guard:
    """ASGI application that passes permitted requests on to `app` and answers the others with 401 or 403.

    With a token, requests need `Authorization: Bearer TOKEN`. No web page has the token, so their Host, Origin and
    Sec-Fetch-Site do not matter: cluster nodes have names. Without one, these three headers decide.
    `expected_token`: None takes the environment's, "" is none. `is_public`: paths that need no token, and to which
    pages of other sites may link; without a token their Host is checked all the same.
    """

    def __init__(
        self, app: _Asgi, expected_token: str | None = None, is_public: Callable[[str], bool] | None = None
    ) -> None:
        self._app, self._is_public = app, is_public or (lambda path: False)
        expected = token() if expected_token is None else expected_token
        self._expected = _digest(expected.encode()) if expected else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        status, message = refusal
        kind = {401: "Unauthorized", 403: "Forbidden"}[status]
        body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
        headers = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        """Return the status and the message of a refused request; None: it is permitted."""
        public = self._is_public(scope["path"])
        if self._expected is not None:
            if public or self._has_token(scope):
                return None
            return 401, f"wrong or missing token: send Authorization: Bearer TOKEN, with the server's {TOKEN_VARIABLE}"
        hosts = _values(scope, b"host")
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if not _names_this_machine(host):
            return 403, (
                f"Host {host[:_MOST_SHOWN]!r} is neither an IP address nor localhost, as web pages may point their own"
                f" name here: use http://127.0.0.1 and the port, or set a token in {TOKEN_VARIABLE} for server and"
                " clients"
            )
        if not public and _is_of_another_site(scope, host):
            return 403, (
                "a web page of another site sent this request (Origin or Sec-Fetch-Site): web pages may not use this"
                f" server. Set a token in {TOKEN_VARIABLE} for server and clients if this one should"
            )
        return None

    def _has_token(self, scope: Any) -> bool:
        given = _values(scope, b"authorization")
        kind, _, text = (given[0] if len(given) == 1 else b"").partition(b" ")
        # Digests have equal lengths: the time of the comparison tells nothing about the token.
        return kind.lower() == b"bearer" and hmac.compare_digest(_digest(text.strip()), self._expected or b"")


def _values(scope: Any, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header has an IP address, which no one else can point here, or localhost."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def _is_of_another_site(scope: Any, host: str) -> bool:
    """Return whether a browser says so. Other programs send neither header."""
    own = (f"http://{host}".lower(), f"https://{host}".lower())  # the second behind a proxy with TLS
    origins = [value.decode("latin-1").lower() for value in _values(scope, b"origin")]
    sites = [value.lower() for value in _values(scope, b"sec-fetch-site")]
    return any(origin not in own for origin in origins) or any(site not in _OF_THE_USER for site in sites)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()

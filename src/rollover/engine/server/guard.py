"""Who may ask: whoever has the token. For any ASGI server, vLLM's too: nothing but the standard library.

vLLM: --middleware rollover.engine.server.guard.TokenGuard
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "ROLLOVER_SERVER_TOKEN"
_Asgi = Callable[[Any, Any, Any], Awaitable[None]]


def token() -> str:
    """The token of this process's environment; "" where there is none."""
    return os.environ.get(VARIABLE, "")


def is_loopback(host: str) -> bool:
    """Whether this machine alone can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # of other names nobody knows


def check_open_to(host: str) -> None:
    """ValueError where a server on `host` could be asked by other machines, and there is no token."""
    if token() or is_loopback(host):
        return
    raise ValueError(
        f"--host {host} can be reached from other machines: set a token in the environment variable {VARIABLE},"
        " for this server and for whoever asks it, or use --host 127.0.0.1"
    )


class TokenGuard:
    """`app`, for requests with `Authorization: Bearer TOKEN`; the others get 401. `expected` None: the environment's
    token. "" lets everyone in."""

    def __init__(self, app: _Asgi, expected: str | None = None) -> None:
        self._app = app
        self._expected = _digest((token() if expected is None else expected).encode())
        self._open = not (token() if expected is None else expected)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._open or scope["type"] not in ("http", "websocket") or self._has_token(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        message = f"a wrong token, or none: send Authorization: Bearer TOKEN, as the server's {VARIABLE} has it"
        body = json.dumps({"error": {"message": message, "type": "Unauthorized", "code": 401}}).encode()
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _has_token(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        kind, _, text = (given[0] if len(given) == 1 else b"").partition(b" ")
        # Of digests, which are equally long: the time tells nothing of the token.
        return kind.lower() == b"bearer" and hmac.compare_digest(_digest(text.strip()), self._expected)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()

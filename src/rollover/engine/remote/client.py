"""HTTP to one server. Owns its connections, and maps failed answers to exceptions; knows no path, and no rollout.

Streams have connections of their own, so that a call of control never waits behind them. They have no time-out as a
whole: whoever reads one decides how long it may be silent. Idle connections are closed before the server does it (5 s
in uvicorn), since a request that is sent as that happens would be lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import TYPE_CHECKING, Any

from rollover.http_guard import token

if TYPE_CHECKING:
    import aiohttp

MOST_ANSWER_BYTES = 2**26
"""Of an answer, or of one event of a stream: a server that fails may send without end."""
_KEEP_ALIVE_S = 3.0
_CONNECT_S = 10.0
_CONTROL_CONNECTIONS = 16
_TRIES = 3
_LATE = 0.25  # a time-out that is noticed by this share too late says that the event loop stood still


class ServerFailed(RuntimeError):
    """A server did not do what it was asked for; what it had given before counts."""


class ServerRefused(ServerFailed):
    """A server answered that it will not do this, and is as it was before. `status`: of its answer; 0: it said so in
    another way. `said`: its own words."""

    def __init__(self, message: str, status: int = 0, said: str = "") -> None:
        super().__init__(message)
        self.status, self.said = status, said


def library() -> Any:
    """aiohttp. ValueError, with the command that installs it, if it is missing."""
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError('engine.kind = "remote" needs aiohttp: pip install "rollover[remote]"') from error
    return aiohttp


def headers(token: str) -> dict[str, str]:
    """Return what every call carries: the token, unless it is empty."""
    return {"Authorization": f"Bearer {token}"} if token else {}


class ServerClient:
    """One server at `url` (http://host:port). To be used on one event loop, and closed there.

    `server_token`: the server's; None: that of the environment, if there is one.
    """

    def __init__(self, url: str, server_token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = headers(token() if server_token is None else server_token)
        self._library = library()
        self._streams: aiohttp.ClientSession | None = None
        self._control: aiohttp.ClientSession | None = None
        self._closed = False

    def _open(self, **connector: Any) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerFailed("it was given up")
        return self._library.ClientSession(
            connector=self._library.TCPConnector(**connector),
            timeout=self._library.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers=self._headers,
        )

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """Post, and yield the data of each event that the server sends (text/event-stream). Leaving it early closes the
        connection, which ends the request.

        ValueError for a status of 400: no server can ever do this; ServerFailed if it fails, also half-way.
        """
        if self._streams is None:
            self._streams = self._open(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        try:
            async with self._streams.post(self.url + path, json=body) as response:
                if response.status != 200:
                    said = message_of(await _text(response))
                    raise ValueError(said) if response.status == 400 else ServerFailed(f"{response.status}: {said}")
                async for line in _lines(response.content.iter_any()):
                    if line.startswith(b"data:"):
                        yield line[5:].decode(errors="replace").strip()
        except (TimeoutError, self._library.ClientError, OSError) as error:
            raise ServerFailed(f"the connection broke: {error!r}") from error

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float, **params: str) -> Any:
        """The JSON of its answer. ServerRefused for a status of 400 or more; ServerFailed if none comes in `limit_s`."""
        return await self._call("POST", path, limit_s, json=body, params=params)

    async def get(self, path: str, *, limit_s: float) -> Any:
        """As `post`."""
        return await self._call("GET", path, limit_s)

    async def ask(self, path: str, *, limit_s: float) -> dict[str, Any]:
        """Get a JSON object. Retries a time-out that this process caused itself, as its event loop stood still."""
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                said = await self.get(path, limit_s=limit_s)
            except ServerRefused:
                raise
            except ServerFailed:
                if time.monotonic() - began < limit_s * (1 + _LATE):
                    raise
                continue
            if not isinstance(said, dict):
                raise ServerFailed(f"{path} was answered by what is no JSON object: {str(said)[:200]}")
            return said
        raise ServerFailed(f"{path} was not answered")

    async def _call(self, method: str, path: str, limit_s: float, **values: Any) -> Any:
        if self._control is None:
            # A connection each: vLLM closes one behind a status of 500, and the next call would be lost with it.
            self._control = self._open(limit=_CONTROL_CONNECTIONS, force_close=True)
        limit = self._library.ClientTimeout(total=limit_s, sock_connect=min(limit_s, _CONNECT_S))
        try:
            async with self._control.request(method, self.url + path, timeout=limit, **values) as response:
                text = await _text(response)
                if response.status >= 400:
                    said = message_of(text)
                    raise ServerRefused(f"{path} answered {response.status}: {said}", response.status, said)
                return json.loads(text) if text else {}
        except TimeoutError as error:
            raise ServerFailed(f"{path} was not answered within {limit_s:.3g} s") from error
        except (self._library.ClientError, OSError, ValueError, RuntimeError) as error:  # the last: it was closed
            if isinstance(error, ServerFailed):
                raise
            raise ServerFailed(f"{path} failed: {error!r}") from error

    async def close(self) -> None:
        """Close its connections; what is read from them fails, and what is asked from now on."""
        self._closed = True
        for session in (self._streams, self._control):
            if session is not None:
                await session.close()
        self._streams = self._control = None


async def _text(response: Any) -> str:
    """Return the body as UTF-8, whatever charset the server names: Python has codecs that are no text encodings."""
    content = bytearray()
    async for data in response.content.iter_any():
        content += data
        if len(content) > MOST_ANSWER_BYTES:
            raise ServerFailed(f"its answer has more than {MOST_ANSWER_BYTES:,} bytes")
    return content.decode(errors="replace")


async def _lines(parts: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream, without their ends. ServerFailed for one that is too long."""
    line = bytearray()
    async for data in parts:
        first, *others = data.split(b"\n")
        line += first
        for other in others:
            yield bytes(line)
            line = bytearray(other)
        if len(line) > MOST_ANSWER_BYTES:
            raise ServerFailed(f"it sent an event of more than {MOST_ANSWER_BYTES:,} bytes")


def message_of(text: str) -> str:
    """What a server says of an error, as far as it says it in JSON."""
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, AttributeError, RecursionError):
        return text[:500]

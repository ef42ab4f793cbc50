"""HTTP client of one server; maps error responses to exceptions.

Streams have their own connections, so that control calls never wait behind them. They have no total timeout: the reader
decides how long a stream may be silent. The client closes idle connections before the server does (5 s in uvicorn),
because a request sent at that moment would be lost.
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
"""Of a response, or of one event of a stream: a failing server may send without end."""
_KEEP_ALIVE_S = 3.0
_CONNECT_S = 10.0
_CONTROL_CONNECTIONS = 16
_TRIES = 3
_LATE = 0.25  # a timeout noticed later than this share was caused by a blocked event loop


class ServerFailed(RuntimeError):
    """A server failed at a request. Tokens received before count."""


class ServerRefused(ServerFailed):
    """A server refused a request, and its state is unchanged. `status`: HTTP status, or 0. `said`: its message."""

    def __init__(self, message: str, status: int = 0, said: str = "") -> None:
        super().__init__(message)
        self.status, self.said = status, said


def library() -> Any:
    """Return aiohttp. Raises ValueError, with the command that installs it, if it is missing."""
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError('engine.kind = "remote" needs aiohttp: pip install "rollover[remote]"') from error
    return aiohttp


def headers(token: str) -> dict[str, str]:
    """Return the headers of every request: the token, unless it is empty."""
    return {"Authorization": f"Bearer {token}"} if token else {}


class ServerClient:
    """Client of the server at `url` (http://host:port). Use and close it on one event loop.

    `server_token`: the server's token; None: that of the environment, if set.
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
            raise ServerFailed("its client is closed")
        return self._library.ClientSession(
            connector=self._library.TCPConnector(**connector),
            timeout=self._library.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers=self._headers,
        )

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """Post, and yield the data of each event of the response (text/event-stream).

        Leaving it early closes the connection, which ends the request. Raises ValueError for status 400 (invalid for
        any server), ServerFailed for other failures, also half-way.
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
        """Return the JSON of the response. Raises ServerRefused for status >= 400, ServerFailed after `limit_s`."""
        return await self._call("POST", path, limit_s, json=body, params=params)

    async def get(self, path: str, *, limit_s: float) -> Any:
        """Return the JSON of the response, as `post`."""
        return await self._call("GET", path, limit_s)

    async def get_object(self, path: str, *, limit_s: float) -> dict[str, Any]:
        """Get a JSON object. Retries after a timeout that this process's blocked event loop caused."""
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
                raise ServerFailed(f"{path} did not return a JSON object: {str(said)[:200]}")
            return said
        raise ServerFailed(f"{path} was not answered")

    async def _call(self, method: str, path: str, limit_s: float, **values: Any) -> Any:
        if self._control is None:
            # A connection per call: vLLM closes one after status 500, and the next call on it would be lost.
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
        except (self._library.ClientError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: closed
            if isinstance(error, ServerFailed):
                raise
            raise ServerFailed(f"{path} failed: {error!r}") from error

    async def close(self) -> None:
        """Close the connections; pending and later calls fail."""
        self._closed = True
        for session in (self._streams, self._control):
            if session is not None:
                await session.close()
        self._streams = self._control = None


async def _text(response: Any) -> str:
    """Return the body as UTF-8, whatever charset the server names: not all of Python's codecs are text encodings."""
    content = bytearray()
    async for data in response.content.iter_any():
        content += data
        if len(content) > MOST_ANSWER_BYTES:
            raise ServerFailed(f"its answer has more than {MOST_ANSWER_BYTES:,} bytes")
    return content.decode(errors="replace")


async def _lines(parts: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream, without line ends. Raises ServerFailed for one that is too long."""
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
    """Return the error message of a response body: of JSON if possible, else the text."""
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, AttributeError, RecursionError):
        return text[:500]

"""HTTP client for services that rewards use: POST JSON, with retries, a concurrency limit, and a deadline.

Retried are status 429 and 5xx, connection errors, timeouts and truncated answers. The API token is masked in answers,
so that it reaches no file and no message. Retries end before the deadline of the reward call: a dead service must not
look like a reward function that hangs, which would also discard the scores of other samples.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollover.back_off import back_off_s

_SPARE, _MAX_SPARE_S = 0.25, 3.0  # fraction of a call's time that is reserved for processing the answers
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0
_MAX_ANSWER_BYTES = 16 << 20
_MIN_SECRET_CHARS = 12  # shorter tokens are placeholders for local servers ("EMPTY")
_Answer = TypeVar("_Answer")


class ServiceFailed(RuntimeError):
    """The service gave no valid answer."""


class TransientFailure(Exception):
    """A failure that is worth a retry."""


class _Deadline:
    """Deadline of the worker's present call; it has one call at a time."""

    ends = math.inf


def set_deadline(limit_s: float) -> None:
    """Set the deadline of the requests of a call that begins now and may take `limit_s` (rewards.timeout_s)."""
    _Deadline.ends = time.monotonic() + limit_s - min(_SPARE * limit_s, _MAX_SPARE_S)


class Service:
    """Client of `url`: at most `concurrency` requests in flight, each with `timeout_s` and up to `retries` retries.

    `what`: the reward's name in messages. `token`: bearer token; "": none. ValueError if aiohttp is missing, or for an
    invalid url or number.
    """

    def __init__(
        self,
        what: str,
        url: str,
        *,
        timeout_s: float,
        concurrency: int,
        retries: int,
        token: str = "",
    ) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise ValueError(f"{what} needs aiohttp: pip install 'rollover[remote]'") from error
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{what}: url = {url!r} is no http:// or https:// address")
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise ValueError(f"{what}: {name} = {value}: it must be at least {least}")
        self._aiohttp: Any = aiohttp
        self.what, self.url = what, url
        self._limit = aiohttp.ClientTimeout(total=timeout_s)
        self._concurrency, self._retries = concurrency, retries
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._secret = token.encode("utf-8", "surrogateescape") if len(token) >= _MIN_SECRET_CHARS else b""
        self._session: Any = None
        self.first_pause_s = _FIRST_PAUSE_S

    async def post(self, body: Mapping[str, Any], read: Callable[[bytes], _Answer]) -> _Answer:
        """POST `body` and return `read(answer)`; `read` raises TransientFailure for an invalid answer. ServiceFailed if
        every try failed, or the service refused the request."""
        if self._session is None:  # bound to the running event loop, the worker's only one
            connections = self._aiohttp.TCPConnector(limit=self._concurrency)
            self._session = self._aiohttp.ClientSession(
                connector=connections, headers=self._headers, timeout=self._limit, trust_env=False
            )
            self._slots = asyncio.Semaphore(self._concurrency)
        why = "it is silent, or too slow for so many requests"
        left_s = None if math.isinf(_Deadline.ends) else max(0.0, _Deadline.ends - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                for attempt in range(self._retries + 1):
                    if attempt:
                        pause_s = back_off_s(attempt, self.first_pause_s, _MAX_PAUSE_S)
                        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    async with self._slots:
                        try:
                            return read(await self._request(body))
                        except TransientFailure as failure:
                            why = str(failure)
        except TimeoutError:
            raise ServiceFailed(
                f"{self.what}: {self.url} gave no answer in the time of the call (rewards.timeout_s): {why}"
            ) from None
        raise ServiceFailed(f"{self.what}: {self.url} failed {self._retries + 1} times: {why}")

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, body: Mapping[str, Any]) -> bytes:
        try:
            # A redirect would drop the body.
            async with self._session.post(self.url, json=body, allow_redirects=False) as response:
                if response.status == 429 or response.status >= 500:
                    raise TransientFailure(f"status {response.status}")
                answer = await _read(response)
                if self._secret:
                    answer = answer.replace(self._secret, b"***")
                if response.status != 200:
                    start = answer[:200].decode("utf-8", "replace")
                    raise ServiceFailed(f"{self.what}: {self.url} refused: status {response.status}: {start}")
                return answer
        except TimeoutError:
            raise TransientFailure(f"no answer in {self._limit.total:g} s") from None
        except self._aiohttp.ClientError as error:
            raise TransientFailure(f"{type(error).__name__}: {error}") from None


async def _read(response: Any) -> bytes:
    """Read a whole answer. TransientFailure if it is too long."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise TransientFailure(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)

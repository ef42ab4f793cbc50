"""A service over HTTP that a reward asks: JSON out, an answer back, and the same again where it failed.

Owns what may pass (429, 5xx, a connection that breaks or stays silent, half an answer), how long is waited before the
next try, how many requests are under way, and the token that they carry, which no answer of the service brings into a
file or a message. Nothing is tried beyond the time of the call that it is for: a service that is dead must not look
like a reward function that hangs, and what others answered counts. Never reads what an answer means.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollover.back_off import back_off_s

_SPARE, _MOST_SPARE_S = 0.25, 3.0  # of the time of a call, for what is done with its answers
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_MAX_ANSWER_BYTES = 16 << 20
_SHORTEST_SECRET = 12  # characters: what servers of one's own are given ("EMPTY") is none
_Answer = TypeVar("_Answer")


class ServiceFailed(RuntimeError):
    """The service gave no answer that is one."""


class Again(Exception):
    """A failure that may pass."""


class _Time:
    """When the present call of this worker has to be through; it has one call at a time."""

    ends = math.inf


def within(limit_s: float) -> None:
    """A call begins that has so many seconds (rewards.timeout_s): what services were asked by then has failed."""
    _Time.ends = time.monotonic() + limit_s - min(_SPARE * limit_s, _MOST_SPARE_S)


class Service:
    """POSTs to `url`, at most `concurrency` requests at a time, each with a limit of `timeout_s` and up to `retries`
    further tries. `what`: of the reward, for messages. `token`: that it wants; "" = none. ValueError where aiohttp is
    missing, or the url is none."""

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
        self._secret = token.encode("utf-8", "surrogateescape") if len(token) >= _SHORTEST_SECRET else b""
        self._session: Any = None
        self.first_pause_s = _FIRST_PAUSE_S

    async def post(self, body: Mapping[str, Any], read: Callable[[bytes], _Answer]) -> _Answer:
        """What `read` makes of the answer; it raises `Again` for one that is none. ServiceFailed when every try failed,
        or one was refused for good."""
        if self._session is None:  # of the event loop that runs now, which is the worker's only one
            connections = self._aiohttp.TCPConnector(limit=self._concurrency)
            self._session = self._aiohttp.ClientSession(
                connector=connections, headers=self._headers, timeout=self._limit, trust_env=False
            )
            self._free = asyncio.Semaphore(self._concurrency)
        why = "it is silent, or too slow for so many requests"
        left_s = None if math.isinf(_Time.ends) else max(0.0, _Time.ends - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                for attempt in range(self._retries + 1):
                    if attempt:
                        pause_s = back_off_s(attempt, self.first_pause_s, _LONGEST_PAUSE_S)
                        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    async with self._free:
                        try:
                            return read(await self._once(body))
                        except Again as again:
                            why = str(again)
        except TimeoutError:
            raise ServiceFailed(
                f"{self.what}: {self.url} gave no answer in the time of the call (rewards.timeout_s): {why}"
            ) from None
        raise ServiceFailed(f"{self.what}: {self.url} failed {self._retries + 1} times: {why}")

    async def close(self) -> None:
        """End its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _once(self, body: Mapping[str, Any]) -> bytes:
        try:
            # Elsewhere it would be another question: a redirect turns it into one without a body.
            async with self._session.post(self.url, json=body, allow_redirects=False) as response:
                if response.status == 429 or response.status >= 500:
                    raise Again(f"status {response.status}")
                answer = await _read(response)
                if self._secret:
                    answer = answer.replace(self._secret, b"***")
                if response.status != 200:
                    start = answer[:200].decode("utf-8", "replace")
                    raise ServiceFailed(f"{self.what}: {self.url} refused: status {response.status}: {start}")
                return answer
        except TimeoutError:
            raise Again(f"no answer in {self._limit.total:g} s") from None
        except self._aiohttp.ClientError as error:
            raise Again(f"{type(error).__name__}: {error}") from None


async def _read(response: Any) -> bytes:
    """All of an answer, as far as it may be long."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise Again(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)

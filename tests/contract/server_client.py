"""A client of vLLM's /inference/v1/generate and its neighbours, as plain as can be: what checks of servers ask with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

LIMIT_S = 120.0
"""For one answer: a machine that is busy with other tests takes its time."""


class ErrorEvent(Exception):
    """The stream ended with an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]


@dataclass
class Answer:
    """What came of a request: its tokens so far, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """Tokens of each chunk."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    done: bool = False

    def add(self, choice: dict[str, Any]) -> None:
        """A chunk's choice."""
        assert self.finish_reason is None, "a chunk after the last one"
        tokens = choice["token_ids"] or []
        if choice["logprobs"] is not None:
            content = choice["logprobs"]["content"]
            assert [entry["token_id"] for entry in content] == tokens
            self.logprobs += [entry["logprob"] for entry in content]
        self.tokens += tokens
        self.chunks.append(len(tokens))
        self.finish_reason, self.stop_reason = choice["finish_reason"], choice["stop_reason"]
        if self.finish_reason is None:
            assert not choice["weight_versions"], "spans come with the last chunk"
        else:
            self.spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or []]


class Client:
    """Of the server at `url`. Use as an asynchronous context manager."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url, self._headers = url, {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> Self:
        limits = aiohttp.ClientTimeout(total=None, sock_read=LIMIT_S, sock_connect=LIMIT_S)
        # Each on a connection of its own: control calls never wait behind a stream.
        # vLLM closes what has been idle for 5 s, which a busy machine may not notice before it asks again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(headers=self._headers, timeout=limits, connector=connector)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def get(self, path: str) -> tuple[int, Any]:
        """Status, and the body: as JSON where it is some."""
        async with self.session.get(self.url + path) as response:
            return response.status, _read(await response.text())

    async def post(self, path: str, body: Any = None, *, data: bytes | None = None) -> tuple[int, Any]:
        """As `get`. `data` in place of a body that is JSON."""
        given: dict[str, Any] = {} if body is None else {"json": body}
        if data is not None:
            given = {"data": data, "headers": {"Content-Type": "application/json"}}
        async with self.session.post(self.url + path, **given) as response:
            return response.status, _read(await response.text())

    async def ok(self, path: str, body: Any = None) -> Any:
        """The body of a POST that must work."""
        status, answer = await self.post(path, body)
        assert status == 200, (path, status, answer)
        return answer

    @asynccontextmanager
    async def stream(self, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[Answer]]:
        """The answer as it grows: the same object after each event. Left early, it closes the connection."""
        url = f"{self.url}/inference/v1/generate"
        async with self.session.post(url, json=body | {"stream": True}) as response:
            if response.status != 200:
                raise ErrorEvent(_read(await response.text())["error"] | {"code": response.status})
            yield _events(response)

    async def generate(self, body: dict[str, Any]) -> Answer:
        """The whole answer. ErrorEvent where it is refused or fails."""
        async with self.stream(body) as events:
            *_, answer = [Answer()] + [grown async for grown in events]
        assert answer.done and answer.finish_reason is not None, "the stream broke off"
        return answer

    async def count(self, *names: str) -> float:
        """The sum of these metrics."""
        _, text = await self.get("/metrics")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0] in names]
        assert len(found) >= len(names), names
        return sum(found)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Answer]:
    answer = Answer()
    async for line in response.content:
        if not line.strip():
            continue
        assert line.startswith(b"data: "), line
        if line.strip() == b"data: [DONE]":
            answer.done = True
            yield answer
            return
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise ErrorEvent(event["error"])
        for choice in event["choices"]:
            answer.add(choice)
        answer.usage = event.get("usage") or answer.usage
        yield answer


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

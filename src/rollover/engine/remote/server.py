"""One server as the client sees it, and one request under way there.

Attempt.run: POST generate ──chunks──▶ Generation
              └ its end is wanted ─▶ abort, again until the stream ends ─▶ after grace_s the connection is closed
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollover.back_off import back_off_s
from rollover.engine.protocol import EngineDied
from rollover.engine.remote.client import ServerClient
from rollover.engine.remote.generation import Generation
from rollover.engine.remote.media import check_expansion, takes_no_images
from rollover.engine.remote.wire import Chunk, ServerFailed, ShownPrompt, Span, abort_body, request_body
from rollover.engine.validate import usable

_ABORT_AGAIN_S = 0.05  # at first; then twice as long each time
_ABORT_AGAIN_MAX_S = 2.0


@dataclass(eq=False)
class Server:
    """`version`: of the weights that it has, stamped on what comes; None: it has none of this run's.

    `serves`: it takes requests. `updating`: weights are handed to it, and it may answer nothing meanwhile. `sleeps`:
    the trainer has its GPUs, and it gets no request.
    """

    name: str
    client: ServerClient
    version: int | None = None
    serves: bool = False
    updating: bool = False
    sleeps: bool = False
    last_token: float = 0.0
    attempts: set[Attempt] = field(default_factory=set)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something failed there, so that it is looked at now."""

    def resumed_with(self, version: int, *, cleared: bool) -> None:
        """What it sends from now on was sampled under `version`. `cleared`: what it had computed before is no more."""
        self.version = version
        for attempt in self.attempts:
            attempt.resumed_with(version, cleared=cleared)


COUNTS = (
    *(f"engine/{what}" for what in ("decode_steps", "prefill_tokens", "reprefill_tokens", "surplus_tokens")),
    *(f"engine/{what}" for what in ("span_mismatches", "lost_requests", "abandoned_requests")),
    *(f"kv/{what}" for what in ("stale_prefix_tokens", "kept_tokens", "shared_prompt_tokens")),
)
"""What is counted of requests, over all servers."""


class Attempt:
    """One request for `generation` at `server`, under `request_id`, which no other one ever had."""

    def __init__(  # noqa: PLR0913 - keyword-only; the request's context
        self,
        generation: Generation,
        server: Server,
        request_id: str,
        counts: Counter[str],
        *,
        run: str,
        grace_s: float,
        salt: str | None = None,
        images: Sequence[Mapping[str, Any]] = (),
        vocab_size: int | None = None,
    ) -> None:
        """`images`: content_parts of the rollout."""
        assert server.version is not None
        self.generation, self.server, self.request_id, self.counts = generation, server, request_id, counts
        self.version = server.version
        self._run, self._grace_s, self._salt, self._vocab_size = run, grace_s, salt, vocab_size
        self._images = images
        self._to_check: list[int] | None = None
        """The token ids that were sent, until the server has shown where it put their images."""
        self._first = len(generation.tokens)
        self._again = bool(generation.request.generated_ids) or self._first > 0
        self._lost: str | None = None
        self._finished = False
        """The server has said that it ends it: what it says of it afterwards is under way."""
        self._reading: asyncio.Task[None] | None = None

    def resumed_with(self, version: int, *, cleared: bool) -> None:
        """See Server: all tokens but the last, which is decoded, are computed again, or are those of older weights."""
        self.version = version
        if self._finished or len(self.generation.tokens) == self._first:
            return  # nothing of it may have been computed yet
        request = self.generation.request
        num = len(request.prompt) + len(request.generated_ids) + len(self.generation.tokens) - 1
        if cleared:
            self.counts["engine/reprefill_tokens"] += num
        else:
            self.counts["kv/stale_prefix_tokens"] += num

    def lose(self, why: str) -> None:
        """Its server is given up: it ends at once, with the tokens that there are."""
        self._lost = why
        if self._reading is not None:
            self._reading.cancel()

    async def run(self) -> None:
        """Returns when the server has ended it, or nobody wants more of it. ServerFailed: more is wanted, of another
        request. ValueError if no server can do this; EngineDied if the model takes no images there."""
        if self.generation.end.is_set():
            return  # since it was given its place
        if not self.server.serves:
            raise ServerFailed("it was given up")
        generation, request = self.generation, self.generation.request
        asked = generation.left
        body = request_body(request, self.request_id, generation.tokens, asked, self._salt, self._images)
        self._to_check = body["token_ids"] if self._images else None
        if self._again:
            self.counts["engine/reprefill_tokens"] += len(body["token_ids"])
        else:
            self.counts["engine/prefill_tokens"] += len(body["token_ids"])
        reading = self._reading = asyncio.ensure_future(self._read(body))
        ending = asyncio.ensure_future(generation.end.wait())
        self.server.attempts.add(self)
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._abort(reading)
            if self._lost is not None:
                raise ServerFailed(self._lost)
            if not reading.cancelled():
                reading.result()
            if generation.reason is None and not generation.interrupted:
                raise ServerFailed("it ended a request that nobody had asked it to end")
        finally:
            ending.cancel()
            reading.cancel()
            await asyncio.wait([reading])  # its connection is closed
            self.server.attempts.discard(self)

    async def _read(self, body: dict[str, object]) -> None:
        """Take what the server sends until it ends the stream."""
        async with contextlib.aclosing(self.server.client.stream(body)) as chunks:
            try:
                async for chunk in chunks:
                    self._finished = self._finished or chunk.finish_reason is not None
                    self._take(chunk)
            except ValueError as error:
                if self._to_check is not None and takes_no_images(str(error)):
                    raise EngineDied(f"prompts show images, and a server takes none: {error}") from error
                raise
        if not self._finished:
            raise ServerFailed("the connection ended in the middle of an answer")

    def _take(self, chunk: Chunk) -> None:
        self.server.last_token = time.monotonic()
        if self._to_check is not None and (chunk.shown is not None or chunk.token_ids):
            shown = chunk.shown or ShownPrompt((), ())
            check_expansion(self.generation.request.media, self._to_check, shown.token_ids, shown.images)
            self._to_check = None
        logprobs, why_invalid = usable(chunk.token_ids, chunk.logprobs, self._vocab_size)
        self.counts["engine/decode_steps"] += len(logprobs)
        surplus = self.generation.num_surplus
        self.generation.add(chunk.token_ids[: len(logprobs)], logprobs, self.version)
        self.counts["engine/surplus_tokens"] += self.generation.num_surplus - surplus
        if chunk.cached_tokens is not None:
            if self._again:
                self.counts["kv/kept_tokens"] += chunk.cached_tokens
            else:
                self.counts["kv/shared_prompt_tokens"] += chunk.cached_tokens
        if chunk.spans is not None:
            self._compare(chunk.spans)
        if why_invalid:
            raise ServerFailed(f"it {why_invalid}")

    def _compare(self, spans: tuple[Span, ...]) -> None:
        if self.generation.restamp(self._first, spans, self._run):
            self.counts["engine/span_mismatches"] += 1

    async def _abort(self, reading: asyncio.Future[None]) -> None:
        """Tell the server to end it until it does: one abort may overtake the request, or get lost."""
        deadline, num = time.monotonic() + self._grace_s, 0
        body = abort_body([self.request_id])
        while not reading.done() and (left_s := deadline - time.monotonic()) > 0:
            if self._finished:
                await asyncio.wait([reading], timeout=left_s)
                break
            telling = asyncio.ensure_future(
                self.server.client.post("/abort_requests", body, limit_s=min(left_s, _ABORT_AGAIN_MAX_S))
            )
            num += 1
            await asyncio.wait([reading], timeout=min(left_s, back_off_s(num, _ABORT_AGAIN_S, _ABORT_AGAIN_MAX_S)))
            if not reading.done():
                await asyncio.wait([reading, telling], return_when=asyncio.FIRST_COMPLETED)
            _forget(telling)
        if not reading.done():
            self.counts["engine/abandoned_requests"] += 1
            reading.cancel()
            await asyncio.wait([reading])


def _forget(telling: asyncio.Future[object]) -> None:
    """Whether an abort was answered is of no interest: the stream tells."""
    telling.cancel()
    telling.add_done_callback(lambda done: done.cancelled() or done.exception())

"""One server as seen by the client, and one request in flight there.

Attempt.run: generate ──chunks──▶ ExtendState
              └ to be ended ─▶ abort, repeated until the stream ends ─▶ after grace_s the connection is closed

Server.load_weights: verify ─▶ pause ─▶ load ─▶ stamp ─▶ resume          versions change while it is paused
                                         └ refused: resume under the old ones
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollover.back_off import back_off_s
from rollover.engine.remote.client import ServerClient, ServerFailed, ServerRefused
from rollover.engine.remote.dialect import Chunk, GenerateRequest, ServerDialect, ShownPrompt, Span, label_of
from rollover.engine.remote.extend_state import ExtendState
from rollover.engine.validate import valid_logprobs
from rollover.types import Media
from rollover.weights import WeightUpdate

_ABORT_AGAIN_S = 0.05  # at first; then twice as long each time
_ABORT_AGAIN_MAX_S = 2.0
_LOOK_AGAIN_S = 0.01

COUNTS = (
    *(f"engine/{what}" for what in ("decode_steps", "prefill_tokens", "reprefill_tokens", "surplus_tokens")),
    *(f"engine/{what}" for what in ("span_mismatches", "lost_requests", "abandoned_requests", "refused_weights")),
    *(f"kv/{what}" for what in ("stale_prefix_tokens", "kept_tokens", "shared_prompt_tokens")),
    "engine/weights_paused_s",
)
"""Counters over all servers."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of all servers of a run.

    `run`: part of the labels of its weights. `clears_cache`: drop the KV of older weights. `timeout_s`: of each call.
    An aborted request that does not end within `grace_s` is abandoned. Every token is below `vocab_size()`; None:
    unknown.
    """

    run: str
    clears_cache: bool
    timeout_s: float
    grace_s: float
    vocab_size: Callable[[], int] | None = None


@dataclass(eq=False)
class Server:
    """State of one server.

    `counts`: COUNTS, shared by all servers. `version`: of its weights, stamped on its tokens; None: none of this run.
    `serves`: it takes requests. `updating`: it loads weights, and may not answer meanwhile. `sleeps`: the trainer uses
    its GPUs, and it gets no request.
    """

    name: str
    client: ServerClient
    dialect: ServerDialect
    settings: ServerSettings
    counts: dict[str, float]
    version: int | None = field(default=None, init=False)
    serves: bool = field(default=False, init=False)
    updating: bool = field(default=False, init=False)
    sleeps: bool = field(default=False, init=False)
    attempts: set[Attempt] = field(default_factory=set, init=False)
    has_other_weights: bool = field(default=False, init=False)
    """It was restarted, or another run changed its weights."""
    failed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set after a failure, so that it is probed now."""
    _last_token: float = field(default=0.0, init=False)

    @property
    def silent_s(self) -> float:
        """Return the seconds since its last token, or since it began to serve."""
        return time.monotonic() - self._last_token

    def accepts(self, newest_version: int | None) -> bool:
        """Return whether a rollout whose newest token has this version may run here: versions never fall."""
        able = self.serves and not (self.updating or self.sleeps or self.failed.is_set())
        return able and self.version is not None and (newest_version is None or self.version >= newest_version)

    def on_token(self) -> None:
        """Note the time of a token."""
        self._last_token = time.monotonic()

    async def check(self) -> int | None:
        """Return the server's longest rollout, None if unknown. Raises ServerFailed if it lacks a feature."""
        await self.dialect.check(self.client, self.settings.timeout_s)
        return await self.dialect.longest_rollout(self.client, self.settings.timeout_s)

    async def label(self) -> str:
        """Return the label of the server's weights. Raises ServerFailed."""
        return await self.dialect.weights_label(self.client, self.settings.timeout_s)

    async def unpause(self) -> None:
        """Resume the server, as an earlier run may have left it paused."""
        with contextlib.suppress(ServerRefused):
            await self.dialect.resume(self.client, self.settings.timeout_s)

    def begin(self) -> None:
        """Mark the server as serving."""
        self.on_token()
        self.failed.clear()
        self.serves = True

    async def end(self, why: str) -> None:
        """Stop using the server: its requests end at once, with the tokens received so far."""
        self.serves = False
        self.failed.set()  # wakes callers that wait for a probe
        for attempt in list(self.attempts):
            attempt.fail(why)
        while self.attempts:
            await asyncio.sleep(0)

    # Weights

    async def load_weights(self, update: WeightUpdate) -> None:
        """Load these weights, with one retry.

        Raises ServerRefused if it refused them twice and keeps its old ones, ServerFailed if its state is unknown.
        """
        try:
            await self._load(update)
        except ServerRefused:
            await self._load(update)

    async def _load(self, update: WeightUpdate) -> None:
        self.updating = True
        try:
            await self.dialect.verify_weights(self.client, update.message, self.settings.timeout_s)
            if not self.dialect.keeps_requests:
                await self._withdraw_all()
            await self._swap(update)
        except ServerRefused:
            self.counts["engine/refused_weights"] += 1
            raise
        finally:
            self.updating = False

    async def _swap(self, update: WeightUpdate) -> None:
        dialect, client, limit_s = self.dialect, self.client, self.settings.timeout_s
        clears, label = self.settings.clears_cache, label_of(self.settings.run, update.version)
        began = time.monotonic()
        await _done(dialect.pause(client, clear_cache=clears, limit_s=limit_s))
        try:
            try:
                await dialect.load_weights(client, update.message, label, clear_cache=clears, limit_s=limit_s)
            except ServerRefused:
                await _done(dialect.resume(client, limit_s))
                raise
            self.version = update.version
            for attempt in self.attempts:
                attempt.resumed_with(update.version, cleared=clears)
            await _done(dialect.resume(client, limit_s))
        finally:
            self.counts["engine/weights_paused_s"] += time.monotonic() - began

    async def _withdraw_all(self) -> None:
        for attempt in self.attempts:
            attempt.withdraw()
        while self.attempts:
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def sleep(self) -> None:
        """Free its GPU memory, weights included: the next ones replace them. ServerFailed if it stays awake."""
        self.sleeps = True
        await _done(self.dialect.sleep(self.client, self.settings.timeout_s))

    async def wake(self, update: WeightUpdate) -> None:
        """Wake a sleeping server, and load these weights."""
        await _done(self.dialect.wake(self.client, "weights", self.settings.timeout_s))
        await self.load_weights(update)
        await _done(self.dialect.wake(self.client, "kv_cache", self.settings.timeout_s))
        self.on_token()
        self.sleeps = False


async def _done(call: Awaitable[None]) -> None:
    """Await a call whose refusal leaves the server in an unknown state: raise ServerFailed."""
    try:
        await call
    except ServerRefused as error:
        raise ServerFailed(str(error)) from error


class Attempt:
    """One request for `state` at `server`, after the tokens so far."""

    def __init__(self, state: ExtendState, server: Server, request: GenerateRequest) -> None:
        assert server.version is not None
        self.state, self.server, self.request = state, server, request
        self.version = server.version
        self._settings, self._counts = server.settings, server.counts
        self._vocab_size = None if server.settings.vocab_size is None else server.settings.vocab_size()
        self._unchecked = bool(request.images)
        """The server has not yet shown where it put the images."""
        self._first = len(state.tokens)
        self._again = request.num_generated > 0
        self._failure: str | None = None
        self._withdrawn = asyncio.Event()
        self._finished = False
        """The server has sent a finish_reason; its usage event may follow."""
        self._reading: asyncio.Task[None] | None = None

    def resumed_with(self, version: int, *, cleared: bool) -> None:
        """Stamp tokens with `version` from now on. Counts the earlier ones as recomputed if the cache was `cleared`,
        else as KV of older weights."""
        self.version = version
        if self._finished or len(self.state.tokens) == self._first:
            return  # it may not have begun
        num = len(self.request.token_ids) + len(self.state.tokens) - self._first - 1
        self._counts["engine/reprefill_tokens" if cleared else "kv/stale_prefix_tokens"] += num

    def fail(self, why: str) -> None:
        """End the request at once, with the tokens so far: its server was ejected."""
        self._failure = why
        if self._reading is not None:
            self._reading.cancel()

    def withdraw(self) -> None:
        """Abort the request; another one continues from its tokens."""
        self._withdrawn.set()

    async def run(self) -> None:
        """Return when the rollout has stopped, was interrupted, or the request was withdrawn.

        Raises ServerFailed if another request is needed, ValueError for a request that no server accepts, EngineDied if
        the model takes no images.
        """
        state = self.state
        if state.end.is_set():
            return  # interrupted meanwhile
        if not self.server.serves:
            raise ServerFailed("its client is closed")
        num = len(self.request.token_ids)
        self._counts["engine/reprefill_tokens" if self._again else "engine/prefill_tokens"] += num
        reading = self._reading = asyncio.ensure_future(self._read())
        endings = [asyncio.ensure_future(event.wait()) for event in (state.end, self._withdrawn)]
        self.server.attempts.add(self)
        try:
            await asyncio.wait([reading, *endings], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._abort(reading)
            if self._failure is not None:
                raise ServerFailed(self._failure)
            if not reading.cancelled():
                reading.result()
            if not (state.end.is_set() or self._withdrawn.is_set()):
                raise ServerFailed("it ended a request unexpectedly")
        finally:
            for ending in endings:
                ending.cancel()
            reading.cancel()
            await asyncio.wait([reading])  # its connection is closed
            self.server.attempts.discard(self)

    async def _read(self) -> None:
        """Read the stream until the server ends it."""
        async with contextlib.aclosing(self.server.dialect.generate(self.server.client, self.request)) as chunks:
            async for chunk in chunks:
                self._finished = self._finished or chunk.finish_reason is not None
                self._take(chunk)
        if not self._finished:
            raise ServerFailed("the connection ended in the middle of an answer")

    def _take(self, chunk: Chunk) -> None:
        self.server.on_token()
        if self._unchecked and (chunk.shown is not None or chunk.token_ids):
            shown = chunk.shown or ShownPrompt((), ())
            check_expansion(self.request.extend.media, self.request.token_ids, shown.token_ids, shown.images)
            self._unchecked = False
        logprobs, why_invalid = valid_logprobs(chunk.token_ids, chunk.logprobs, self._vocab_size)
        self._counts["engine/decode_steps"] += len(logprobs)
        surplus = self.state.num_surplus
        self.state.add(chunk.token_ids[: len(logprobs)], logprobs, self.version)
        self._counts["engine/surplus_tokens"] += self.state.num_surplus - surplus
        if chunk.cached_tokens is not None:
            self._counts["kv/kept_tokens" if self._again else "kv/shared_prompt_tokens"] += chunk.cached_tokens
        if chunk.spans is not None:
            self._compare(chunk.spans)
        if why_invalid:
            raise ServerFailed(f"it {why_invalid}")

    def _compare(self, spans: tuple[Span, ...]) -> None:
        if self.state.restamp(self._first, spans, self._settings.run):
            self._counts["engine/span_mismatches"] += 1

    async def _abort(self, reading: asyncio.Future[None]) -> None:
        """Send aborts until the stream ends: one abort may overtake the request, or get lost."""
        deadline, num = time.monotonic() + self._settings.grace_s, 0
        dialect, client = self.server.dialect, self.server.client
        while not reading.done() and (left_s := deadline - time.monotonic()) > 0:
            if self._finished:
                await asyncio.wait([reading], timeout=left_s)
                break
            abort = asyncio.ensure_future(
                dialect.abort(client, self.request.request_id, min(left_s, _ABORT_AGAIN_MAX_S))
            )
            num += 1
            await asyncio.wait([reading], timeout=min(left_s, back_off_s(num, _ABORT_AGAIN_S, _ABORT_AGAIN_MAX_S)))
            if not reading.done():
                await asyncio.wait([reading, abort], return_when=asyncio.FIRST_COMPLETED)
            _cancel(abort)
        if not reading.done():
            self._counts["engine/abandoned_requests"] += 1
            reading.cancel()
            await asyncio.wait([reading])


def _cancel(abort: asyncio.Task[None]) -> None:
    """Cancel a call and ignore its result: the stream shows whether it worked."""
    abort.cancel()
    abort.add_done_callback(lambda done: done.cancelled() or done.exception())


def check_expansion(
    media: Sequence[Media],
    sent: Sequence[int],
    served: Sequence[int] | None,
    ranges: Sequence[tuple[int, int]],
) -> None:
    """Raise ValueError unless the server has each image at its placeholders in the ids `sent`, which never shift.

    `served`: the prompt's ids after the server expanded placeholders. `ranges`: [start, end) of the tokens of each
    image there, which may have more tokens around the placeholders.
    """
    ordered = sorted(media, key=lambda image: image.offset)
    for image, found in zip(ordered, [*ranges, *[None] * (len(ordered) - len(ranges))], strict=False):
        end = image.offset + image.count
        if found is None or not found[0] <= image.offset <= end <= found[1]:
            where = "nowhere" if found is None else f"at tokens {found[0]} to {found[1]}"
            raise ValueError(
                f"image {image.source}: the server shows it {where}, and the prompt at tokens {image.offset} to {end}."
                " Give it the model's own processor and the settings of this run"
            )
    if len(ranges) != len(ordered) or served is None or list(served) != list(sent):
        num = "no" if served is None else f"{len(served):,}"
        raise ValueError(
            f"image {ordered[0].source}: the server made {num} tokens of a prompt of {len(sent):,} with {len(ordered)}"
            " images. Give it the model's own processor and the settings of this run"
        )

"""The Engine contract over servers, each with its own copy of the weights. engine.dialect names their kind.

    extend ──▶ ExtendState ──▶ Fleet.place ──▶ Attempt at a server ──▶ stopped? else the next, from the last token
    load_weights ──▶ weights file ──▶ Fleet.update: each server alone

Owns the running rollouts, and the numbers of requests. A failed request costs no token: received tokens count.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.config import Config
from rollover.config.logits import LogitsProcessing
from rollover.engine.protocol import EngineDied, ExtendRequest, WeightLoad
from rollover.engine.remote.client import ServerFailed, library
from rollover.engine.remote.dialect import GenerateRequest, label_of, make_dialect
from rollover.engine.remote.extend_state import ExtendState
from rollover.engine.remote.fleet import Fleet, Router
from rollover.engine.remote.hosts import ServerHost, longest_rollout, make_hosts
from rollover.engine.remote.server import Attempt, Server, ServerSettings
from rollover.types import Segment, StopReason
from rollover.weights import NamedTensors, WeightUpdate
from rollover.weights.weights_file import WeightsFile

if TYPE_CHECKING:
    import torch

_MAX_FRUITLESS = 3  # requests in a row without a token, at servers that serve all the same


@dataclass(frozen=True)
class RemoteSetup:
    """Arguments of RemoteEngine.

    `initial`: weights of policy version 0, which every server gets before its first request. `decode_text`: token ids
    -> text, for stop strings.
    """

    config: Config
    initial: Callable[[], NamedTensors]
    decode_text: Callable[[list[int]], str]
    vocab_size: Callable[[], int] | None = None
    """Stop tokens outside the vocabulary, which some servers refuse, are not sent; None: all are sent."""
    placeholders: Callable[[], Sequence[int]] = tuple
    """Token ids of image placeholders: never sampled."""
    hosts: Sequence[ServerHost] | None = None
    """For tests; None: those of the configuration."""
    logs: Path | None = None
    """Folder for the output of our servers; None: a temporary one."""
    make_server_host: Callable[[int], ServerHost] | None = None
    """See `make_hosts`."""
    names: Callable[[NamedTensors], NamedTensors] = lambda tensors: tensors
    """Renames the weights for the servers: vLLM's loaders need the names of the model's files."""


class RemoteEngine:
    """Engine over servers. Raises ValueError if aiohttp is missing, or the dialect is unknown."""

    def __init__(self, setup: RemoteSetup) -> None:
        library()
        config = self.config = setup.config
        self._setup, self._decode_text = setup, setup.decode_text
        self._dialect = make_dialect(config)
        run = f"{config.run.name}-{secrets.token_hex(4)}"  # versions of an earlier start may be different weights
        self.oldest_version = 0
        self._salted = config.rollout.kv_on_resume == "salt"
        clears = config.rollout.kv_on_resume == "recompute"
        # A server that keeps its encoder cache at a weight update computes a trained tower's image again for a new id.
        self._new_image_ids = config.model.vision == "trained" and not clears
        self._running: dict[str, ExtendState] = {}
        self._num_requests = time.time_ns() // 1_000_000  # unique, also after a restart
        self._weights = WeightsFile(config.engine.weights_dir)
        self._beginning = asyncio.Lock()
        self._longest: int | None = None
        self._closing = threading.Event()
        self.hosts = make_hosts(config, setup.logs, setup.make_server_host) if setup.hosts is None else setup.hosts
        self._router = Router(config.engine.max_running)
        self._run = run
        settings = ServerSettings(
            run, clears, config.engine.server_timeout_s, config.watchdog.grace_s, setup.vocab_size
        )
        give_up_s = config.engine.give_up_s
        self._fleet = Fleet(self.hosts, self._dialect, self._router, settings, give_up_s, self._check_longest)

    @property
    def max_tokens(self) -> int:
        """Longest rollout of the first server that answered; shorter ones are excluded. May raise EngineDied."""
        if self._longest is None:
            limit_s = self.config.engine.give_up_s
            self._longest = longest_rollout(self.hosts, self._dialect, limit_s, self._closing)
        return self._longest

    def _check_longest(self, tokens: int) -> None:
        if self._longest is None:
            self._longest = tokens
        elif tokens < self._longest:
            raise ServerFailed(f"it takes rollouts of {tokens} tokens, another one of {self._longest}: set both alike")

    async def _begin(self) -> None:
        """Let the servers join with the initial weights, unless they did with others."""
        if self._fleet.weights is not None:
            return
        async with self._beginning:
            if self._fleet.weights is None:
                self._fleet.start(await self._write(self.oldest_version, self._setup.initial()))

    async def _write(self, version: int, tensors: NamedTensors) -> WeightUpdate:
        return await asyncio.to_thread(lambda: self._weights.write(version, self._setup.names(tensors)))

    # The contract

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """See Engine. Raises ValueError for an invalid request; ServerFailed if serving servers fail at it repeatedly;
        EngineDied if there is no server for too long, or the servers take no images and the prompt has one."""
        assert request.rollout_id not in self._running, f"rollout {request.rollout_id} is running already"
        if request.max_new_tokens < 1:
            raise ValueError(
                f"rollout {request.rollout_id} is extended by {request.max_new_tokens} tokens: by at least 1"
            )
        total = len(request.prompt) + len(request.generated_ids) + request.max_new_tokens
        if self._longest is not None and total > self._longest:
            raise ValueError(
                f"a rollout of {total} tokens (prompt and rollout.max_new_tokens) is above the {self._longest} that the"
                " servers take. Lower rollout.max_new_tokens or tasks.max_prompt_tokens, or start them with more"
            )
        if self._setup.vocab_size is not None:
            known = frozenset(token for token in request.stop.token_ids if token < self._setup.vocab_size())
            request = replace(request, stop=replace(request.stop, token_ids=known))
        if never := self._setup.placeholders():
            request = replace(request, processing=without(request.processing, never))
        self._check_features(request)
        state = self._running[request.rollout_id] = ExtendState(request, self._decode_text)
        try:
            await self._begin()
            await self._generate(state)
            return state.segments(state.reason or StopReason.PAUSED)
        finally:
            if self._running.get(request.rollout_id) is state:
                del self._running[request.rollout_id]

    def _check_features(self, request: ExtendRequest) -> None:
        """Raise the errors of `extend` for features that this kind of server lacks."""
        kind = f"servers of engine.dialect = {self.config.engine.dialect!r}"
        if request.media and not self._dialect.takes_images:
            raise EngineDied(f"prompts show images ({request.media[0].source}), and {kind} take none")
        if request.processing != LogitsProcessing() and not self._dialect.processes_logits:
            raise ValueError(
                f"rollout {request.rollout_id} has its logits changed (rollout.logits, or a model whose placeholders of"
                f" images may not be sampled), and {kind} cannot do that"
            )

    async def _generate(self, state: ExtendState) -> None:
        """Send one request after the other until the rollout stops or is interrupted."""
        media = state.request.media
        images = await asyncio.to_thread(self._dialect.encode_images, media) if media else ()
        avoid: set[str] = set()
        fruitless = 0
        while state.reason is None and not state.interrupted:
            server = await self._fleet.place(state, avoid)
            if server is None:
                return
            num = len(state.tokens)
            try:
                try:
                    await self._attempt(state, server, images).run()
                finally:
                    self._fleet.leave(server)
            except ServerFailed:
                self._fleet.counts["engine/lost_requests"] += 1
                avoid.add(server.name)
                serves = await self._fleet.checked(server)
                if server.has_other_weights:
                    state.truncate(num)  # these tokens were sampled under weights of no version of this run
                fruitless = fruitless + 1 if serves and len(state.tokens) == num else 0
                if fruitless == _MAX_FRUITLESS:
                    raise

    def _attempt(self, state: ExtendState, server: Server, images: Sequence[Any]) -> Attempt:
        """Return a request to `server`. `images`: those of the rollout, encoded by the dialect."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        wanted, label = state.request, label_of(self._run, server.version or 0)
        request = GenerateRequest(
            f"{wanted.rollout_id}.{number}",
            wanted,
            [*wanted.prompt.ids, *wanted.generated_ids, *state.tokens],
            state.remaining,
            cache_salt=label if self._salted else None,
            images=images,
            image_salt=label if self._new_image_ids else None,
        )
        return Attempt(state, server, request)

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        for rollout_id in list(self._running) if rollout_ids is None else rollout_ids:
            if rollout_id in self._running:
                self._running[rollout_id].interrupt()

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        running = [i for i in rollout_ids if i in self._running]
        return {i: self._running[i].progress() for i in running}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return set(rollout_ids).intersection(self._running) - self._fleet.working()

    def release(self, rollout_ids: Iterable[str]) -> None:
        self._router.release(rollout_ids)

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """See Engine. A server that fails to load them is ejected until it has them. Raises EngineDied as `extend`."""
        started = time.perf_counter()
        async with self._beginning:
            update = await self._write(version, tensors)
            if self._fleet.weights is None:
                self._fleet.start(update)
            else:
                await self._fleet.update(update)
            self.oldest_version = version
        return WeightLoad(update.num_bytes, time.perf_counter() - started)

    async def sleep(self) -> None:
        """See Sleeper: requests wait until `wake` or `load_weights`. Raises EngineDied as `extend`."""
        await self._begin()
        async with self._beginning:
            await self._fleet.sleep()

    async def wake(self) -> None:
        """See Sleeper. Raises EngineDied as `extend`."""
        async with self._beginning:
            if not self._fleet.awake.is_set():
                assert self._fleet.weights is not None
                await self._fleet.update(self._fleet.weights)

    def use_threads(self, num: int) -> None:
        """Do nothing: the engine computes elsewhere."""

    def stats(self) -> dict[str, float]:
        return {
            **self._fleet.counts,
            "engine/preemptions": 0.0,
            "kv/bytes": 0.0,
            "engine/servers": float(len(self._fleet.serving)),
            "engine/ejections": float(self._fleet.num_ejections),
            "engine/resumed_in_place": float(self._router.num_in_place),
            "engine/resumed_elsewhere": float(self._router.num_elsewhere),
        }

    async def close(self) -> None:
        """Interrupt running rollouts, end our servers, and remove the weights file."""
        self._closing.set()
        self.interrupt()
        await self._fleet.close()
        self._weights.close()


def without(processing: LogitsProcessing, token_ids: Iterable[int]) -> LogitsProcessing:
    """Return `processing` under which these tokens are never sampled."""
    bias = dict(processing.logit_bias) | dict.fromkeys(token_ids, -math.inf)
    return replace(processing, logit_bias=tuple(sorted(bias.items())))

"""The controller's side of roles in actors: servers (ActorHost), ranks (ActorRanks), reward pools (ActorRewardNode).

Owns the current actor of each role. The users of servers and reward pools (Fleet, MultiNodePool) restart them through
`ready` and `start`; ranks end together. cluster.py starts the actors. Batches and results travel through the object
store, gradients between ranks, weights through files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from rollover.config import Config
from rollover.engine.remote.client import ServerClient, ServerFailed
from rollover.engine.remote.hosts import new_token
from rollover.live_objects import is_live
from rollover.plugins.ray.roles import RankRole, RewardRole, Role, ServerRole, request_to_json
from rollover.rewards.built_in import specs_in
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import Mode
from rollover.rewards.serialization import packed
from rollover.rewards.worker import RewardProbeError
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks.group import AnswerCollector, Answers, rendezvous
from rollover.types import Reward, Task

CALL_S = 60.0
"""Timeout of a small call. The role counts as failed after it."""
_START_S = 600.0
"""Timeout of a start, with imports."""
_END_S = 15.0
_PING_EVERY_S = 5.0
_WATCH_EVERY_S = 0.5
_END_RANK_S = 5.0


class ActorFailed(Exception):
    """An actor or its node has failed or does not answer."""


class Actor(Protocol):
    """A role in a process of some node. `resident`: bytes of memory at the last report."""

    resident: int

    def call(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        """Call a method, in any thread but that of an event loop. Raises ActorFailed."""
        ...

    async def call_async(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        """Await a method. Raises ActorFailed; a cancellation reaches the actor."""
        ...

    async def ping(self) -> None:
        """Update `resident`. Raises ActorFailed if it does not answer."""
        ...


class Actors(Protocol):
    """Starts and ends actors by role name."""

    config: Config

    def start(self, name: str, role: type[Role], *arguments: Any) -> Actor:
        """Start an actor of `role(context, *arguments)` on a node with room, after ending one of that name.

        Raises ActorFailed if there is no such node.
        """
        ...

    def end(self, name: str) -> None:
        """Kill the actor of this name, if any."""
        ...

    def address_of(self, name: str) -> str:
        """Return the address of the role's last node. Raises ActorFailed if the node has failed."""
        ...

    def is_remote(self, name: str) -> bool:
        """Return whether the role is on another machine than the controller. Raises ActorFailed."""
        ...


def check_weights_dir(cluster: Actors, role: str, otherwise: str) -> None:
    """Raise ValueError if `role` is on another machine and engine.weights_dir is empty. Raises ActorFailed."""
    if cluster.is_remote(role) and not cluster.config.engine.weights_dir:
        raise ValueError(
            f"engine.weights_dir is empty, and {otherwise}: set it to a folder that all nodes see under one path"
        )


class ActorHost:
    """A ServerHost: server number `number`, in a child process of an actor."""

    def __init__(self, cluster: Actors, number: int) -> None:
        self.name, self.token = f"{cluster.config.engine.server} server {number}", new_token()
        self._cluster, self._number, self._role = cluster, number, f"server {number}"
        self._limit_s = cluster.config.engine.give_up_s
        self._pinging: asyncio.Task[None] | None = None
        self._actor: Actor | None = None
        self._ended = False  # before it reported its address
        with contextlib.suppress(ActorFailed):  # `address` and `ready` retry
            self._actor = self._start()

    def _start(self) -> Actor:
        cluster, config = self._cluster, self._cluster.config
        check_weights_dir(cluster, self._role, "servers are on other machines than the trainer")
        address = cluster.address_of(self._role)
        return cluster.start(self._role, ServerRole, config, self._number, address, self.token)

    def address(self, limit_s: float) -> str:
        self._ended = True
        try:
            if self._actor is None:
                self._actor = self._start()
            url = _url(self._actor.call(limit_s + CALL_S, "url", limit_s))
            self._ended = False
            return url
        except ActorFailed as error:
            raise ServerFailed(str(error)) from error

    def restart(self) -> None:
        if self._ended and self._actor is not None:
            self._actor = None  # `address` starts another
            self._cluster.end(self._role)

    async def ready(self) -> ServerClient:
        try:
            if self._actor is None:
                self._actor = self._start()
            url = _url(await self._actor.call_async(self._limit_s, "url", self._limit_s))
        except ActorFailed as error:
            raise ServerFailed(str(error)) from error
        if self._pinging is None:
            self._pinging = asyncio.ensure_future(self._keep_pinging(self._actor))
        return ServerClient(url, self.token)

    async def discard(self) -> None:
        self._actor = None
        self._cluster.end(self._role)
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None

    async def close(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(ActorFailed):
                await self._actor.call_async(_END_S, "end")
        await self.discard()

    async def _keep_pinging(self, actor: Actor) -> None:
        """Update the memory metric."""
        with contextlib.suppress(ActorFailed):
            while True:
                await actor.ping()
                await asyncio.sleep(_PING_EVERY_S)


def _url(said: dict[str, str]) -> str:
    if "failed" in said:
        raise ServerFailed(said["failed"])
    return said["url"]


def start_actor_ranks(actors: Actors, devices: list[str], threads: int) -> ActorRanks:
    """Start ranks with `threads` each, and connect them.

    ValueError if weights could not come back; BackendLost if no node has room within backend.rank_timeout_s.
    """
    timeout_s = actors.config.backend.rank_timeout_s
    ranks = ActorRanks(actors, len(devices), timeout_s)
    try:
        rendezvous(ranks, ranks.host, devices, threads, timeout_s)
    except BaseException:
        ranks.close()
        raise
    return ranks


class ActorRanks:
    """See `Ranks`. `timeout_s`: for nodes with room, and for the other ranks' results after the first one."""

    def __init__(self, actors: Actors, num: int, timeout_s: float) -> None:
        self.num, self._actors, self._timeout_s = num, actors, timeout_s
        self._calling, self._ending = threading.Lock(), threading.Lock()
        self._why = ""  # why the ranks have ended
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(num, "rank-call")
        deadline = time.monotonic() + timeout_s
        try:
            self._ranks: list[Actor] = list(self._threads.map(lambda rank: self._started(rank, deadline), range(num)))
        except BaseException as error:
            self._end(str(error))
            self._threads.shutdown()
            for rank in range(num):  # those that started meanwhile
                actors.end(_rank_name(rank))
            raise
        self.host = actors.address_of(_rank_name(0))
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    def call(self, verb: str, values: Mapping[int, Mapping[str, Any]], *, limited: bool = True) -> Answers:
        with self._calling:
            if self._why:
                raise BackendLost(self._why)
            calls = {
                self._threads.submit(self._ranks[rank].call, None, "call", verb, of_rank): rank
                for rank, of_rank in values.items()
            }
            return self._answers(verb, calls, limited)

    def close(self) -> None:
        self._closing.set()
        if not self._why:
            ends = [self._threads.submit(rank.call, _END_RANK_S, "end") for rank in self._ranks]
            wait(ends)
        self._end("the ranks were ended")
        self._threads.shutdown(wait=False)

    # Private

    def _started(self, rank: int, deadline: float) -> Actor:
        config, name = self._actors.config, _rank_name(rank)
        while not self._why:  # no other rank has failed
            try:
                check_weights_dir(self._actors, name, "ranks are on other machines than the controller")
                actor = self._actors.start(name, RankRole, config, rank, self._actors.address_of(name))
                # Imports may take long if many processes read one disk.
                actor.call(max(CALL_S, deadline - time.monotonic()), "begin")
                return actor
            except ActorFailed as error:
                if time.monotonic() > deadline:
                    raise BackendLost(f"{name} cannot be started: {error}") from error
            time.sleep(_WATCH_EVERY_S)
        raise BackendLost(self._why)

    def _answers(self, verb: str, calls: dict[Future[dict[str, Any]], int], limited: bool) -> Answers:
        collecting = AnswerCollector(
            calls.values(), self._timeout_s, limited, lambda rank, how: self._lost(rank, verb, how)
        )
        waiting = set(calls)
        while not collecting.done:
            done, waiting = wait(waiting, collecting.remaining_s, FIRST_COMPLETED)
            if not done:
                collecting.on_timeout()
            for call in done:
                rank = calls[call]
                try:
                    answer = call.result()
                except ActorFailed as error:
                    raise self._lost(rank, verb, f"is gone: {error}") from None
                if "lost" in answer:
                    raise self._lost(rank, verb, f"is lost: {answer['lost']}")
                collecting.add(rank, answer)
        return collecting.result()

    def _lost(self, rank: int, verb: str, how: str) -> BackendLost:
        """End all ranks, and return the error to raise."""
        self._end(f"rank {rank} of {self.num} {how} (in {verb}): the others were ended")
        return BackendLost(self._why)

    def _end(self, why: str) -> None:
        with self._ending:
            if not self._why:
                self._why = why
                for rank in range(self.num):
                    self._actors.end(_rank_name(rank))

    def _watch(self) -> None:
        """End all ranks if one fails between two calls."""
        while not self._closing.wait(_WATCH_EVERY_S) and not self._why:
            for rank, actor in enumerate(self._ranks):
                found = 0
                with contextlib.suppress(ActorFailed):
                    found = actor.call(CALL_S, "rank_memory")
                if not found and not self._closing.is_set():
                    self._lost(rank, "between two calls", "has ended")
                    return
                actor.resident = found


def _rank_name(rank: int) -> str:
    return f"rank {rank}"


class ActorRewardNode:
    """A RewardPool in an actor. Its methods raise ActorFailed.

    name: for messages. num_workers, counters: of the current pool, at its last answer. modes: by loaded function.
    """

    def __init__(self, cluster: Actors, number: int) -> None:
        self.name, self.num_workers = str(number), 0
        self.counters: dict[str, float] = {}
        self.modes: dict[str, Mode] = {}
        self._cluster, self._role = cluster, f"reward {number}"
        self._actor: Actor | None = None
        self._sent: set[str] = set()  # functions that it has received

    async def start(self) -> None:
        """Start a new pool, with counters of 0."""
        self.counters, self._sent = {}, set()
        self._actor = self._cluster.start(self._role, RewardRole, self._cluster.config.rewards)
        self.num_workers = await self._actor.call_async(_START_S, "num_workers")
        await self._actor.ping()

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        specs = {request.task.reward for request in requests}
        said = await self._ask("score", json.dumps([request_to_json(r) for r in requests]), specs)
        return [Reward(**saved) for saved in said["rewards"]]

    async def probe(self, task: Task) -> None:
        said = await self._ask("probe", json.dumps(task.to_json()), {task.reward})
        if said["error"] is not None:
            raise RewardProbeError(said["error"])

    async def ping(self) -> None:
        if self._actor is None:
            raise ActorFailed("it is not started")
        await self._actor.ping()

    async def discard(self) -> None:
        self._actor = None
        self._cluster.end(self._role)

    async def close(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(ActorFailed):
                await self._actor.call_async(_END_S, "end")
        await self.discard()

    async def _ask(self, method: str, text: str, specs: set[str]) -> dict[str, Any]:
        actor = self._actor
        if actor is None:
            raise ActorFailed("it is not started")
        live = {spec for spec in specs if any(map(is_live, specs_in(spec)))}
        functions = {spec: _serialize(spec) for spec in live - self._sent}
        said = json.loads(await actor.call_async(None, method, text, functions))
        if actor is self._actor:
            self._sent |= functions.keys()
            self.modes |= said["modes"]
            for name, value in said["counters"].items():  # answers may overtake each other
                self.counters[name] = max(value, self.counters.get(name, 0.0))
        return said


def _serialize(spec: str) -> dict[str, Any]:
    """Return the serialized function of a live object, or why it cannot be serialized."""
    try:
        return packed(spec)
    except ValueError as error:
        return {"refused": str(error)}

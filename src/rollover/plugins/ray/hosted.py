"""The controller's side of roles in actors: a ServerHost of each server, an ActorRewardNode of each reward pool.

Owns which actor is the current one of a role. The user of an actor (Fleet, MultiNodePool) restarts it through `ready`
and `start`. cluster.py starts the actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Protocol

from rollover.config import Config
from rollover.engine.remote.client import ServerClient, ServerFailed
from rollover.engine.remote.hosts import new_token
from rollover.live_objects import is_live
from rollover.plugins.ray.roles import RewardRole, Role, ServerRole, request_to_json
from rollover.rewards.built_in import specs_in
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import Mode
from rollover.rewards.serialization import packed
from rollover.rewards.worker import RewardProbeError
from rollover.types import Reward, Task

CALL_S = 60.0
"""A role that answers a small question no sooner is lost."""
_START_S = 600.0
"""And so is one that has not started by then, with all that it imports."""
_END_S = 15.0
_LOOK_EVERY_S = 5.0


class Gone(Exception):
    """An actor, or its node, is gone, or does not answer."""


class Actor(Protocol):
    """A role in a process of some node. `resident`: bytes of memory that it had when that was last told."""

    resident: int

    def ask(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        """What the method returns, for any thread but that of an event loop. Gone."""
        ...

    async def answer(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        """What the method returns. Gone; a call that is cancelled is cancelled there."""
        ...

    async def look(self) -> None:
        """Gone if it does not answer."""
        ...


class Actors(Protocol):
    """Starts and ends actors, by the name of the role that they are."""

    config: Config

    def start(self, name: str, role: type[Role], *arguments: Any) -> Actor:
        """An actor of `role(place, *arguments)`, on a node that has room; one of that name ends before. Gone if there
        is no such node."""
        ...

    def end(self, name: str) -> None:
        """The actor of this name ends at once, if there is one."""
        ...

    def address_of(self, name: str) -> str:
        """Of the node that the role was last on: where others can ask what listens there. Gone if that is gone."""
        ...

    def is_elsewhere(self, name: str) -> bool:
        """Whether that is another machine than the controller's. Gone."""
        ...


def check_weights_dir(cluster: Actors, role: str, otherwise: str) -> None:
    """ValueError where `role` is on another machine than the controller, and weights have no folder that both see.
    Gone."""
    if cluster.is_elsewhere(role) and not cluster.config.engine.weights_dir:
        raise ValueError(
            f"engine.weights_dir is empty, and {otherwise}: set it to a folder that all nodes see under one path"
        )


class ActorHost:
    """A ServerHost: server number `number`, in a child of an actor."""

    def __init__(self, cluster: Actors, number: int) -> None:
        self.name, self.token = f"{cluster.config.engine.server} server {number}", new_token()
        self._cluster, self._number, self._role = cluster, number, f"server {number}"
        self._limit_s = cluster.config.engine.give_up_s
        self._looking: asyncio.Task[None] | None = None
        self._actor: Actor | None = None
        self._ended = False  # before it could say where it is
        with contextlib.suppress(Gone):  # whoever asks for it tries again
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
            url = _url(self._actor.ask(limit_s + CALL_S, "url", limit_s))
            self._ended = False
            return url
        except Gone as error:
            raise ServerFailed(str(error)) from error

    def restart(self) -> None:
        if self._ended and self._actor is not None:
            self._actor = None  # `address` starts another
            self._cluster.end(self._role)

    async def ready(self) -> ServerClient:
        try:
            if self._actor is None:
                self._actor = self._start()
            url = _url(await self._actor.answer(self._limit_s, "url", self._limit_s))
        except Gone as error:
            raise ServerFailed(str(error)) from error
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look(self._actor))
        return ServerClient(url, self.token)

    async def discard(self) -> None:
        self._actor = None
        self._cluster.end(self._role)
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def close(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Gone):
                await self._actor.answer(_END_S, "end")
        await self.discard()

    async def _look(self, actor: Actor) -> None:
        """For the metrics: whether the server answers, others see."""
        with contextlib.suppress(Gone):
            while True:
                await actor.look()
                await asyncio.sleep(_LOOK_EVERY_S)


def _url(said: dict[str, str]) -> str:
    if "failed" in said:
        raise ServerFailed(said["failed"])
    return said["url"]


class ActorRewardNode:
    """A RewardPool in an actor. `name` is for messages. `num_workers`, `counters` are those of the pool that runs now,
    as it last told them, and `modes` how it calls each reward function that it has loaded. Its methods raise Gone."""

    def __init__(self, cluster: Actors, number: int) -> None:
        self.name, self.num_workers = str(number), 0
        self.counters: dict[str, float] = {}
        self.modes: dict[str, Mode] = {}
        self._cluster, self._role = cluster, f"reward {number}"
        self._actor: Actor | None = None
        self._sent: set[str] = set()  # names of functions whose content it has

    async def start(self) -> None:
        """Start a new pool, with counters of 0. Gone if there can be none now."""
        self.counters, self._sent = {}, set()
        self._actor = self._cluster.start(self._role, RewardRole, self._cluster.config.rewards)
        self.num_workers = await self._actor.answer(_START_S, "num_workers")
        await self._actor.look()

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        specs = {request.task.reward for request in requests}
        said = await self._ask("score", json.dumps([request_to_json(r) for r in requests]), specs)
        return [Reward(**saved) for saved in said["rewards"]]

    async def probe(self, task: Task) -> None:
        said = await self._ask("probe", json.dumps(task.to_json()), {task.reward})
        if said["error"] is not None:
            raise RewardProbeError(said["error"])

    async def look(self) -> None:
        if self._actor is None:
            raise Gone("it is not started")
        await self._actor.look()

    async def discard(self) -> None:
        self._actor = None
        self._cluster.end(self._role)

    async def close(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Gone):
                await self._actor.answer(_END_S, "end")
        await self.discard()

    async def _ask(self, method: str, text: str, specs: set[str]) -> dict[str, Any]:
        actor = self._actor
        if actor is None:
            raise Gone("it is not started")
        live = {spec for spec in specs if any(map(is_live, specs_in(spec)))}
        functions = {spec: _travelling(spec) for spec in live - self._sent}
        said = json.loads(await actor.answer(None, method, text, functions))
        if actor is self._actor:
            self._sent |= functions.keys()
            self.modes |= said["modes"]
            for name, value in said["counters"].items():  # answers may overtake each other
                self.counters[name] = max(value, self.counters.get(name, 0.0))
        return said


def _travelling(spec: str) -> dict[str, Any]:
    """What travels for an object of this program, or why it cannot."""
    try:
        return packed(spec)
    except ValueError as error:
        return {"refused": str(error)}

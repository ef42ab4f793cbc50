"""One rewarder over several nodes, each with a RewardPool of its own: scorings go to whichever has room.

    score(group | rollout) ──▶ waits for a place, in order of arrival ──▶ ActorRewardNode.score ──▶ Reward per request
                                   └── its node is lost: again elsewhere, before what came later; none left: it waits

Owns which call is at which node; workers/pool.py starts the nodes again. A call whose node is lost has no rewards, so
none is counted twice; what its node had counted until it last answered stays counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rollover.config import RewardsConfig
from rollover.plugins.ray.hosted import ActorRewardNode, Gone
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import Mode
from rollover.rewards.worker import COUNTERS
from rollover.types import Reward, Task
from rollover.workers.pool import Pool, RequestQueue, set_within

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0

Result = TypeVar("Result")


@dataclass(eq=False)
class _Serving:
    """A node from one start to its loss. `free`: calls that it has room for."""

    node: ActorRewardNode
    free: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    def lose(self, why: str) -> None:
        self.why = self.why or why
        self.lost.set()


class MultiNodePool:
    """What a run uses of a RewardPool, over `nodes`, which start with the first call."""

    def __init__(
        self,
        rewards: RewardsConfig,
        nodes: Sequence[ActorRewardNode],
    ) -> None:
        self.config, self.nodes = rewards, nodes
        self._serving: list[_Serving] = []
        self._queue: RequestQueue[None, _Serving] = RequestQueue(self._choose, self._free)
        self._pool = Pool(nodes, self._life, self._on_failure, self._queue)
        self._began: dict[int, float] = {}  # by the call's number: of calls at a node
        self._modes: dict[str, Mode] = {}
        self._counts = Counter(dict.fromkeys((f"rewards/{name}" for name in COUNTERS), 0.0))  # of pools that ended
        self._num_calls = self._num_lost = self._num_losses = 0

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """One Reward per request, in order. Never raises for a failing function: its rewards are missing."""
        return await self._somewhere(lambda node: node.score(requests))

    async def probe(self, task: Task) -> None:
        """Call the task's reward on dummy completions, at one node. Raises RewardProbeError."""
        await self._somewhere(lambda node: node.probe(task))

    def scores_singly(self, task: Task) -> bool:
        """See RewardPool."""
        return self.config.streaming and self._modes.get(task.reward) == "each"

    @property
    def is_stalled(self) -> bool:
        """Whether there is no node at all."""
        return self._pool.started and not self._serving

    def stats(self) -> dict[str, float]:
        """As those of a RewardPool, of all nodes together, and what was lost with nodes."""
        counts = Counter(self._counts)
        for serving in self._serving:
            counts.update(serving.node.counters)
        now = time.monotonic()
        return {
            **counts,
            "rewards/busy_workers": float(len(self._began)),
            "rewards/queue": float(self._num_calls - len(self._began)),
            "rewards/longest_call_s": max((now - began for began in self._began.values()), default=0.0),
            "rewards/nodes": float(len(self._serving)),
            "rewards/lost_nodes": float(self._num_losses),
            "rewards/lost_calls": float(self._num_lost),
        }

    async def close(self) -> None:
        """End all nodes; calls that wait are cancelled."""
        await self._pool.close()
        self._queue.end(None)
        await asyncio.gather(*(node.close() for node in self.nodes))

    # Calls

    async def _somewhere(self, work: Callable[[ActorRewardNode], Awaitable[Result]]) -> Result:
        if not self._pool.started:
            self._pool.start()
        number = self._queue.number()
        self._num_calls += 1
        try:
            while True:
                serving = await self._queue.place(None, number)
                if serving is None:
                    raise asyncio.CancelledError
                self._began[number] = time.monotonic()
                try:
                    result = await work(serving.node)
                    self._modes |= serving.node.modes
                    return result
                except Gone as error:
                    self._num_lost += 1
                    serving.lose(str(error))
                    self._remove(serving)
                finally:
                    del self._began[number]
                    self._queue.leave(serving)
        finally:
            self._num_calls -= 1

    def _choose(self, call: None) -> _Serving | None:
        """A place where most is free."""
        serving = max(self._serving, key=lambda serving: serving.free, default=None)
        if serving is None or serving.free == 0:
            return None
        serving.free -= 1
        return serving

    def _free(self, serving: _Serving) -> None:
        serving.free += 1

    # Nodes

    async def _life(self, node: ActorRewardNode, works: Callable[[], None]) -> str:
        """Start it, and look at it until it is lost. Returns why."""
        try:
            await node.start()
        except Gone as error:
            return str(error)
        serving = _Serving(node, node.num_workers)
        works()
        self._serving.append(serving)
        self._queue.move()
        why = await self._watch(serving)
        self._remove(serving)
        self._num_losses += 1
        return why

    async def _on_failure(self, node: ActorRewardNode, why: str, is_news: bool) -> None:
        if is_news:
            left = "" if self._serving else "; scorings wait for it, as there is no other"
            logger.warning(f"the reward node {node.name} is lost ({why}), and is started again{left}")
        await node.discard()

    async def _watch(self, serving: _Serving) -> str:
        """Returns why it is lost, as soon as that is known."""
        while not await set_within(serving.lost, _LOOK_EVERY_S):
            try:
                await serving.node.look()
            except Gone as error:
                return str(error)
        return serving.why

    def _remove(self, serving: _Serving) -> None:
        if serving in self._serving:
            self._serving.remove(serving)
            self._counts.update(serving.node.counters)

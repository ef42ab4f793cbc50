"""One reward pool over several nodes, each with its own RewardPool: a call goes to a node with free workers.

    score(group | rollout) ──▶ queue, in order of arrival ──▶ ActorRewardNode.score ──▶ Reward per request
                                   └── its node failed: retried on another node, before later calls; none left: it waits

Owns the assignment of calls to nodes; workers/pool.py restarts the nodes. A call of a failed node has no rewards, so
that none counts twice; the counters of the node's last answer stay.
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
from rollover.plugins.ray.controller import ActorFailed, ActorRewardNode
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import Mode
from rollover.rewards.worker import COUNTERS
from rollover.types import Reward, Task
from rollover.workers.pool import Pool, RequestQueue, set_within

logger = logging.getLogger(__name__)

_PING_EVERY_S = 5.0

Result = TypeVar("Result")


@dataclass(eq=False)
class _RunningNode:
    """A node from its start to its failure. `free`: free workers."""

    node: ActorRewardNode
    free: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    def lose(self, why: str) -> None:
        self.why = self.why or why
        self.lost.set()


class MultiNodePool:
    """The interface of a RewardPool over `nodes`, which start with the first call."""

    def __init__(
        self,
        rewards: RewardsConfig,
        nodes: Sequence[ActorRewardNode],
    ) -> None:
        self.config, self.nodes = rewards, nodes
        self._serving: list[_RunningNode] = []
        self._queue: RequestQueue[None, _RunningNode] = RequestQueue(self._choose, self._free)
        self._pool = Pool(nodes, self._supervise, self._on_failure, self._queue)
        self._started_at: dict[int, float] = {}  # start times of running calls, by number
        self._modes: dict[str, Mode] = {}
        self._counts = Counter(dict.fromkeys((f"rewards/{name}" for name in COUNTERS), 0.0))  # of failed nodes
        self._num_calls = self._num_lost = self._num_losses = 0

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """Return one Reward per request, in order. The rewards of a failing function are missing."""
        return await self._call_any_node(lambda node: node.score(requests))

    async def probe(self, task: Task) -> None:
        """Call the task's reward on dummy completions, at one node. Raises RewardProbeError."""
        await self._call_any_node(lambda node: node.probe(task))

    def scores_singly(self, task: Task) -> bool:
        """See RewardPool."""
        return self.config.streaming and self._modes.get(task.reward) == "each"

    @property
    def is_stalled(self) -> bool:
        """Whether no node is running."""
        return self._pool.started and not self._serving

    def stats(self) -> dict[str, float]:
        """Return the sums of the nodes' RewardPool stats, and the counts of failures."""
        counts = Counter(self._counts)
        for serving in self._serving:
            counts.update(serving.node.counters)
        now = time.monotonic()
        return {
            **counts,
            "rewards/busy_workers": float(len(self._started_at)),
            "rewards/queue": float(self._num_calls - len(self._started_at)),
            "rewards/longest_call_s": max((now - began for began in self._started_at.values()), default=0.0),
            "rewards/nodes": float(len(self._serving)),
            "rewards/lost_nodes": float(self._num_losses),
            "rewards/lost_calls": float(self._num_lost),
        }

    async def close(self) -> None:
        """End all nodes, and cancel queued calls."""
        await self._pool.close()
        self._queue.end(None)
        await asyncio.gather(*(node.close() for node in self.nodes))

    # Calls

    async def _call_any_node(self, work: Callable[[ActorRewardNode], Awaitable[Result]]) -> Result:
        if not self._pool.started:
            self._pool.start()
        number = self._queue.number()
        self._num_calls += 1
        try:
            while True:
                serving = await self._queue.place(None, number)
                if serving is None:
                    raise asyncio.CancelledError
                self._started_at[number] = time.monotonic()
                try:
                    result = await work(serving.node)
                    self._modes |= serving.node.modes
                    return result
                except ActorFailed as error:
                    self._num_lost += 1
                    serving.lose(str(error))
                    self._remove(serving)
                finally:
                    del self._started_at[number]
                    self._queue.leave(serving)
        finally:
            self._num_calls -= 1

    def _choose(self, call: None) -> _RunningNode | None:
        """Take a worker of the node with the most free ones."""
        serving = max(self._serving, key=lambda serving: serving.free, default=None)
        if serving is None or serving.free == 0:
            return None
        serving.free -= 1
        return serving

    def _free(self, serving: _RunningNode) -> None:
        serving.free += 1

    # Nodes

    async def _supervise(self, node: ActorRewardNode, works: Callable[[], None]) -> str:
        """Start a node and monitor it. Return why it failed."""
        try:
            await node.start()
        except ActorFailed as error:
            return str(error)
        serving = _RunningNode(node, node.num_workers)
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

    async def _watch(self, serving: _RunningNode) -> str:
        """Return why the node failed, as soon as that is known."""
        while not await set_within(serving.lost, _PING_EVERY_S):
            try:
                await serving.node.ping()
            except ActorFailed as error:
                return str(error)
        return serving.why

    def _remove(self, serving: _RunningNode) -> None:
        if serving in self._serving:
            self._serving.remove(serving)
            self._counts.update(serving.node.counters)

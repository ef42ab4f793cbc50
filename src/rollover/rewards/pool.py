"""The reward pool: several reward workers, of which each does one call at a time.

    score(group | rollout) ──▶ waits for a worker, in order of arrival ──▶ RewardWorker.score ──▶ Reward per request
                                                          └── shared: one Quarantine

Owns who scores what, and what the workers count together. Never splits a call (a batch function sees all siblings),
never touches a process itself: a worker does.

Calls are taken in order of arrival, so that the oldest scoring is always being worked on: the watchdog relies on that.
"""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollover.config import RewardsConfig
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.quarantine import Quarantine
from rollover.rewards.registry import Mode
from rollover.rewards.travel import packed
from rollover.rewards.worker import RewardWorker, WorkerHealth
from rollover.types import Reward, Task


class RewardPool:
    """A Rewarder of `rewards.num_workers` child processes. With one it does what a RewardWorker does.

    Of the free workers the first is taken: a process starts only when there is something for it to do. `pack` gives
    what travels to a process for a function of this name.
    """

    def __init__(
        self,
        rewards: RewardsConfig | None = None,
        base_dir: str | os.PathLike[str] = ".",
        pack: Callable[[str], dict[str, Any]] = packed,
    ) -> None:
        self.config = rewards or RewardsConfig.model_validate({})
        num_workers = self.config.num_processes
        quarantine = Quarantine(self.config.quarantine_after)
        self._modes: dict[str, Mode] = {}
        self._workers = [RewardWorker(self.config, base_dir, quarantine, self._modes, pack) for _ in range(num_workers)]
        self._free = list(range(num_workers))  # a heap
        self._any_free = asyncio.Semaphore(num_workers)
        self._num_calls = 0

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """One Reward per request, in order. Never raises for a failing function: its rewards are missing."""
        async with self._worker() as worker:
            return await worker.score(requests)

    async def probe(self, task: Task) -> None:
        """Call the task's reward on dummy completions. Raises RewardProbeError: see RewardWorker.probe."""
        async with self._worker() as worker:
            await worker.probe(task)

    def scores_singly(self, task: Task) -> bool:
        """Whether the task's rollouts are scored one by one, each when it stops (rewards.streaming).

        Only by a function of one sample that is known to be one (after `probe`). A batch function sees whole groups,
        and the samples of an `async def` wait together.
        """
        return self.config.streaming and self._modes.get(task.reward) == "each"

    @property
    def modes(self) -> Mapping[str, Mode]:
        """How each reward function is called that was ever loaded, by its spec."""
        return self._modes

    @property
    def stands_still(self) -> bool:
        """Never: a worker is started where there is none."""
        return False

    def stats(self) -> dict[str, float]:
        """The workers' counters together, and gauges: workers with a call, waiting calls, age of the oldest call."""
        busy_s = [health.busy_s for health in self.health() if health.busy_s is not None]
        busy = len(self._workers) - len(self._free)
        return {
            **self.counters(),
            "rewards/busy_workers": busy,
            "rewards/queue": self._num_calls - busy,
            "rewards/longest_call_s": max(busy_s, default=0.0),
        }

    def counters(self) -> dict[str, float]:
        """The workers' counters together."""
        counters = [worker.stats() for worker in self._workers]
        return {name: sum(c[name] for c in counters) for name in counters[0]}

    def health(self) -> list[WorkerHealth]:
        """Every worker's process and last sign of life."""
        return [worker.health(index) for index, worker in enumerate(self._workers)]

    async def close(self) -> None:
        """Kill all workers and reap them."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[RewardWorker]:
        """A worker for one call, in order of arrival."""
        self._num_calls += 1
        try:
            async with self._any_free:
                index = heapq.heappop(self._free)
                try:
                    yield self._workers[index]
                finally:
                    heapq.heappush(self._free, index)
        finally:
            self._num_calls -= 1

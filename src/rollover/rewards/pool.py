"""The reward pool: several reward workers, each of which runs one call at a time.

    score(group | rollout) ──▶ waits for a worker, first in first out ──▶ RewardWorker.score ──▶ Reward per request
                                                          └── shared: one Quarantine

A call is never split: a batch function sees all siblings. Calls of rollouts that are scored singly are sent to a worker
together, since an exchange with it takes as long as a decode step of an embedded engine. The watchdog relies on the
order: the oldest scoring is always in progress.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollover.config import RewardsConfig
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import Mode
from rollover.rewards.serialization import packed
from rollover.rewards.worker import Quarantine, RewardWorker, WorkerHealth
from rollover.types import Reward, Task

_MAX_TOGETHER = 8  # single calls: more could wait behind one that hangs while another worker is free


@dataclass(eq=False)
class _Call:
    """A call of `score` (`what`: its requests) or of `probe` (its task), until `done`.

    single: it has one request, and may be sent together with others. together: the calls that were sent with it.
    work: the asyncio task that runs them; None while they wait.
    """

    what: list[ScoreRequest] | Task
    single: bool = False
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    together: list[_Call] = field(default_factory=list)
    work: asyncio.Task[None] | None = None

    def end(self, result: Any) -> None:
        if not self.done.done():
            self.done.set_result(result)


class RewardPool:
    """A Rewarder of `rewards.num_workers` child processes. `pack`: as of RewardWorker.

    A call goes to the first free worker, so a process starts only when it is needed.
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
        self._waiting: deque[_Call] = deque()

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """Return one Reward per request, in order. Never raises for a failing function: its rewards are missing."""
        single = len(requests) == 1 and self.scores_singly(requests[0].task)
        return await self._result_of(_Call(requests, single))

    async def probe(self, task: Task) -> None:
        """Call the task's reward on dummy completions: see RewardWorker.probe."""
        await self._result_of(_Call(task))

    def scores_singly(self, task: Task) -> bool:
        """Return whether each rollout of the task is scored when it stops (rewards.streaming).

        Only a per-sample function does so, once it is loaded (after `probe`). A batch function scores whole groups, as
        does an `async def`, whose samples run concurrently.
        """
        return self.config.streaming and self._modes.get(task.reward) == "each"

    @property
    def modes(self) -> Mapping[str, Mode]:
        """The mode of every reward function that was ever loaded, by spec."""
        return self._modes

    @property
    def is_stalled(self) -> bool:
        """Never: a missing worker is started."""
        return False

    def stats(self) -> dict[str, float]:
        """Return the sums of the workers' counters, and gauges: busy workers, waiting calls, age of the oldest call."""
        busy_s = [health.busy_s for health in self.health() if health.busy_s is not None]
        return {
            **self.counters(),
            "rewards/busy_workers": len(self._workers) - len(self._free),
            "rewards/queue": len(self._waiting),
            "rewards/longest_call_s": max(busy_s, default=0.0),
        }

    def counters(self) -> dict[str, float]:
        """Return the sums of the workers' counters."""
        counters = [worker.stats() for worker in self._workers]
        return {name: sum(c[name] for c in counters) for name in counters[0]}

    def health(self) -> list[WorkerHealth]:
        """Return the health of every worker."""
        return [worker.health(index) for index, worker in enumerate(self._workers)]

    async def close(self) -> None:
        """Kill all workers and reap them."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    # Private

    async def _result_of(self, call: _Call) -> Any:
        self._waiting.append(call)
        self._begin()
        try:
            return await call.done
        except asyncio.CancelledError:
            if call in self._waiting:
                self._waiting.remove(call)
            elif call.work and all(other.done.done() for other in call.together):  # all of them are done or cancelled
                call.work.cancel()
                await asyncio.wait([call.work])
            raise

    def _begin(self) -> None:
        """Send each free worker the oldest call; with a single one, also its share of the single ones behind it."""
        while self._free and self._waiting:
            share = min(math.ceil(len(self._waiting) / len(self._workers)), _MAX_TOGETHER)
            calls = [self._waiting.popleft()]
            while calls[0].single and len(calls) < share and self._waiting[0].single:
                calls.append(self._waiting.popleft())
            index = heapq.heappop(self._free)
            work = asyncio.ensure_future(self._work(index, calls))
            work.add_done_callback(lambda _, index=index, calls=calls: self._end(index, calls))
            for call in calls:
                call.together, call.work = calls, work

    async def _work(self, index: int, calls: list[_Call]) -> None:
        """Run these calls on one worker. The error of a probe is raised to its caller."""
        worker, what = self._workers[index], calls[0].what
        try:
            if isinstance(what, Task):
                calls[0].end(await worker.probe(what))
            elif calls[0].single:
                requests = [call.what[0] for call in calls if isinstance(call.what, list)]
                early = dict(enumerate(calls[:-1]))  # the last one ends as the worker is free
                rewards = await worker.score(
                    requests, lambda at, reward: early[at].end([reward]) if at in early else None
                )
                for call, reward in zip(calls, rewards, strict=True):
                    call.end([reward])
            else:
                calls[0].end(await worker.score(what))
        except Exception as error:
            for call in (call for call in calls if not call.done.done()):
                call.done.set_exception(error)
        finally:
            self._end(index, calls)

    def _end(self, index: int, calls: list[_Call]) -> None:
        """Free the worker. Called again when the task is done, which may have been cancelled before it began."""
        if calls:
            for call in calls:
                call.done.cancel()  # no effect unless the work was cancelled
            calls.clear()
            heapq.heappush(self._free, index)
            self._begin()

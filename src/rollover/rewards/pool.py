"""The reward pool: several reward workers, of which each does one call at a time.

    score(group | rollout) ──▶ waits for a worker, in order of arrival ──▶ RewardWorker.score ──▶ Reward per request
                                                          └── shared: one Quarantine

Owns who scores what, and what the workers count together. Never splits a call (a batch function sees all siblings),
never touches a process itself: a worker does. Calls of rollouts that are scored alone go to a worker together, as an
exchange with it takes a decode step of an engine in this process.

Calls are taken in order of arrival, so that the oldest scoring is always being worked on: the watchdog relies on that.
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

_MOST_TOGETHER = 8  # single calls: more would wait behind one that hangs, though another worker is free


@dataclass(eq=False)
class _Call:
    """A call of `score` (`what`: its requests) or of `probe` (its task), until `done`.

    single: it has one request, and may go to a worker together with others. together: the calls that went with it.
    work: the task of the worker that has them; None while they wait.
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
        self._waiting: deque[_Call] = deque()

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """One Reward per request, in order. Never raises for a failing function: its rewards are missing."""
        single = len(requests) == 1 and self.scores_singly(requests[0].task)
        return await self._result_of(_Call(requests, single))

    async def probe(self, task: Task) -> None:
        """Call the task's reward on dummy completions. Raises RewardProbeError: see RewardWorker.probe."""
        await self._result_of(_Call(task))

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
        return {
            **self.counters(),
            "rewards/busy_workers": len(self._workers) - len(self._free),
            "rewards/queue": len(self._waiting),
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

    # Private

    async def _result_of(self, call: _Call) -> Any:
        self._waiting.append(call)
        self._begin()
        try:
            return await call.done
        except asyncio.CancelledError:
            if call in self._waiting:
                self._waiting.remove(call)
            elif call.work and all(other.done.done() for other in call.together):  # nobody waits for it any more
                call.work.cancel()
                await asyncio.wait([call.work])
            raise

    def _begin(self) -> None:
        """Give each free worker the oldest call; if it is a single one, its share of the single ones behind it, too."""
        while self._free and self._waiting:
            share = min(math.ceil(len(self._waiting) / len(self._workers)), _MOST_TOGETHER)
            calls = [self._waiting.popleft()]
            while calls[0].single and len(calls) < share and self._waiting[0].single:
                calls.append(self._waiting.popleft())
            index = heapq.heappop(self._free)
            work = asyncio.ensure_future(self._work(index, calls))
            work.add_done_callback(lambda _, index=index, calls=calls: self._end(index, calls))
            for call in calls:
                call.together, call.work = calls, work

    async def _work(self, index: int, calls: list[_Call]) -> None:
        """What one worker does for these calls. The error of a probe is its caller's."""
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
        """The worker is free. Called a second time when the work is done, which may have been cancelled unbegun."""
        if calls:
            for call in calls:
                call.done.cancel()  # of work that was cancelled: without effect on what is done
            calls.clear()
            heapq.heappush(self._free, index)
            self._begin()

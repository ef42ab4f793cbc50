"""A reward worker: a Rewarder whose functions run in one child process that may be killed (rewards/client.py).

    score -> group by reward spec -> [load, once per process] -> score -> Reward per request
                 timeout or death -> kill; try again, or missing reward; a fresh process for the next call
                 no reply to this call -> kill; try again, though nothing is held against the task
                 out of memory    -> missing reward; a fresh process for the next call

Owns the tries and the counters, and decides what a failure costs. Never runs user code itself. Several of them are a
RewardPool (rewards/pool.py), whose workers share one Quarantine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from rollover.config import RewardsConfig
from rollover.files import local_path
from rollover.rewards.built_in import shown
from rollover.rewards.client import RewardClient
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.quarantine import Quarantine
from rollover.rewards.registry import RETURNED_NONE, Item, Mode, Result
from rollover.rewards.travel import packed
from rollover.types import Reward, Task
from rollover.workers.framing import BadMessage
from rollover.workers.worker import WorkerDied

_MAX_BAD_REPLIES = 3  # to one call, until it is given up
_DUMMY_COMPLETION = "The answer is 0."
COUNTERS = ("timeouts", "crashes", "errors", "out_of_memory", "quarantined", "retries")
"""Names of what a worker counts, under rewards/."""


class RewardProbeError(ValueError):
    """The reward function failed its call at start-up; the message names the function and says what was wrong."""


Arrived = Callable[[int, Reward], None]


class _Rewards(dict[int, Reward]):
    """Rewards by the place of their request, each told as it is added."""

    def __init__(self, arrived: Arrived) -> None:
        super().__init__()
        self._arrived = arrived

    def add(self, rewards: dict[int, Reward]) -> None:
        for place, reward in rewards.items():
            self[place] = reward
            self._arrived(place, reward)


class WorkerHealth(NamedTuple):
    """A worker's last sign of life. `pid`: where functions run; None before it has loaded one, or with no process, as
    one starts with the next call. Seconds are None where there is nothing to measure: `busy_s` since its call began,
    `silent_s` since its process was started or last replied."""

    index: int
    pid: int | None
    busy_s: float | None
    silent_s: float | None


class RewardWorker:
    """Scores rollouts in one child process; calls are serialised.

    A reward spec says which function (rewards/registry.py); relative paths and modules are looked up in `base_dir`.
    A call longer than `rewards.timeout_s` is killed. For a per-sample function (verl's signature, built-ins) the limit
    holds for each sample, and one failing sample leaves the others valid; if it is an `async def`, the samples run at
    the same time under one limit, which fails those that have not returned.
    """

    def __init__(
        self,
        rewards: RewardsConfig | None = None,
        base_dir: str | os.PathLike[str] = ".",
        quarantine: Quarantine | None = None,
        modes: dict[str, Mode] | None = None,
        pack: Callable[[str], dict[str, Any]] = packed,
    ) -> None:
        self.config = rewards or RewardsConfig.model_validate({})
        self.quarantine = quarantine or Quarantine(self.config.quarantine_after)
        self._client = RewardClient(self.config, str(local_path(base_dir)), pack)
        self._lock = asyncio.Lock()
        self._seen_modes = {} if modes is None else modes  # of all specs that were ever loaded, by any worker
        self._counts: Counter[str] = Counter()
        self._busy_since: float | None = None

    async def score(self, requests: list[ScoreRequest], arrived: Arrived = lambda index, reward: None) -> list[Reward]:
        """One Reward per request, in order. Never raises for a failing function: its rewards are missing.

        `arrived` gets the place and the reward of a request as soon as it is known.
        """
        rewards = _Rewards(arrived)
        async with self._lock:
            self._busy_since = time.monotonic()
            try:
                for spec in dict.fromkeys(request.task.reward for request in requests):
                    same = {i: request for i, request in enumerate(requests) if request.task.reward == spec}
                    await self._score_spec(spec, same, rewards)
            finally:
                self._busy_since = None
        return [rewards[i] for i in range(len(requests))]

    async def probe(self, task: Task) -> None:
        """Call the task's reward on a dummy completion, then on two (a wrong length shows with two at the latest).

        Raises RewardProbeError unless it can be loaded, ends in time and returns scores. None is let pass: TRL uses it
        for "does not apply to this task".
        """
        counts, quarantine = self._counts, self.quarantine
        self._counts, self.quarantine = Counter(), Quarantine(0)  # a probe is not data
        error = None
        try:
            for num_completions in (1, 2):
                rewards = await self.score([ScoreRequest(task, _DUMMY_COMPLETION)] * num_completions)
                error = next((r.error for r in rewards if r.missing and r.error != RETURNED_NONE), None)
                if error is not None:
                    break
        finally:
            self._counts, self.quarantine = counts, quarantine
        if error is not None:
            end = "" if error.endswith(("?", ".")) else "."
            raise RewardProbeError(
                f"reward {shown(task.reward)!r} of task {task.task_id!r} failed its start-up call: {error}{end}"
                " Fix the function, or name another in rewards.function or tasks.sources.reward"
            )

    def stats(self) -> dict[str, float]:
        """Cumulative counters (docs/metrics.md). timeouts and crashes count calls that were killed and that died, or
        got what is no reply to them, also those tried again; the others but retries count missing rewards."""
        return {f"rewards/{name}": self._counts[name] for name in COUNTERS}

    def health(self, index: int = 0) -> WorkerHealth:
        """Its process and last sign of life, as worker number `index`."""
        busy_s = None if self._busy_since is None else time.monotonic() - self._busy_since
        return WorkerHealth(index, self._client.pid, busy_s, self._client.silent_s)

    async def close(self) -> None:
        """Kill the process and reap it. The next `score` would start another."""
        await self._client.kill()

    # Private

    async def _score_spec(self, spec: str, requests: dict[int, ScoreRequest], rewards: _Rewards) -> None:
        """Add the reward of each request to `rewards`, under the request's key."""
        tries: Counter[int] = Counter()
        num_bad_replies = 0
        while left := self._left(requests, rewards):
            loaded = False
            try:
                failure = await self._client.load(spec)
                loaded = True
                if failure is not None:
                    rewards.add({i: self._reward(failure) for i in left})
                else:
                    self._seen_modes[spec] = self._client.modes[spec]
                    await self._score_items(spec, {i: requests[i] for i in left}, rewards)
                continue
            except TimeoutError:
                kind, limit_s = "timeouts", self.config.timeout_s if loaded else self.config.startup_timeout_s
                error = f"timeout after {limit_s:g} s"
            except WorkerDied as death:
                kind, error = "crashes", str(death)
            except BadMessage as bad:
                kind, error = "crashes", f"the reward worker {bad}"
                num_bad_replies += 1
                if num_bad_replies < _MAX_BAD_REPLIES:  # it may be the doing of an earlier call
                    self._counts[kind] += 1
                    self._counts["retries"] += 1
                    await self._client.kill()
                    continue
            except asyncio.CancelledError:
                await self._client.kill()
                raise
            self._counts[kind] += 1
            failed = [i for i in left if i not in rewards]
            if self._client.modes.get(spec) == "each":
                failed = failed[:1]  # the one that it was at
            if loaded:  # a function that cannot be loaded is not the task's fault
                self._blame(requests[i] for i in failed)
            await self._client.kill()
            tries.update(failed)
            given_up = [i for i in failed if tries[i] > self.config.retries]
            rewards.add({i: Reward(None, error=error) for i in given_up})
            self._counts["retries"] += len(given_up) < len(failed)

    async def _score_items(self, spec: str, requests: dict[int, ScoreRequest], rewards: _Rewards) -> None:
        """Add the rewards as they come, so that a death in the middle keeps those before it.

        Returns early, with some left, when the process has to be replaced as it was out of memory.
        """
        keys, one_by_one = list(requests), self._client.modes[spec] == "each"
        spent: list[int] = []

        def take(results: dict[int, Result]) -> bool:
            """Whether nothing more is expected."""
            rewards.add({keys[index]: self._reward(result) for index, result in results.items()})
            spent.extend(keys[index] for index, result in results.items() if "out_of_memory" in result)
            return bool(spent) and one_by_one

        await self._client.score(spec, [_item(request) for request in requests.values()], take)
        if spent:  # what filled its memory may fill it still
            self._blame(requests[key] for key in spent)
            await self._client.kill()

    def _left(self, requests: dict[int, ScoreRequest], rewards: _Rewards) -> list[int]:
        """The requests without a reward. Those of tasks in quarantine are given a missing one first."""
        left = [i for i in requests if i not in rewards]
        barred = [i for i in left if requests[i].task.task_id in self.quarantine]
        error = f"quarantined: the task's calls ended {self.quarantine.limit} workers (rewards.quarantine_after)"
        rewards.add({i: Reward(None, error=error) for i in barred})
        self._counts["quarantined"] += len(barred)
        return [i for i in left if i not in rewards]

    def _blame(self, requests: Iterable[ScoreRequest]) -> None:
        for task_id in {request.task.task_id for request in requests}:
            self.quarantine.blame(task_id)

    def _reward(self, result: Result) -> Reward:
        if "error" not in result:
            return Reward(
                result["score"], result["extras"], shaping=result.get("shaping", {}), texts=result.get("texts", {})
            )
        if "out_of_memory" not in result:
            self._counts["errors"] += 1
            return Reward(None, error=result["error"])
        self._counts["out_of_memory"] += 1
        limit = f"rewards.memory_gb = {self.config.memory_gb:g}"
        return Reward(None, error=f"out of memory ({limit}): {result['error']}")


def _item(request: ScoreRequest) -> Item:
    """What the worker needs of a request, as JSON."""
    task = request.task
    return {
        "prompt": task.reward_prompt,
        "completion": request.completion,
        "completion_ids": list(request.completion_ids),
        "num_turns": request.num_turns,
        "trainer_state": asdict(request.trainer_state),
        "columns": task.columns,
        "source": task.source,
    }

"""A reward worker: a Rewarder whose functions run in one child process (rewards/child.py).

    score -> group by reward spec -> [load, once per process] -> score -> Reward per request
                 timeout or crash -> kill; retry, or missing reward; a new process for the next call
                 invalid reply    -> kill; retry, without counting it against the task
                 out of memory    -> missing reward; a new process for the next call

Owns the retries and the counters. Never runs user code itself. A RewardPool (rewards/pool.py) has several workers,
which share one Quarantine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from rollover.config import RewardsConfig
from rollover.files import local_path
from rollover.functions import is_score
from rollover.processes import child_environment
from rollover.rewards.built_in import display_name
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import MAX_REPLY_BYTES, RETURNED_NONE, Item, Mode, Result
from rollover.rewards.serialization import packed
from rollover.types import Reward, Task
from rollover.workers.framing import BadMessage
from rollover.workers.worker import Worker, WorkerDied, WorkerLimits

_MAX_BAD_REPLIES = 3  # to one call, until it counts as a crash of the task
_DUMMY_COMPLETION = "The answer is 0."
COUNTERS = ("timeouts", "crashes", "errors", "out_of_memory", "quarantined", "retries")
"""Names of the counters, under rewards/."""


class RewardProbeError(ValueError):
    """The reward function failed its call at start-up. The message names the function and the error."""


Arrived = Callable[[int, Reward], None]


class _RewardTable(dict[int, Reward]):
    """Rewards by the index of their request. `arrived` is called for each as it is added."""

    def __init__(self, arrived: Arrived) -> None:
        super().__init__()
        self._arrived = arrived

    def add(self, rewards: dict[int, Reward]) -> None:
        for place, reward in rewards.items():
            self[place] = reward
            self._arrived(place, reward)


class WorkerHealth(NamedTuple):
    """Health of a worker. `pid`: of its process; None without one, or before it has loaded a function. `busy_s`: since
    its call began, None while idle. `silent_s`: since its process started or last replied, None without a process."""

    index: int
    pid: int | None
    busy_s: float | None
    silent_s: float | None


class RewardWorker:
    """Scores rollouts in one child process; calls are serialised.

    The reward spec names the function (rewards/registry.py); relative paths and modules are looked up in `base_dir`. A
    call longer than `rewards.timeout_s` is killed. For a per-sample function (verl's signature, built-ins) the limit
    applies to each sample, and a failing sample leaves the others valid. The samples of an `async def` run concurrently
    under one limit, which fails those that have not returned.
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
        self._base_dir, self._pack = str(local_path(base_dir)), pack
        self._process: Worker | None = None  # started on first use, and again after its end
        self._pid: int | None = None  # of the process that runs functions
        self._modes: dict[str, Mode] = {}  # of the specs that are loaded in it
        self._lock = asyncio.Lock()
        self._seen_modes = {} if modes is None else modes  # of all specs that were ever loaded, by any worker
        self._counts: Counter[str] = Counter()
        self._busy_since: float | None = None

    async def score(self, requests: list[ScoreRequest], arrived: Arrived = lambda index, reward: None) -> list[Reward]:
        """Return one Reward per request, in order. Never raises for a failing function: its rewards are missing.

        `arrived(index, reward)` is called for each request as soon as its reward is known.
        """
        rewards = _RewardTable(arrived)
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
        """Call the task's reward on a dummy completion, then on two, which reveals a wrong number of scores.

        RewardProbeError unless it can be loaded, ends in time and returns scores. None is allowed: in TRL it means
        "does not apply to this task".
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
                f"reward {display_name(task.reward)!r} of task {task.task_id!r} failed its start-up call: {error}{end}"
                " Fix the function, or name another in rewards.function or tasks.sources.reward"
            )

    def stats(self) -> dict[str, float]:
        """Return cumulative counters (docs/metrics.md). timeouts, crashes (invalid replies included) and retries count
        calls; the others count missing rewards."""
        return {f"rewards/{name}": self._counts[name] for name in COUNTERS}

    def health(self, index: int = 0) -> WorkerHealth:
        """Return its health, as worker number `index`."""
        now = time.monotonic()
        busy_s = None if self._busy_since is None else now - self._busy_since
        if self._process is None or not self._process.alive:
            return WorkerHealth(index, None, busy_s, None)
        return WorkerHealth(index, self._pid, busy_s, now - self._process.last_reply)

    async def close(self) -> None:
        """Kill the process and wait for its end. The next `score` starts another."""
        self._modes, self._pid = {}, None
        if self._process is not None:
            await self._process.killed()

    # Private

    async def _score_spec(self, spec: str, requests: dict[int, ScoreRequest], rewards: _RewardTable) -> None:
        """Add the reward of each request to `rewards`, under the request's key."""
        tries: Counter[int] = Counter()
        num_bad_replies = 0
        while left := self._unscored(requests, rewards):
            loaded = False
            try:
                failure = await self._load(spec)
                loaded = True
                if failure is not None:
                    rewards.add({i: self._reward(failure) for i in left})
                else:
                    self._seen_modes[spec] = self._modes[spec]
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
                if num_bad_replies < _MAX_BAD_REPLIES:  # an earlier call may have caused it
                    self._counts[kind] += 1
                    self._counts["retries"] += 1
                    await self.close()
                    continue
            except asyncio.CancelledError:
                await self.close()
                raise
            self._counts[kind] += 1
            failed = [i for i in left if i not in rewards]
            if self._modes.get(spec) == "each":
                failed = failed[:1]  # the item in progress
            if loaded:  # a function that fails to load is not the task's fault
                self._blame(requests[i] for i in failed)
            await self.close()
            tries.update(failed)
            failed_for_good = [i for i in failed if tries[i] > self.config.retries]
            rewards.add({i: Reward(None, error=error) for i in failed_for_good})
            self._counts["retries"] += len(failed_for_good) < len(failed)

    async def _load(self, spec: str) -> Result | None:
        """Start the process and load the function, unless done. Return the failure if it cannot be loaded.

        TimeoutError after rewards.startup_timeout_s; WorkerDied; BadMessage.
        """
        process = self._process
        if process is None or not process.alive:
            await self.close()
            process = self._process = Worker(
                "the reward worker",
                "rollover.rewards.child",
                self._base_dir,
                int(self.config.memory_gb * 1e9),
                kept=True,
                environment=child_environment(OMP_NUM_THREADS="1"),  # the trainer owns the cores
                limits=WorkerLimits(MAX_REPLY_BYTES),
            )
        if spec in self._modes:
            return None
        try:
            message = {"op": "load", "spec": spec, **self._pack(spec)}
        except ValueError as error:  # of an object that cannot be copied
            return {"error": str(error)}
        found = await process.request(message, limit_s=self.config.startup_timeout_s)
        if not {"error", "mode"} & found.keys() or not isinstance(found.get("pid"), int):
            raise BadMessage("sent an invalid message")
        self._pid = found["pid"]
        if "error" in found:
            return found
        self._modes[spec] = found["mode"]
        return None

    async def _score_items(self, spec: str, requests: dict[int, ScoreRequest], rewards: _RewardTable) -> None:
        """Add the rewards as they arrive, so that a crash keeps the earlier ones.

        Returns early, with some unscored, if the process ran out of memory and must be replaced. TimeoutError after
        rewards.timeout_s (mode "each": of each item); WorkerDied; BadMessage.
        """
        assert self._process is not None, "the function is loaded"
        keys, mode, limit_s = list(requests), self._modes[spec], self.config.timeout_s
        missing, out_of_memory = set(range(len(keys))), list[int]()

        def take(reply: dict[str, Any]) -> bool:
            """Return whether no more replies are expected."""
            results = results_of(reply, mode, missing)
            missing.difference_update(results)
            rewards.add({keys[index]: self._reward(result) for index, result in results.items()})
            out_of_memory.extend(keys[index] for index, result in results.items() if "out_of_memory" in result)
            return not missing or (bool(out_of_memory) and mode == "each")

        items = [_item(request) for request in requests.values()]
        message = {"op": "score", "spec": spec, "items": items, "limit_s": limit_s}
        await self._process.request(message, take, limit_s, limit_each=mode == "each")
        if out_of_memory:  # its memory may still be full
            self._blame(requests[key] for key in out_of_memory)
            await self.close()

    def _unscored(self, requests: dict[int, ScoreRequest], rewards: _RewardTable) -> list[int]:
        """Give quarantined tasks a missing reward, and return the requests without a reward."""
        left = [i for i in requests if i not in rewards]
        quarantined = [i for i in left if requests[i].task.task_id in self.quarantine]
        error = f"quarantined: the task's calls ended {self.quarantine.limit} workers (rewards.quarantine_after)"
        rewards.add({i: Reward(None, error=error) for i in quarantined})
        self._counts["quarantined"] += len(quarantined)
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
    """Return the fields of a request that the process needs, as JSON."""
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


def results_of(reply: dict[str, Any], mode: str, missing: set[int]) -> dict[int, dict[str, Any]]:
    """Return the results in a reply by item index: {"score", "extras"} and optionally "shaping" (finite numbers) and
    "texts", or {"error"}.

    BadMessage unless they are for `missing` items: for one of them, in mode "batch" for all.
    """
    if mode == "batch":
        results = [reply] * len(missing) if "error" in reply else reply.get("results")
        return dict(zip(sorted(missing), _checked(results, len(missing)), strict=True))
    index = reply.get("index")
    if not isinstance(index, int) or index not in missing:
        raise BadMessage("scored another sample")
    return {index: _checked([reply.get("result")], 1)[0]}


def _checked(results: Any, num: int) -> list[dict[str, Any]]:
    if not isinstance(results, list) or len(results) != num or not all(map(_is_result, results)):
        raise BadMessage("sent invalid results")
    return results


def _is_result(result: Any) -> bool:
    if not isinstance(result, dict):
        return False
    if "error" in result:
        return isinstance(result["error"], str)
    parts, texts = (result.get("extras"), result.get("shaping", {})), result.get("texts", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        return False
    return _is_number(result.get("score")) and all(
        isinstance(part, dict) and all(map(_is_number, part.values())) for part in parts
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and is_score(value)


_MAX_TASKS = 100_000


class Quarantine:
    """Counts the worker processes that each task's calls ended. After `limit` of them (0: never), the task is not
    scored any more. Beyond `max_tasks` tasks, the one that was counted least recently is dropped."""

    def __init__(self, limit: int, max_tasks: int = _MAX_TASKS) -> None:
        self.limit, self.max_tasks = limit, max_tasks
        self._deaths: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, task_id: str) -> bool:
        return 0 < self.limit <= self._deaths.get(task_id, 0)

    def blame(self, task_id: str) -> None:
        """Count a worker process that a call for this task ended."""
        self._deaths[task_id] = self._deaths.pop(task_id, 0) + 1
        if len(self._deaths) > self.max_tasks:
            self._deaths.popitem(last=False)

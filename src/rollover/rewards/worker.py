"""The parent's end of a reward worker: a Rewarder whose functions run in one killable child process.

    score -> group by reward spec -> [load, once per process] -> score -> Reward per request
                 timeout or death -> kill; try again, or missing reward; a fresh process for the next call
                 no reply to this call -> kill; try again, though nothing is held against the task
                 out of memory    -> missing reward; a fresh process for the next call

Owns the process, its time limits, the tries and the counters. Never runs user code itself. Several of them are a
RewardPool (rewards/pool.py), which shares one Quarantine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rollover.config import RewardsConfig
from rollover.processes import child_command, child_environment
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.quarantine import Quarantine
from rollover.rewards.registry import RETURNED_NONE, Mode
from rollover.rewards.travel import packed
from rollover.rewards.wire import MAX_LINE_BYTES, BadReply, checked_results, reply_of
from rollover.types import Reward, Task

_EXIT_LIMIT_S = 5.0
_MAX_BAD_REPLIES = 3  # to one call, until it is given up
_STANDSTILL_GRACE_S = 0.05
_DUMMY_COMPLETION = "The answer is 0."
_COUNTERS = ("timeouts", "crashes", "errors", "out_of_memory", "quarantined", "retries")


class RewardProbeError(ValueError):
    """The reward function failed its call at start-up; the message names the function and says what was wrong."""


class WorkerHealth(NamedTuple):
    """A worker's last sign of life. `pid`: where functions run; None before it has loaded one, or with no process, as
    one starts with the next call. Seconds are None where there is nothing to measure: `busy_s` since its call began,
    `silent_s` since its process was started or last replied."""

    index: int
    pid: int | None
    busy_s: float | None
    silent_s: float | None


class _WorkerDied(Exception):
    """The child ended while a reply was due."""


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
    ) -> None:
        self.config = rewards or RewardsConfig.model_validate({})
        self.base_dir = os.path.abspath(base_dir)
        self.quarantine = quarantine or Quarantine(self.config.quarantine_after)
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None  # the keeper of the one that runs functions
        self._ending: asyncio.Future[None] | None = None  # of the one before
        self._pid: int | None = None  # of that one
        self._call = 0  # id of the present call; over all processes, so that none is ever used again
        self._modes: dict[str, Mode] = {}  # of the specs loaded in the current process
        self.seen_modes = {} if modes is None else modes  # of all specs that were ever loaded
        self._counts: Counter[str] = Counter()
        self._busy_since: float | None = None
        self._last_sign = 0.0

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """One Reward per request, in order. Never raises for a failing function: its rewards are missing."""
        rewards: dict[int, Reward] = {}
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
            name = task.reward.partition("/")[0] if ":" not in task.reward else task.reward
            end = "" if error.endswith(("?", ".")) else "."
            raise RewardProbeError(
                f"reward {name!r} of task {task.task_id!r} failed its start-up call: {error}{end}"
                " Fix the function, or name another in rewards.function or tasks.sources.reward"
            )

    def stats(self) -> dict[str, float]:
        """Cumulative counters (docs/metrics.md). timeouts and crashes count calls that were killed and that died, or
        got what is no reply to them, also those tried again; the others but retries count missing rewards."""
        return {f"rewards/{name}": self._counts[name] for name in _COUNTERS}

    def health(self, index: int = 0) -> WorkerHealth:
        """Its process and last sign of life, as worker number `index`."""
        now, process = time.monotonic(), self._process
        busy_s = None if self._busy_since is None else now - self._busy_since
        if process is None or process.returncode is not None:
            return WorkerHealth(index, None, busy_s, None)
        return WorkerHealth(index, self._pid, busy_s, now - self._last_sign)

    async def close(self) -> None:
        """Kill the child and reap it. The next `score` would start a new one."""
        await self._kill()

    async def _score_spec(self, spec: str, requests: dict[int, ScoreRequest], rewards: dict[int, Reward]) -> None:
        """Add the reward of each request to `rewards`, under the request's key."""
        tries: Counter[int] = Counter()
        num_bad_replies = 0
        while left := self._left(requests, rewards):
            loaded = False
            try:
                failure = await self._load(spec)
                loaded = True
                if failure is not None:
                    rewards |= {i: self._reward(failure) for i in left}
                else:
                    await self._score_items(spec, {i: requests[i] for i in left}, rewards)
                continue
            except TimeoutError:
                kind, limit_s = "timeouts", self.config.timeout_s if loaded else self.config.startup_timeout_s
                error = f"timeout after {limit_s:g} s"
            except _WorkerDied as death:
                kind, error = "crashes", str(death)
            except BadReply as bad:
                kind, error = "crashes", f"the reward worker {bad}"
                num_bad_replies += 1
                if num_bad_replies < _MAX_BAD_REPLIES:  # it may be the doing of an earlier call
                    self._counts[kind] += 1
                    self._counts["retries"] += 1
                    await self._kill()
                    continue
            except asyncio.CancelledError:
                await self._kill()  # a reply may still come: this process cannot be asked again
                raise
            self._counts[kind] += 1
            failed = [i for i in left if i not in rewards]
            if self._modes.get(spec) == "each":
                failed = failed[:1]  # the one that it was at
            if loaded:  # a function that cannot be loaded is not the task's fault
                self._blame(requests[i] for i in failed)
            await self._kill()
            tries.update(failed)
            given_up = [i for i in failed if tries[i] > self.config.retries]
            rewards |= {i: Reward(None, error=error) for i in given_up}
            self._counts["retries"] += len(given_up) < len(failed)

    def _left(self, requests: dict[int, ScoreRequest], rewards: dict[int, Reward]) -> list[int]:
        """Those without a reward; tasks in quarantine get none."""
        left = [i for i in requests if i not in rewards]
        barred = [i for i in left if requests[i].task.task_id in self.quarantine]
        error = f"quarantined: the task's calls ended {self.quarantine.limit} workers (rewards.quarantine_after)"
        rewards |= {i: Reward(None, error=error) for i in barred}
        self._counts["quarantined"] += len(barred)
        return [i for i in left if i not in rewards]

    def _blame(self, requests: Iterable[ScoreRequest]) -> None:
        for task_id in {request.task.task_id for request in requests}:
            self.quarantine.blame(task_id)

    async def _score_items(self, spec: str, requests: dict[int, ScoreRequest], rewards: dict[int, Reward]) -> None:
        """Add the rewards as they come, so that a death in the middle keeps those before it.

        Returns early, with some left, when the worker has to be replaced as it was out of memory.
        """
        mode, keys = self._modes[spec], list(requests)
        spent: list[int] = []

        def take(reply: dict[str, Any]) -> bool:
            """Whether nothing more is expected."""
            if mode == "batch":
                results = [reply] * len(keys) if "error" in reply else reply.get("results")
                scored = dict(zip(keys, checked_results(results, len(keys)), strict=True))
            else:
                index = reply.get("index")
                if not isinstance(index, int) or not 0 <= index < len(keys) or keys[index] in rewards:
                    raise BadReply("scored another sample")
                scored = {keys[index]: checked_results([reply.get("result")], 1)[0]}
            rewards.update((key, self._reward(result)) for key, result in scored.items())
            spent.extend(key for key, result in scored.items() if "out_of_memory" in result)
            return bool(spent) and mode == "each"

        message = {"op": "score", "spec": spec, "items": [_item(request) for request in requests.values()]}
        num_replies = 1 if mode == "batch" else len(keys)
        await self._ask(message, self.config.timeout_s, take, num_replies, limit_each=mode == "each")
        if spent:  # what filled its memory may fill it still
            self._blame(requests[key] for key in spent)
            await self._kill()

    def _reward(self, result: dict[str, Any]) -> Reward:
        if "error" not in result:
            return Reward(result["score"], result["extras"])
        if "out_of_memory" not in result:
            self._counts["errors"] += 1
            return Reward(None, error=result["error"])
        self._counts["out_of_memory"] += 1
        limit = f"rewards.memory_gb = {self.config.memory_gb:g}"
        return Reward(None, error=f"out of memory ({limit}): {result['error']}")

    async def _load(self, spec: str) -> dict[str, Any] | None:
        """Start the process and load the function, each if need be. Returns the failure if it cannot be loaded."""
        if self._process is None or self._process.returncode is not None:
            await self._kill()
            await self._start()
        if spec in self._modes:
            return None
        replies: list[dict[str, Any]] = []
        try:
            message = {"op": "load", "spec": spec, **packed(spec)}
        except ValueError as error:  # of an object that cannot be copied
            return {"error": str(error)}
        await self._ask(message, self.config.startup_timeout_s, replies.append)
        if not {"error", "mode"} & replies[0].keys() or not isinstance(replies[0].get("pid"), int):
            raise BadReply("said something that is no reply")
        self._pid = replies[0]["pid"]
        if "error" in replies[0]:
            return replies[0]
        self._modes[spec] = self.seen_modes[spec] = replies[0]["mode"]
        return None

    async def _start(self) -> None:
        self._last_sign = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *child_command("rollover.rewards.child", self.base_dir, int(self.config.memory_gb * 1e9), kept=True),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(OMP_NUM_THREADS="1"),  # the trainer owns the cores
            limit=MAX_LINE_BYTES,
            # Ctrl-C is for the loop. Not a session of its own: Linux shares the cores between sessions first, and each
            # worker would weigh as much as the trainer.
            process_group=0,
        )

    async def _ask(
        self,
        message: dict[str, Any],
        limit_s: float,
        take: Callable[[dict[str, Any]], object],
        num_replies: int = 1,
        *,
        limit_each: bool = False,
    ) -> None:
        """Send the message and hand the replies to `take`, until it returns something true or all have come.

        Raises TimeoutError after `limit_s`, with `limit_each` after so long without a reply; or _WorkerDied.
        """
        started = time.monotonic()
        exchange = asyncio.ensure_future(self._exchange(message, take, num_replies))
        try:
            while not exchange.done():
                begun = max(started, self._last_sign) if limit_each else started
                left_s = begun + limit_s - time.monotonic()
                if left_s > 0:
                    await asyncio.wait([exchange], timeout=left_s)
                    continue
                # A training step holds up the event loop for longer than a reward takes: what came meanwhile is read
                # before the limit counts.
                await asyncio.wait([exchange], timeout=_STANDSTILL_GRACE_S)
                if not exchange.done() and not (limit_each and self._last_sign > begun):
                    raise TimeoutError
            exchange.result()
        finally:
            exchange.cancel()

    async def _exchange(
        self, message: dict[str, Any], take: Callable[[dict[str, Any]], object], num_replies: int
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._call += 1
        self._process.stdin.write(json.dumps(message | {"call": self._call}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died: the reply says so
            await self._process.stdin.drain()
        for _ in range(num_replies):
            if take(await self._receive()):
                break

    async def _receive(self) -> dict[str, Any]:
        """The next reply to the present call. Raises BadReply, or _WorkerDied with how it ended."""
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            line = await process.stdout.readline()
        except ValueError:
            raise BadReply(f"said a line of more than {MAX_LINE_BYTES >> 20} MiB") from None
        if line.endswith(b"\n"):
            self._last_sign = time.monotonic()
            return reply_of(line, self._call)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _EXIT_LIMIT_S)
        raise _WorkerDied(f"the reward worker died in this call ({_how_it_ended(process.returncode)})")

    async def _kill(self) -> None:
        """End the process, and wait until it is gone, whoever began to end it."""
        process, self._process, self._modes, pid, self._pid = self._process, None, {}, self._pid, None
        if process is not None:
            self._ending = asyncio.ensure_future(_end(process, pid))
        if self._ending is not None and not self._ending.done():
            await asyncio.shield(self._ending)  # a call that is cancelled begins it, and may be cancelled once more


async def _end(process: asyncio.subprocess.Process, pid: int | None) -> None:
    """End the process and all that it started: its keeper does, unless that is not able to. `pid`: of the worker."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _EXIT_LIMIT_S)
    except TimeoutError:
        for group in (process.pid, pid):
            with contextlib.suppress(ProcessLookupError):
                if group is not None:
                    os.killpg(group, signal.SIGKILL)
        await process.wait()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    known = {s.value: s.name for s in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


def _item(request: ScoreRequest) -> dict[str, Any]:
    """What the worker needs of a request, as JSON."""
    task = request.task
    return {
        "prompt": task.reward_prompt,
        "completion": request.completion,
        "completion_ids": list(request.completion_ids),
        "columns": task.columns,
        "source": task.source,
    }

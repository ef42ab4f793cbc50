"""The parent's end of the reward worker: a Rewarder whose functions run in one killable child process.

    score -> group by reward spec -> [load, once per process] -> score -> Reward per request
                 timeout or death -> kill, missing reward, fresh process for the next call

Owns the process, its time limits and the counters. Never runs user code itself, never retries a failed call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rollover
from rollover.config import RewardsConfig
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import RETURNED_NONE
from rollover.types import Reward, Task

_MAX_LINE_BYTES = 64 * 2**20
_EXIT_LIMIT_S = 1.0
_DUMMY_COMPLETION = "The answer is 0."


class RewardProbeError(ValueError):
    """The reward function failed its call at start-up; the message names the function and says what was wrong."""


class _WorkerDied(Exception):
    """The child ended while a reply was due."""


class RewardWorker:
    """Scores rollouts in one child process; calls are serialised.

    A reward spec says which function (rewards/registry.py); relative paths and modules are looked up in `base_dir`.
    A call longer than `rewards.timeout_s` is killed; for a per-sample function (verl's signature, built-ins) the limit
    holds for each sample, and one failing sample leaves the others valid.
    """

    def __init__(self, rewards: RewardsConfig | None = None, base_dir: str | os.PathLike[str] = ".") -> None:
        self.config = rewards or RewardsConfig.model_validate({})
        self.base_dir = os.path.abspath(base_dir)
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._per_sample: dict[str, bool] = {}  # specs loaded in the current process
        self._timeouts = self._crashes = self._errors = 0

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """One Reward per request, in order. Never raises for a failing function: its rewards are missing."""
        rewards: dict[int, Reward] = {}
        async with self._lock:
            for spec in dict.fromkeys(request.task.reward for request in requests):
                indices = [i for i, request in enumerate(requests) if request.task.reward == spec]
                scored = await self._score_spec(spec, [_item(requests[i]) for i in indices])
                rewards.update(zip(indices, scored, strict=True))
        return [rewards[i] for i in range(len(requests))]

    async def probe(self, task: Task) -> None:
        """Call the task's reward on a dummy completion, then on two (a wrong length shows with two at the latest).

        Raises RewardProbeError unless it can be loaded, ends in time and returns scores. None is let pass: TRL uses it
        for "does not apply to this task".
        """
        counters = self._timeouts, self._crashes, self._errors
        error = None
        for num_completions in (1, 2):
            rewards = await self.score([ScoreRequest(task, _DUMMY_COMPLETION)] * num_completions)
            error = next((r.error for r in rewards if r.missing and r.error != RETURNED_NONE), None)
            if error is not None:
                break
        self._timeouts, self._crashes, self._errors = counters  # a probe is not data
        if error is not None:
            name = task.reward.partition("/")[0] if ":" not in task.reward else task.reward
            raise RewardProbeError(
                f"reward {name!r} of task {task.task_id!r} failed its start-up call: {error}."
                " Fix the function, or name another in rewards.function or tasks.sources.reward"
            )

    def stats(self) -> dict[str, float]:
        """Cumulative counters. timeouts and crashes count killed and died calls; errors counts rewards that are missing
        because the function raised or returned something else than a score."""
        return {
            "rewards/timeouts": self._timeouts,
            "rewards/crashes": self._crashes,
            "rewards/errors": self._errors,
        }

    async def close(self) -> None:
        """Kill the child and reap it. The next `score` would start a new one."""
        await self._kill()

    async def _score_spec(self, spec: str, items: Sequence[dict[str, Any]]) -> list[Reward]:
        rewards: list[Reward] = []
        while len(rewards) < len(items):
            left = items[len(rewards) :]
            try:
                failure = await self._load(spec)
                if failure is None:
                    await self._score_items(spec, left, rewards)
                    continue
                self._errors += len(left)
                return rewards + [Reward(None, error=failure)] * len(left)
            except TimeoutError:
                self._timeouts += 1
                error = f"timeout after {self._limit(spec):g} s"
            except _WorkerDied as death:
                self._crashes += 1
                error = str(death)
            except asyncio.CancelledError:
                await self._kill()  # a reply may still come: this process cannot be asked again
                raise
            # A per-sample function fails the sample it was at; while loading, and in a batch call, all that is left.
            num_failed = 1 if self._per_sample.get(spec) else len(left)
            await self._kill()
            rewards += [Reward(None, error=error)] * min(num_failed, len(items) - len(rewards))
        return rewards

    async def _score_items(self, spec: str, items: Sequence[dict[str, Any]], rewards: list[Reward]) -> None:
        """Append the rewards to `rewards` as they come, so that a death in the middle keeps those before it."""
        per_sample = self._per_sample[spec]
        await self._send({"op": "score", "spec": spec, "items": items})
        if per_sample:
            for _ in items:
                rewards.append(self._reward((await self._receive(self.config.timeout_s))["result"]))
            return
        reply = await self._receive(self.config.timeout_s)
        results = reply.get("results") or [{"error": reply["failed"]}] * len(items)
        rewards += [self._reward(result) for result in results]

    def _reward(self, result: dict[str, Any]) -> Reward:
        if "error" in result:
            self._errors += 1
            return Reward(None, error=result["error"])
        return Reward(result["score"], result["extras"])

    def _limit(self, spec: str) -> float:
        return self.config.timeout_s if spec in self._per_sample else self.config.startup_timeout_s

    async def _load(self, spec: str) -> str | None:
        """Start the process and load the function, each if need be. Returns why it cannot be loaded."""
        if self._process is None or self._process.returncode is not None:
            await self._kill()
            await self._start()
        if spec in self._per_sample:
            return None
        await self._send({"op": "load", "spec": spec})
        reply = await self._receive(self.config.startup_timeout_s)
        if "failed" in reply:
            return reply["failed"]
        self._per_sample[spec] = reply["per_sample"]
        return None

    async def _start(self) -> None:
        package_root = str(Path(rollover.__file__).resolve().parents[1])
        inherited = os.environ.get("PYTHONPATH", "")
        environment = {
            "OMP_NUM_THREADS": "1",  # the trainer owns the cores
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, inherited])),
        }
        # -P: a json.py in the working directory must not replace the standard library's in our own imports.
        command = [sys.executable, "-P", "-m", "rollover.rewards.worker", str(os.getpid()), self.base_dir]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the loop; a kill reaches what the function started
        )

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died: the reply says so
            await self._process.stdin.drain()

    async def _receive(self, limit_s: float) -> dict[str, Any]:
        """The next reply. Raises TimeoutError, or _WorkerDied with how it ended."""
        assert self._process is not None and self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
        if line.endswith(b"\n"):
            return json.loads(line)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_LIMIT_S)
        code = self._process.returncode
        if code is None:
            how = "it closed its pipe"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise _WorkerDied(f"the reward worker died in this call ({how})")

    async def _kill(self) -> None:
        process, self._process, self._per_sample = self._process, None, {}
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def _item(request: ScoreRequest) -> dict[str, Any]:
    """What the worker needs of a request, as JSON."""
    task = request.task
    return {
        "prompt": task.prompt if task.prompt is not None else [dict(m) for m in task.messages or ()],
        "completion": request.completion,
        "completion_ids": list(request.completion_ids),
        "columns": task.columns,
        "source": task.source,
    }

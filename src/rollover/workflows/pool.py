"""workflow.num_processes: a plain, blocking `def` plays episodes in worker processes.

    Episode ──▶ waits for a worker, first in first out ──▶ the function, with calls over HTTP ──▶ its answer
                    crash, MemoryError, cancellation (timeout, stop) ──▶ the worker is killed, and replaced on next use

A worker plays one Episode at a time. It is reused, so the module state of the user's function persists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rollover.functions import CustomFunction
from rollover.processes import ALL, child_environment
from rollover.rewards.serialization import packed
from rollover.workers.framing import BadMessage
from rollover.workers.worker import Worker, WorkerDied
from rollover.workflows.protocol import (
    IN_WORKER,
    KEY,
    OVER_HTTP,
    RETURNS,
    Answer,
    AsksByKey,
    Lane,
    PerLane,
    Waiting,
    wanted_by,
)
from rollover.workflows.worker import answer_from_json

LOAD_LIMIT_S = 120.0
"""Limit for importing the function's module in a worker."""
_NAME = "its worker process"


class WorkerFailed(Exception):
    """The function raised, or its process died."""


class WorkflowPool(AsksByKey):
    """Workflow that runs the plain `function`, named `spec`, in `num_processes` workers for each lane, of `memory_gb`
    each (0: no limit). `visible`: as of `child_environment`. ValueError, with the fix, for an unknown parameter or a
    function that cannot be pickled."""

    def __init__(
        self,
        function: Callable[..., Any],
        spec: str,
        num_processes: int,
        memory_gb: float = 0.0,
        visible: Sequence[str] = ALL,
    ) -> None:
        self.spec = spec
        own = CustomFunction.over(function, KEY, RETURNS)
        self._wanted = wanted_by(own.function, spec, IN_WORKER, "it lives in the run's own process. Ask by client")
        self._load = {"op": "load", "spec": spec, **packed(spec, "workflow")}
        self._workers = PerLane(lambda: _Workers(num_processes, memory_gb, visible))

    @property
    def wanted(self) -> list[str]:
        """Without the client, which is created in the worker."""
        return [name for name in self._wanted if name != "client"]

    @property
    def over_http(self) -> bool:
        return any(name in OVER_HTTP for name in self._wanted)

    async def __call__(
        self, values: Mapping[str, Any], waiting: Waiting = nullcontext, lane: Lane = Lane.TRAINING, /
    ) -> Answer:
        """Run the function in a worker. WorkerFailed if it fails."""
        workers = self._workers.here(lane)
        with waiting():
            await workers.places.acquire()
        worker = workers.free.pop()
        try:
            with waiting():
                await worker.load(self._load)
            arguments = {name: values[name] for name in ("base_url", "api_key", "model")}
            return await worker.play(arguments | {"task": values["task"].to_json()})
        finally:
            workers.free.append(worker)
            workers.places.release()

    async def close(self) -> None:
        """Kill all workers and reap them."""
        await asyncio.gather(*(worker.kill() for workers in self._workers for worker in workers.all))


class _Workers:
    """The workers of a lane. `free`: those without an Episode; `places` counts them."""

    def __init__(self, num: int, memory_gb: float, visible: Sequence[str]) -> None:
        self.places = asyncio.Semaphore(num)
        self.all = [_Worker(memory_gb, visible) for _ in range(num)]
        self.free = self.all[::-1]


class _Worker:
    """A worker, whose process starts on first use."""

    def __init__(self, memory_gb: float, visible: Sequence[str]) -> None:
        self._memory_gb, self._visible = memory_gb, visible
        self._worker: Worker | None = None
        self._is_loaded = False

    async def load(self, message: dict[str, Any]) -> None:
        """Start the process and load the function, unless done."""
        if self._worker is None or not self._worker.alive:
            await self.kill()
            self._is_loaded = False
            self._worker = Worker(
                _NAME,
                "rollover.workflows.worker",
                int(self._memory_gb * 1e9),
                kept=True,
                environment=child_environment(self._visible, OMP_NUM_THREADS="1"),  # the trainer owns the cores
            )
        if not self._is_loaded:
            await self._ask(message, LOAD_LIMIT_S)
            self._is_loaded = True

    async def play(self, values: dict[str, Any]) -> Answer:
        found = await self._ask({"op": "play", "values": values})
        try:
            return answer_from_json(found["answer"])
        except (LookupError, TypeError):
            await self.kill()
            raise WorkerFailed(f"{_NAME} sent an invalid answer") from None

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        if self._worker is not None:
            await self._worker.killed()

    async def _ask(self, message: dict[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        """Return the reply. After WorkerFailed or a cancellation, the process has been killed."""
        assert self._worker is not None, "it is loaded first"
        try:
            found = await self._worker.request(message, limit_s=limit_s)
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise WorkerFailed(f"{_NAME} did not load it within {limit_s:g} s") from error
            if isinstance(error, WorkerDied):
                raise WorkerFailed(str(error)) from error
            if isinstance(error, BadMessage):
                raise WorkerFailed(f"{_NAME} {error}") from error
            raise
        if found.get("out_of_memory"):  # its memory may still be full
            await self.kill()
            raise WorkerFailed(f"out of memory (workflow.memory_gb = {self._memory_gb:g}): {found['error']}")
        if "error" in found:
            raise WorkerFailed(found["error"])
        return found

"""Our end of a reward worker's process (rewards/child.py runs in it): one call at a time, each within its limit.

Owns the process and its channel, and says how it failed. Decides nothing: what a failure means, RewardWorker knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from rollover.config import RewardsConfig
from rollover.processes import child_command, child_environment
from rollover.rewards.registry import Item, Mode, Result
from rollover.rewards.travel import packed
from rollover.rewards.wire import MAX_LINE_BYTES, BadReply, reply_of, results_of

_EXIT_LIMIT_S = 5.0
_STANDSTILL_GRACE_S = 0.05


class WorkerDied(Exception):
    """The process ended while a reply was due."""


class RewardClient:
    """The process is started by `load`, and again after it was killed or has died. What cannot be answered in time, or
    is answered wrongly, raises; the caller kills the process then, as a reply may still come."""

    def __init__(self, rewards: RewardsConfig, base_dir: str) -> None:
        self._config, self._base_dir = rewards, base_dir
        self.modes: dict[str, Mode] = {}
        """How the functions are called that are loaded in the present process, by their specs."""
        self._process: asyncio.subprocess.Process | None = None  # the keeper of the one that runs functions
        self._pid: int | None = None  # of that one
        self._ending: asyncio.Future[None] | None = None  # of the process before
        self._call = 0  # id of the present call; over all processes, so that none is ever used again
        self._last_sign = 0.0

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Id of the process that runs functions; None before it has loaded one."""
        return self._pid if self.alive else None

    @property
    def silent_s(self) -> float | None:
        """Seconds since the process was started or last replied; None without one."""
        return time.monotonic() - self._last_sign if self.alive else None

    async def load(self, spec: str) -> Result | None:
        """Start the process and load the function, each if need be. Returns the failure if it cannot be loaded.

        TimeoutError after rewards.startup_timeout_s; WorkerDied; BadReply.
        """
        if not self.alive:
            await self.kill()
            await self._start()
        if spec in self.modes:
            return None
        try:
            message = {"op": "load", "spec": spec, **packed(spec)}
        except ValueError as error:  # of an object that cannot be copied
            return {"error": str(error)}
        found: dict[str, Any] = {}

        def take(reply: dict[str, Any]) -> bool:
            found.update(reply)
            return True

        await self._ask(message, self._config.startup_timeout_s, take)
        if not {"error", "mode"} & found.keys() or not isinstance(found.get("pid"), int):
            raise BadReply("said something that is no reply")
        self._pid = found["pid"]
        if "error" in found:
            return found
        self.modes[spec] = found["mode"]
        return None

    async def score(self, spec: str, items: list[Item], take: Callable[[dict[int, Result]], bool]) -> None:
        """Score items with a loaded function. `take` gets the results as they come, by the index of their item, until
        it returns True: the rest is not waited for, and the process has to be killed.

        TimeoutError after rewards.timeout_s (mode "each": of each item); WorkerDied; BadReply.
        """
        mode, missing = self.modes[spec], set(range(len(items)))

        def take_reply(reply: dict[str, Any]) -> bool:
            results = results_of(reply, mode, missing)
            missing.difference_update(results)
            return take(results) or not missing

        message = {"op": "score", "spec": spec, "items": items}
        await self._ask(message, self._config.timeout_s, take_reply, limit_each=mode == "each")

    async def kill(self) -> None:
        """End the process, and wait until it is gone, whoever began to end it."""
        process, pid = self._process, self._pid
        self._process, self._pid, self.modes = None, None, {}
        if process is not None:
            self._ending = asyncio.ensure_future(_end(process, pid))
        if self._ending is not None and not self._ending.done():
            await asyncio.shield(self._ending)  # a call that is cancelled begins it, and may be cancelled once more

    # Private

    async def _start(self) -> None:
        self._last_sign = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *child_command("rollover.rewards.child", self._base_dir, int(self._config.memory_gb * 1e9), kept=True),
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
        take: Callable[[dict[str, Any]], bool],
        *,
        limit_each: bool = False,
    ) -> None:
        """Send the message and hand the replies to `take`, until it returns True.

        Raises TimeoutError after `limit_s`, with `limit_each` after so long without a reply; or WorkerDied.
        """
        started = time.monotonic()
        exchange = asyncio.ensure_future(self._exchange(message, take))
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

    async def _exchange(self, message: dict[str, Any], take: Callable[[dict[str, Any]], bool]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._call += 1
        self._process.stdin.write(json.dumps(message | {"call": self._call}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died: the reply says so
            await self._process.stdin.drain()
        while not take(await self._receive()):
            pass

    async def _receive(self) -> dict[str, Any]:
        """The next reply to the present call. Raises BadReply, or WorkerDied with how it ended."""
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
        raise WorkerDied(f"the reward worker died in this call ({_how_it_ended(process.returncode)})")


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

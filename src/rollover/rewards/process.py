"""A child process that answers calls, in lines of JSON: one call at a time, each within its limit.

Reward workers are such processes, and those of workflows that block. The keeper of processes.py stands between it and
us, so that neither it nor what it starts is left over. Owns the process and its channel, and says how it failed.
Decides nothing: what a failure means, who asks knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollover.processes import ALL, child_command, child_environment
from rollover.rewards.wire import MAX_LINE_BYTES, BadReply, reply_of

_EXIT_LIMIT_S = 5.0
_STANDSTILL_GRACE_S = 0.05


class WorkerDied(Exception):
    """The process ended while a reply was due."""


class WorkerProcess:
    """`name`: as in "the reward worker died in this call". What runs in it is main(*arguments) of `module`, and it sees
    the `visible` variables (`child_environment`).

    What cannot be answered in time, or is answered wrongly, raises; the caller kills the process then, as a reply may
    still come.
    """

    def __init__(self, name: str, module: str, *arguments: object, visible: Sequence[str] = ALL) -> None:
        self.name, self._module, self._arguments, self._visible = name, module, arguments, visible
        self._process: asyncio.subprocess.Process | None = None  # the keeper of the one that answers
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
        """Id of the process that answers; None before its first reply."""
        return self._pid if self.alive else None

    @property
    def silent_s(self) -> float | None:
        """Seconds since the process was started or last replied; None without one."""
        return time.monotonic() - self._last_sign if self.alive else None

    async def start(self) -> None:
        """In the place of one that has ended or was killed."""
        await self.kill()
        self._last_sign = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *child_command(self._module, *self._arguments, kept=True),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(self._visible, OMP_NUM_THREADS="1"),  # the trainer owns the cores
            limit=MAX_LINE_BYTES,
            # Ctrl-C is for the loop. Not a session of its own: Linux shares the cores between sessions first, and each
            # worker would weigh as much as the trainer.
            process_group=0,
        )

    async def ask(
        self,
        message: dict[str, Any],
        take: Callable[[dict[str, Any]], bool],
        limit_s: float | None = None,
        *,
        limit_each: bool = False,
    ) -> None:
        """Send the message and hand the replies to `take`, until it returns True.

        TimeoutError after `limit_s`, with `limit_each` after so long without a reply; WorkerDied; BadReply.
        """
        if limit_s is None:
            return await self._exchange(message, take)
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

    async def kill(self) -> None:
        """End the process, and wait until it is gone, whoever began to end it."""
        process, pid = self._process, self._pid
        self._process, self._pid = None, None
        if process is not None:
            self._ending = asyncio.ensure_future(end_kept(process, pid))
        if self._ending is not None and not self._ending.done():
            await asyncio.shield(self._ending)  # a call that is cancelled begins it, and may be cancelled once more

    # Private

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
            reply = reply_of(line, self._call)
            if isinstance(reply.get("pid"), int):
                self._pid = reply["pid"]
            return reply
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _EXIT_LIMIT_S)
        raise WorkerDied(f"{self.name} died in this call ({how_it_ended(process.returncode)})")


async def end_kept(process: asyncio.subprocess.Process, pid: int | None = None) -> None:
    """End a kept child and all that it started: its keeper, which `process` is, does so, unless it is not able to.
    `pid`: of the child."""
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


def how_it_ended(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    known = {s.value: s.name for s in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"

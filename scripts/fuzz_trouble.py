"""What scripts/fuzz.py does to a run: signals to its processes, delays, interruptions; and what processes it left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rollover.engine.process.engine import ProcessEngine
from rollover.rewards.pool import RewardPool
from rollover.rollout.lifecycle import Lifecycle

_MARK = "ROLLOVER_FUZZ"


class Trouble:
    """Does something to the run at random moments, until it is cancelled. Counts what it did in `counts`."""

    def __init__(
        self, rng: random.Random, engine: ProcessEngine, pool: RewardPool, lifecycle: Lifecycle, counts: Counter[str]
    ) -> None:
        self.rng, self.engine, self.pool, self.lifecycle, self.counts = rng, engine, pool, lifecycle, counts
        self._steps_at_trouble = 0.0

    async def make(self) -> None:
        troubles = {self._kill_engine: 3, self._stop_engine: 3, self._stop_worker: 2, self._kill_worker: 3}
        troubles |= {self._kill_keeper: 2, self._hold_up: 8, self._interrupt: 15}
        while True:
            await asyncio.sleep(self.rng.random())
            await self.rng.choices(list(troubles), list(troubles.values()))[0]()

    def _engine_goes(self) -> bool:
        """Whether it has finished something since the last trouble, or, rarely, not: four deaths in a row end a run."""
        steps = self.engine.stats().get("engine/decode_steps", 0)
        goes = steps > self._steps_at_trouble or self.rng.random() < 0.1
        self._steps_at_trouble = steps if goes else self._steps_at_trouble
        return goes

    async def _kill_engine(self) -> None:
        if self._engine_goes():
            self.counts["engine kills"] += _signal(self.engine.pid, signal.SIGKILL)

    async def _stop_engine(self) -> None:
        if self._engine_goes():
            pid = self.engine.pid
            self.counts["engine hangs"] += _signal(pid, signal.SIGSTOP)
            if self.rng.random() < 0.8:  # else the watchdog must end it
                await asyncio.sleep(self.rng.random())
                _signal(pid, signal.SIGCONT)

    def _worker(self) -> int | None:
        return self.rng.choice([health.pid for health in self.pool.health()])

    async def _stop_worker(self) -> None:
        if pid := self._worker():
            self.counts["reward worker hangs"] += _signal(pid, signal.SIGSTOP)

    async def _kill_worker(self) -> None:
        if pid := self._worker():
            self.counts["reward worker kills"] += _signal(pid, signal.SIGKILL)

    async def _kill_keeper(self) -> None:
        """What it kept may live on (docs/rewards.md), so it is ended here: what is left over is the product's doing."""
        if (pid := self._worker()) and self.rng.random() < 0.3:
            keeper = _parent_of(pid)
            if keeper is not None and _parent_of(keeper) == os.getpid():
                family = _descendants(keeper)
                self.counts["keeper kills"] += _signal(keeper, signal.SIGKILL)
                for member in family:
                    _signal(member, signal.SIGKILL)

    async def _hold_up(self) -> None:
        self.counts["delays"] += 1
        time.sleep(self.rng.random() * 0.5)

    async def _interrupt(self) -> None:
        running = [r.rollout_id for r in self.lifecycle.cache.running()]
        self.counts["interruptions"] += 1
        self.engine.interrupt(self.rng.sample(running, min(2, len(running))))


def _signal(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _parent_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _descendants(pid: int) -> list[int]:
    parents = {int(name): _parent_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found[1:]


@contextlib.contextmanager
def marked_processes() -> Iterator[None]:
    """Every process that starts in this block, whatever becomes of it, is one of which `left_over` knows."""
    os.environ[_MARK] = uuid.uuid4().hex
    try:
        yield
    finally:
        del os.environ[_MARK]


async def left_over() -> list[str]:
    """Those that live, after a time to end."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    left: list[str] = []
    for _ in range(200):
        left = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and int(name) != os.getpid():
                    if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        left.append(f"{name} {Path(f'/proc/{name}/cmdline').read_bytes()[:200]!r}")
        if not left:
            break
        await asyncio.sleep(0.05)
    return left

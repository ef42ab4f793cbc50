"""Generation and training, one after the other or at the same time: who works in which thread, with which cores.

    sync        collect ──▶ train                        both in the event loop's thread, each with all cores
    overlap     collect ──▶ train in the trainer's thread, while the driver generates for later steps
    streaming   collect, while the trainer's thread adds up the gradient of groups that are READY ──▶ train the rest
                      └─ reserve ──▶ groups with a signal ──▶ trainer.accumulate

Owns the trainer's thread and the shares of the cores. Never decides what is generated or trained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rollover.config import Config
from rollover.models.threads import most_threads
from rollover.run import blocked_warning
from rollover.run.metrics_row import Rows
from rollover.run.setup import RunContext
from rollover.types import Group

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shares:
    """CPU threads of trainer and engine while both work, and of either (`alone`) while the other waits."""

    trainer: int
    engine: int
    alone: int

    @classmethod
    def of(cls, config: Config) -> Shares:
        """If they never work at the same time, either has all, in turns."""
        total = most_threads(config)
        if not (config.rollout.overlap or config.train.streaming_min_groups):
            return cls(total, total, total)
        engine = min(config.engine.threads or max(1, total // 2), total)
        return cls(max(1, total - engine), engine, total)


class Overlap:
    """The driver's and the trainer's work of one run.

    `is_on`: whether rollouts are generated while the trainer trains. `rows` counts the trainer's seconds.
    """

    def __init__(self, context: RunContext, rows: Rows) -> None:
        self.config, self.parts, self.rows = context.config, context.parts, rows
        self.is_on = rows.overlaps
        self.shares = Shares.of(self.config)
        # One thread for all steps: it keeps its own team of torch's threads.
        self._thread = ThreadPoolExecutor(1, "trainer")

    async def collect(self, version: int) -> list[Group] | None:
        """As `Driver.collect`; with train.streaming_min_groups the trainer works on what is ready meanwhile."""
        min_groups = self.config.train.streaming_min_groups
        with self.event_loop_watched(self._generating):
            if not min_groups:
                return await self.parts.driver.collect(version)
            return await self._collect_and_accumulate(version, min_groups)

    async def train(self, work: Callable[[], Result], version: int, *, goes_on: bool = False) -> Result:
        """What `work`, the training step at trainer `version` or a part of it, returns; with overlap generation goes on
        meanwhile, and until the next groups are collected. `goes_on`: it does so already, since an earlier part."""
        if not self.is_on:
            return work()
        if not goes_on:
            self.parts.driver.go_on(version)
            for _ in range(2):  # what may start has begun then, or the driver knows that nothing may
                await asyncio.sleep(0)
        with self.event_loop_watched(self._generating):
            return await self._beside_generation(work)

    async def interrupt_all(self) -> None:
        """Park what is in flight, if anything is: a snapshot is a cut at which nothing runs."""
        if self.is_on:
            await self.parts.driver.interrupt_all()

    @contextmanager
    def training(self, version: int) -> Iterator[None]:
        """Count the block as training for the step at trainer `version`, and warn if it does not end."""
        what, limit_s = f"the training of step {version + 1}", self.config.watchdog.train_timeout_s
        with self.rows.timed("train"), blocked_warning.over_work(what, "begun", limit_s):
            yield

    def event_loop_watched(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        """Warn if the engine holds up the event loop in the block. `doing` says what the run does."""
        return blocked_warning.over_event_loop(doing, self.config.watchdog.rollout_timeout_s)

    def close(self) -> None:
        """End the trainer's thread."""
        self._thread.shutdown()

    # Private

    async def _collect_and_accumulate(self, version: int, min_groups: int) -> list[Group] | None:
        """`driver.collect(version)`; meanwhile the trainer's work on every `min_groups` groups that are ready.

        Weights change once, when all gradients of the step are there, so no token gets staler by this. Which groups
        come first depends on the order of arrival; the sum of their gradients is the same up to rounding. After a stop
        (None) or an error nothing of it is left: the groups stay in the cache, the gradient is forgotten.
        """
        driver, batches, trainer = self.parts.driver, self.parts.batches, self.parts.trainer
        lifecycle = driver.lifecycle
        collected, collecting = None, asyncio.ensure_future(driver.collect(version))
        try:
            while not collecting.done():
                reserved = lifecycle.scheduler.reserve(version, min_groups)
                groups = [lifecycle.cache.groups[group_id] for group_id in reserved]
                if groups:
                    samples = batches.with_signal(groups, version)
                    with self.training(version):
                        await self._beside_generation(lambda samples=samples: trainer.accumulate(samples))
                else:
                    arrival = asyncio.ensure_future(driver.next_ready())
                    await asyncio.wait([collecting, arrival], return_when=asyncio.FIRST_COMPLETED)
                    arrival.cancel()
            collected = collecting.result()
        except BaseException:
            collecting.cancel()
            await asyncio.wait([collecting])
            raise
        finally:
            if collected is None:
                lifecycle.scheduler.forget_reserved()
                trainer.forget_accumulated()
        return collected

    async def _beside_generation(self, work: Callable[[], Result]) -> Result:
        """The trainer's work in its thread, while the engine goes on with the cores that are left to it."""
        engine, team = self.parts.engine, self.parts.trainer.team
        engine.use_threads(self.shares.engine)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, team.compute, self._trainers_share, work)
        finally:
            team.use(self.shares.alone)
            engine.use_threads(self.shares.alone)

    def _trainers_share(self) -> int:
        """The trainer's share of the cores, or all once the engine has nothing to run beside it."""
        return self.shares.alone if self.parts.driver.clock.idle.running else self.shares.trainer

    def _generating(self) -> str:
        return f"generating: {self.parts.driver.watchdog.describe(time.monotonic())}"

"""Generation and training, one after the other or at the same time: their threads and shares of the CPU cores.

    sync        collect ──▶ train                        both in the event loop's thread, each with all cores
    overlap     collect ──▶ train in the trainer's thread, while the driver generates for later steps
    streaming   collect, while the trainer's thread accumulates the gradient of READY groups ──▶ train the rest
                      └─ reserve ──▶ groups with a signal ──▶ trainer.accumulate

Owns the trainer's thread and the shares of the cores. Never decides which rollouts are generated or trained.
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
from rollover.run.metrics_row import StepMetrics
from rollover.run.setup import RunContext
from rollover.types import Group

Result = TypeVar("Result")


@dataclass(frozen=True)
class CoreShares:
    """CPU threads of trainer and engine while both work, and of either one (`alone`) while the other is idle."""

    trainer: int
    engine: int
    alone: int

    @classmethod
    def from_config(cls, config: Config) -> CoreShares:
        """Divide the cores; without overlap each of the two gets all of them."""
        total = most_threads(config)
        if not (config.rollout.overlap or config.train.streaming_min_groups):
            return cls(total, total, total)
        engine = min(config.engine.threads or max(1, total // 2), total)
        return cls(max(1, total - engine), engine, total)


class Pipeline:
    """The driver's and the trainer's work of one run.

    `overlaps`: whether rollouts are generated while the trainer trains. `step_metrics` counts the trainer's seconds.
    """

    def __init__(self, context: RunContext, step_metrics: StepMetrics) -> None:
        self.config, self.components, self.step_metrics = context.config, context.components, step_metrics
        self.overlaps = step_metrics.overlaps
        self.shares = CoreShares.from_config(self.config)
        # One thread for all steps: it has its own team of torch threads.
        self._thread = ThreadPoolExecutor(1, "trainer")

    async def collect(self, version: int) -> list[Group] | None:
        """Return Driver.collect; with train.streaming_min_groups the trainer accumulates ready groups meanwhile."""
        min_groups = self.config.train.streaming_min_groups
        with self.event_loop_watched(self._generating):
            if not min_groups:
                return await self.components.driver.collect(version)
            return await self._collect_and_accumulate(version, min_groups)

    async def train(self, work: Callable[[], Result], version: int, *, generates: bool = False) -> Result:
        """Return the result of `work`, the training step at trainer `version` or a part of it.

        With overlap, generation continues meanwhile, and until the next groups are collected. `generates`: an earlier
        part of the step has started it.
        """
        if not self.overlaps:
            return work()
        if not generates:
            self.components.driver.generate_ahead(version)
            for _ in range(2):  # then rollouts have started, or the driver knows that none can
                await asyncio.sleep(0)
        with self.event_loop_watched(self._generating):
            return await self._beside_generation(work)

    async def interrupt_all(self) -> None:
        """Park the rollouts in flight: nothing may run during a snapshot."""
        if self.overlaps:
            await self.components.driver.interrupt_all()

    @contextmanager
    def training(self, version: int) -> Iterator[None]:
        """Count the block as training for the step at trainer `version`, and warn if it takes too long."""
        what, limit_s = f"the training of step {version + 1}", self.config.watchdog.train_timeout_s
        with self.step_metrics.timed("train"), blocked_warning.over_work(what, "begun", limit_s):
            yield

    def event_loop_watched(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        """Warn if the engine blocks the event loop in the block. `doing()`: description of the current work."""
        return blocked_warning.over_event_loop(doing, self.config.watchdog.rollout_timeout_s)

    def close(self) -> None:
        """End the trainer's thread."""
        self._thread.shutdown()

    # Private

    async def _collect_and_accumulate(self, version: int, min_groups: int) -> list[Group] | None:
        """Return `driver.collect(version)`; the trainer accumulates gradients of every `min_groups` ready groups.

        The weights change once, with all gradients of the step, so no token gets staler. Which groups come first
        depends on their order of arrival; the sum of gradients is the same up to rounding. After a stop (None) or an
        error the groups stay in the cache, and the gradient is discarded.
        """
        driver, batches, trainer = self.components.driver, self.components.batches, self.components.trainer
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
                lifecycle.scheduler.clear_reserved()
                trainer.discard_accumulated()
        return collected

    async def _beside_generation(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the trainer's thread, while the engine continues on its share of the cores."""
        engine, team = self.components.engine, self.components.trainer.team
        engine.use_threads(self.shares.engine)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, team.compute, self._trainers_share, work)
        finally:
            team.use(self.shares.alone)
            engine.use_threads(self.shares.alone)

    def _trainers_share(self) -> int:
        """Return the trainer's share of the cores: all of them once the engine is idle."""
        return self.shares.alone if self.components.driver.clock.idle.running else self.shares.trainer

    def _generating(self) -> str:
        return f"generating: {self.components.driver.watchdog.describe(time.monotonic())}"

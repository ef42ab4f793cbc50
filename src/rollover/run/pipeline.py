"""Generation, training and weight sync, one after the other or at the same time; their threads and CPU cores.

    sync        produce ──▶ train                        both in the event loop's thread, each with all cores
    overlap     produce ──▶ train in the trainer's thread, while the driver generates for later steps
    streaming   produce, while the trainer's thread accumulates the gradient of READY groups ──▶ train the rest
                      └─ reserve ──▶ groups with a signal ──▶ trainer.accumulate

    step trained ──▶ sync due? ──▶ (drain) ──▶ publish ──▶ engine.load_weights ──▶ trace, event log, the user's hook

With cluster.colocate the engine sleeps from the last rollout of a step until the weight sync.

Owns the trainer's thread and the shares of the cores. Never decides which rollouts are generated, trained or dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

from rollover.config import Config
from rollover.engine.protocol import Sleeper
from rollover.models.threads import most_threads
from rollover.run import blocked_warning
from rollover.run.event_log import EventLog
from rollover.run.producer import Producer
from rollover.run.setup import RunContext
from rollover.run.step_log import StepLog
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


class Pipeline(Producer):
    """The driver's and the trainer's work of one run, and the weights that the engine gets.

    `step_log` counts the seconds. `syncs`: whether the engine generates for training, not only for evaluations.
    """

    source, uses_engine = "tasks", True

    def __init__(self, context: RunContext, step_log: StepLog, event_log: EventLog, *, syncs: bool) -> None:
        self.config, self.components, self.hooks = context.config, context.components, context.hooks
        self.step_log, self.event_log, self.syncs = step_log, event_log, syncs
        self.shares = CoreShares.from_config(self.config)
        # One thread for all steps: it has its own team of torch threads.
        self._thread = ThreadPoolExecutor(1, "trainer")
        self.taken: list[Group] = []  # groups of the step that is being trained
        self._in_engine: int | None = None  # version of the weights of the last sync

    async def produce(self, step: int, version: int) -> list[Group] | None:
        """Return Driver.collect; with train.streaming_min_groups the trainer accumulates ready groups meanwhile."""
        min_groups = self.config.train.streaming_min_groups
        with self.event_loop_watched(self._generating):
            if not min_groups:
                return await self.components.driver.collect(version)
            return await self._collect_and_accumulate(version, min_groups)

    async def generate_ahead(self, version: int) -> None:
        """With overlap, generate for later steps from here on, until the next groups are collected."""
        if self.config.rollout.overlap:
            self.components.driver.generate_ahead(version)
            for _ in range(2):  # then rollouts have started, or the driver knows that none can
                await asyncio.sleep(0)

    async def train(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, a part of a training step. With overlap it is done in the trainer's thread."""
        if not self.config.rollout.overlap:
            return work()
        with self.event_loop_watched(self._generating):
            return await self._beside_generation(work)

    async def interrupt_all(self) -> None:
        """Park the rollouts in flight: nothing may run during a snapshot."""
        if self.config.rollout.overlap:
            await self.components.driver.interrupt_all()

    @contextmanager
    def training(self, version: int, groups: Sequence[Group] = ()) -> Iterator[None]:
        """Count the block as training for the step at trainer `version`, and warn if it takes too long.

        `groups`: taken from the cache for it. They stay in `taken` if the block fails.
        """
        self.taken = list(groups)
        what, limit_s = f"the training of step {version + 1}", self.config.watchdog.train_timeout_s
        with self.step_log.timed("train"), blocked_warning.over_work(what, "begun", limit_s):
            yield
        self.taken = []

    def event_loop_watched(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        """Warn if the engine blocks the event loop in the block. `doing()`: description of the current work."""
        return blocked_warning.over_event_loop(doing, self.config.watchdog.rollout_timeout_s)

    def close(self) -> None:
        """End the trainer's thread."""
        self._thread.shutdown()

    # Weight sync

    async def sync_if_due(self) -> int:
        """Sync after every train.publish_every steps. Returns the number of bytes sent."""
        components, version = self.components, self.components.trainer.policy_version
        if not self.syncs or version % self.config.train.publish_every:
            await self.wake()
            return 0
        if self.config.rollout.overlap and self.config.rollout.interrupt == "never":
            await components.driver.drain()  # the driver counts this wait as generation
        with self.step_log.timed("weights"):
            num_bytes = await self.sync()
        components.trace.on_weight_sync(version)
        self.event_log.on_weight_sync(version)
        await self.hooks.call("on_publish", version)
        return num_bytes

    async def sync(self) -> int:
        """Load the trainer's current weights into the engine. Returns their bytes."""
        version, limit_s = self.components.trainer.policy_version, self.config.watchdog.weights_timeout_s
        what, state = f"the weights of policy version {version}", "being handed to the engine, begun"
        with blocked_warning.over_work(what, state, limit_s):
            weights = await self.components.trainer.backend.publish()
            load = await self.components.engine.load_weights(version, weights)
        self._in_engine = version
        return load.num_bytes

    async def sync_for_evaluation(self) -> None:
        """Sync the current weights, if only evaluations use the engine."""
        if not self.syncs and self._in_engine != self.components.trainer.policy_version:
            await self.sync()

    async def sleep(self) -> None:
        """Free the GPUs for the trainer, if it shares them with servers. No rollout may be in flight."""
        if (sleeper := self._sleeper()) is not None:
            with self.step_log.timed("sleep"), self._watched("falling asleep"):
                await sleeper.sleep()

    async def wake(self) -> None:
        """Wake the servers, if they sleep, with their old weights."""
        if (sleeper := self._sleeper()) is not None:
            with self.step_log.timed("sleep"), self._watched("waking up"):
                await sleeper.wake()

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

    def _sleeper(self) -> Sleeper | None:
        if not (self.syncs and self.config.cluster.colocate):
            return None
        return cast(Sleeper, self.components.engine)  # a rule of [cluster] rejects other engines

    def _watched(self, doing: str) -> AbstractContextManager[object]:
        return blocked_warning.over_work("the servers", doing, self.config.watchdog.weights_timeout_s)

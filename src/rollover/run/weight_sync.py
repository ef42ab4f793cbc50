"""Weight sync: loads new weights of the trainer into the engine, and logs it.

    step trained ──▶ due? ──▶ (drain) ──▶ publish ──▶ engine.load_weights ──▶ trace, event log, the user's hook

With cluster.colocate the engine sleeps from the last rollout of a step until this sync.

Never drops or admits rollouts: `Driver.on_new_version` does, after each step, with or without a sync.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from rollover.engine.protocol import Sleeper
from rollover.run import blocked_warning
from rollover.run.event_log import EventLog
from rollover.run.metrics_row import StepMetrics
from rollover.run.setup import RunContext


class WeightSync:
    """Syncs the weights of one run. `needed`: whether the engine generates for training, not only for evaluations."""

    def __init__(self, context: RunContext, step_metrics: StepMetrics, event_log: EventLog, *, needed: bool) -> None:
        self.config, self.components, self.hooks = context.config, context.components, context.hooks
        self.step_metrics, self.event_log, self.needed = step_metrics, event_log, needed
        self._in_engine: int | None = None  # version of the weights of the last sync

    async def sync_if_due(self) -> int:
        """Sync after every train.publish_every steps. Returns the number of bytes sent."""
        components, version = self.components, self.components.trainer.policy_version
        if not self.needed or version % self.config.train.publish_every:
            await self.wake()
            return 0
        if self.step_metrics.overlaps and self.config.rollout.interrupt == "never":
            await components.driver.drain()  # the driver counts this wait as generation
        with self.step_metrics.timed("weights"):
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

    async def before_evaluation(self) -> None:
        """Sync the current weights, if only evaluations use the engine."""
        if not self.needed and self._in_engine != self.components.trainer.policy_version:
            await self.sync()

    # Servers that share the trainer's GPUs

    async def sleep(self) -> None:
        """Free the GPUs for the trainer, if it shares them with servers. No rollout may be in flight."""
        if (sleeper := self._sleeper()) is not None:
            with self.step_metrics.timed("sleep"), self._watched("falling asleep"):
                await sleeper.sleep()

    async def wake(self) -> None:
        """Wake the servers, if they sleep, with their old weights."""
        if (sleeper := self._sleeper()) is not None:
            with self.step_metrics.timed("sleep"), self._watched("waking up"):
                await sleeper.wake()

    def _sleeper(self) -> Sleeper | None:
        if not (self.needed and self.config.cluster.colocate):
            return None
        return cast(Sleeper, self.components.engine)  # a rule of [cluster] rejects other engines

    def _watched(self, doing: str) -> AbstractContextManager[object]:
        return blocked_warning.over_work("the servers", doing, self.config.watchdog.weights_timeout_s)

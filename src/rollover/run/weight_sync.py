"""Weight sync: brings new weights from the trainer to the engine, and reports that they are live.

    step trained ──▶ due? ──▶ (drain) ──▶ publish ──▶ engine.load_weights ──▶ trace, event log, the user's hook

With cluster.colocate the engine sleeps from a step's last rollout until these weights wake it.

Never drops or admits anything: `Driver.on_new_version` does, after each step, whether weights were synced or not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from rollover.engine.protocol import Sleeper
from rollover.run import blocked_warning
from rollover.run.event_log import EventLog
from rollover.run.metrics_row import Rows
from rollover.run.setup import RunContext


class WeightSync:
    """Syncs the weights of one run. `needed`: whether anyone generates with the engine, but for evaluations."""

    def __init__(self, context: RunContext, rows: Rows, event_log: EventLog, *, needed: bool) -> None:
        self.config, self.parts, self.hooks = context.config, context.parts, context.hooks
        self.rows, self.event_log, self.needed = rows, event_log, needed
        self._in_engine: int | None = None  # version of the weights of the last sync

    async def sync_if_due(self) -> int:
        """Sync after every train.publish_every steps. Returns the bytes that were sent, 0 if none were."""
        parts, version = self.parts, self.parts.trainer.policy_version
        if not self.needed or version % self.config.train.publish_every:
            await self.wake()
            return 0
        if self.rows.overlaps and self.config.rollout.interrupt == "never":
            await parts.driver.drain()  # a wait for generation, which the driver counts as such
        with self.rows.timed("weights"):
            num_bytes = await self.sync()
        parts.trace.on_published(version)
        self.event_log.on_published(version)
        await self.hooks.call("on_publish", version)
        return num_bytes

    async def sync(self) -> int:
        """From now on the engine samples under the trainer's present weights. Returns their bytes."""
        version, limit_s = self.parts.trainer.policy_version, self.config.watchdog.weights_timeout_s
        what, state = f"the weights of policy version {version}", "being handed to the engine, begun"
        with blocked_warning.over_work(what, state, limit_s):
            weights = await self.parts.trainer.backend.publish()
            load = await self.parts.engine.load_weights(version, weights)
        self._in_engine = version
        return load.num_bytes

    async def before_evaluation(self) -> None:
        """Sync the present weights, if the engine has them for evaluations alone."""
        if not self.needed and self._in_engine != self.parts.trainer.policy_version:
            await self.sync()

    # Of servers that have the trainer's GPUs in turns

    async def sleep(self) -> None:
        """Free the GPUs for the trainer, if it shares them with servers. Nothing is in flight."""
        if (sleeper := self._sleeper()) is not None:
            with self.rows.timed("sleep"), self._watched("falling asleep"):
                await sleeper.sleep()

    async def wake(self) -> None:
        """Wake the servers, if they sleep, with the weights that they had."""
        if (sleeper := self._sleeper()) is not None:
            with self.rows.timed("sleep"), self._watched("waking up"):
                await sleeper.wake()

    def _sleeper(self) -> Sleeper | None:
        if not (self.needed and self.config.cluster.colocate):
            return None
        return cast(Sleeper, self.parts.engine)  # a rule of [cluster] refuses other engines

    def _watched(self, doing: str) -> AbstractContextManager[object]:
        return blocked_warning.over_work("the servers", doing, self.config.watchdog.weights_timeout_s)

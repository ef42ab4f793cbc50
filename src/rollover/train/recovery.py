"""What a run saves of itself, and how it goes on from that: checkpoints, the last one before an error, the restart.

Owns which checkpoint is the newest, and whether anything happened since. Never trains and never generates.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollover.checkpoint.snapshot import Owners, Snapshot, load_snapshot
from rollover.checkpoint.store import CheckpointWriteError
from rollover.config import Config
from rollover.config import resume as resume_rules
from rollover.rollout.lifecycle import Event
from rollover.track.live import LiveView
from rollover.train.records import Records
from rollover.train.rows import Rows
from rollover.train.setup import Parts
from rollover.train.stop import Stop
from rollover.types import Group


class Recovery:
    """Of one run. `quiesce` parks what is in flight: a snapshot is a cut at which nothing runs.

    `publish` hands the trainer's weights to the engine. `taken`: the groups of the step that is being trained.
    `told_version`: of the newest metrics row. `resume_command`: what to type to go on with this run.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        owners: Owners,
        rows: Rows,
        records: Records,
        view: LiveView,
        stop: Stop,
        quiesce: Callable[[], Awaitable[None]],
        publish: Callable[[], object],
        resume_command: str,
    ) -> None:
        self.config, self.parts, self.owners, self.directory = config, parts, owners, owners.directory
        self.rows, self.records, self.view, self.stop = rows, records, view, stop
        self.quiesce, self.publish, self.resume_command = quiesce, publish, resume_command
        self.taken: list[Group] = []
        self.saved_version, self.told_version = -1, 0  # of the newest checkpoint, and of the newest row
        self.changed = False  # whether anything happened to a rollout since the newest checkpoint

    def on_event(self, event: Event) -> None:
        """For Lifecycle.on_event."""
        self.changed = True

    async def checkpoint(self) -> None:
        """Write one, if anything happened since the last."""
        version = self.parts.trainer.policy_version
        await self.quiesce()
        if version == self.saved_version and not self.changed:
            return
        self.view.phase("writing a checkpoint")
        self.records.write(version, [], None)
        with self.rows.timed("checkpoint"):
            snapshot = Snapshot.begin(self.owners)
            snapshot.write(self.directory.store)
        self.directory.on_checkpoint()
        self.saved_version, self.changed = version, False
        if version < self.config.train.num_steps and not self.stop.requested:
            self.view.message(
                f"checkpoint {snapshot.name}; if this run ends early, continue with: {self.resume_command}"
            )

    async def rescue(self, error: Exception) -> None:
        """Before an error ends the run: a checkpoint of what it has, if that is consistent."""
        parts, version = self.parts, self.parts.trainer.policy_version
        if parts.lifecycle.ledger.generated_tokens == version == 0 or isinstance(error, CheckpointWriteError):
            return  # before the first step there are answers to look at, too
        self.view.message(f"{type(error).__name__} after {version} steps: writing a checkpoint before the run ends")
        try:
            parts.driver.request_stop()  # no score is waited for
            try:
                await parts.driver.park()
            except Exception:  # the engine is gone, say: what it had not returned is lost
                await parts.driver.close()
            if parts.trainer.in_update:
                raise ValueError(f"the weights are in the middle of step {version + 1}")
            if self.taken:
                parts.lifecycle.give_back(self.taken, version)
            parts.lifecycle.check()
            if version != max(self.told_version, self.saved_version):
                raise ValueError(f"metrics.jsonl has no row of step {version}")
            await self.checkpoint()
        except Exception as failure:
            newest = next(reversed(self.directory.store.list()), "none")
            self.view.message(f"that checkpoint could not be written ({failure}); the newest one is {newest}")

    async def restore(self) -> None:
        """Go on from the checkpoint that is to be resumed; without one the run begins again."""
        name = self.directory.checkpoint_to_resume()
        if name is None:
            self.directory.truncate(-1)
            self.view.message("the run ended before its first checkpoint: it begins again")
            return
        self.view.phase(f"restoring {name}")
        parts, cache, changes = self.parts, self.parts.lifecycle.cache, self.directory.changes
        load_snapshot(name, self.owners)
        resume_rules.refuse(changes, held=bool(cache.groups))
        parts.lifecycle.stream_ended &= not self.directory.tasks_changed  # there may be more of them now
        version = self.saved_version = parts.trainer.policy_version
        recorded, trace_bytes = bool(self.config.run.replay_rollouts), self.owners.chronicle.trace_bytes
        if not recorded:
            parts.lifecycle.check_restored(version, parts.engine.max_tokens)
            self.publish()
        self.directory.truncate(version, cache.groups.keys(), trace_bytes, cache.num_admitted or None)
        if not recorded:
            parts.driver.after_publish(version)
        self.rows.restore(self.directory.metrics.rows()[-1] if version else {})
        held = sum(len(g.rollouts) for g in cache.groups.values())
        self.view.message(f"resumed from {name}: {held} rollouts in the cache go on where they were")
        if changes:
            self.view.message("settings that changed since:" + "".join(f"\n  {change}" for change in changes))

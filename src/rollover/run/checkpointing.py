"""When a checkpoint is written, and what becomes of the journal then. The way back is resume.py's business.

    begin ──▶ steps (journal) ──▶ checkpoint (the journal begins anew) ──▶ ...        error ──▶ rescue

Owns which checkpoint is the newest, and whether anything happened since. Never generates and never trains.
"""

from __future__ import annotations

import logging

from rollover.checkpoint.journal import Mark
from rollover.checkpoint.store import CheckpointWriteError, checkpoint_name
from rollover.rollout.lifecycle import Event
from rollover.run.context import RunContext
from rollover.run.event_log import EventLog
from rollover.run.overlap import Overlap
from rollover.run.snapshot import Snapshot, StatefulPart, load_snapshot
from rollover.run.tracking import Tracking
from rollover.types import Group

logger = logging.getLogger(__name__)


class Checkpointing:
    """Writes the checkpoints of one run, whose state is that of its `stateful` parts.

    `taken`: the groups of the step that is being trained. `saved_version`: of the newest checkpoint, -1 without one.
    `changed`: whether anything happened to a rollout since the newest checkpoint.
    """

    def __init__(
        self,
        context: RunContext,
        stateful: list[StatefulPart],
        event_log: EventLog,
        overlap: Overlap,
        tracking: Tracking,
    ) -> None:
        self.context, self.config, self.parts = context, context.config, context.parts
        self.directory, self.stateful = context.directory, stateful
        self.event_log, self.overlap, self.tracking = event_log, overlap, tracking
        self.taken: list[Group] = []
        self.saved_version = -1
        self.changed = False

    def on_event(self, event: Event) -> None:
        """A listener of Lifecycle."""
        self.changed = True

    def restore(self, name: str) -> Mark | None:
        """Go back to checkpoint `name`. Returns where the journal goes on from it; None if there was none."""
        mark = load_snapshot(name, self.stateful, self.directory)
        self.saved_version = self.parts.trainer.policy_version
        return mark

    async def begin(self) -> None:
        """From now on the journal is written, if it is on. It begins at a checkpoint, or with the run."""
        event_log = self.event_log
        if not self.directory.resume:
            event_log.journal.discard()
        if event_log.is_on and not event_log.journal.writes:
            if self.parts.lifecycle.cache.num_admitted or self.parts.trainer.policy_version:
                self.changed = True
            else:
                event_log.cut(None)
        if self.changed:  # what was read back must not be read back twice, journaled from now on or not
            await self.checkpoint()
        event_log.start(self.parts.driver)

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint must be written after the step that was just told."""
        config, step = self.config.checkpoint, self.parts.trainer.policy_version
        due = config.every_steps > 0 and step % config.every_steps == 0
        return due or self.event_log.journal.num_bytes > config.journal_max_gb * 1e9

    async def checkpoint(self) -> None:
        """Write one, if anything happened since the last."""
        version, event_log = self.parts.trainer.policy_version, self.event_log
        await self.overlap.interrupt_all()
        if version == self.saved_version and not self.changed:
            return
        self.directory.trackers.on_phase("writing a checkpoint")
        self.tracking.on_groups(version, [], None)
        with self.overlap.rows.timed("checkpoint"):
            mark = event_log.cut(checkpoint_name(version))
            snapshot = Snapshot.begin(self.stateful, self.directory, version, mark)
            if self.directory.mirror is not None:
                self.directory.mirror.copy()  # the checkpoint counts on what is written down by now
            snapshot.write(self.directory.store)
            self.directory.on_checkpoint()  # before the journal goes, from which a run without a checkpoint goes on
            if mark is not None:
                event_log.journal.commit(mark)
            else:
                event_log.journal.discard()
        self.saved_version, self.changed = version, False
        if version < self.config.train.num_steps and not self.context.stop.requested:
            command = self.context.resume_command
            logger.info(f"checkpoint {snapshot.name}; if this run ends early, continue with: {command}")

    async def keep_best(self, step: int | None) -> None:
        """With checkpoint.keep_best that of `step`, the best evaluation's, stays whatever comes later. It is written
        now where there is none, if that is the present step."""
        version = self.parts.trainer.policy_version
        if self.config.checkpoint.keep_best and step and step == version != self.saved_version:
            await self.checkpoint()
        self.hold_best(step)

    def hold_best(self, step: int | None) -> None:
        """The same, without writing any. Before the first step there is nothing to keep."""
        if self.config.checkpoint.keep_best and step:
            self.directory.store.keep_also(checkpoint_name(step))

    async def rescue(self, error: Exception) -> None:
        """Before an error ends the run: a checkpoint of what it has, if that is consistent."""
        parts, version = self.parts, self.parts.trainer.policy_version
        if parts.lifecycle.ledger.generated_tokens == version == 0 or isinstance(error, CheckpointWriteError):
            return  # before the first step there are answers to look at, too
        logger.warning(f"{type(error).__name__} after {version} steps: writing a checkpoint before the run ends")
        try:
            parts.driver.interrupt_for_good()  # no score is waited for
            try:
                await parts.driver.interrupt_all()
            except Exception:  # the engine is gone, say: what it had not returned is lost
                await parts.driver.abandon()
            if parts.trainer.in_update:
                raise ValueError(f"the weights are in the middle of step {version + 1}")
            if self.taken:
                parts.lifecycle.give_back(self.taken, version)
            parts.lifecycle.check()
            if version not in (0, self.saved_version) and not self.directory.metrics.reaches(version):
                raise ValueError(f"metrics.jsonl has no row of step {version}")
            await self.checkpoint()
        except Exception as failure:
            newest = next(reversed(self.directory.store.list()), "the start")
            journal = " and its journal" if self.event_log.journal.num_bytes else ""
            logger.warning(f"that checkpoint could not be written ({failure}): --resume goes on from {newest}{journal}")

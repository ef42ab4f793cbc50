"""What a run saves of itself, and how it goes on from that: checkpoints, the journal between them, the restart.

    begin ──▶ on_event, on_step, on_row (journal) ──▶ checkpoint (the journal begins anew) ──▶ ...
    restore: newest checkpoint ──▶ what the journal tells after it ──▶ the run goes on

Owns which checkpoint is the newest, whether anything happened since, and the timer of the journal. Never generates,
and trains only what was trained before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollover.checkpoint.journal import Journal, Part
from rollover.checkpoint.store import CheckpointWriteError, checkpoint_name
from rollover.config import Config
from rollover.config import resume as resume_rules
from rollover.rollout.lifecycle import Event
from rollover.rollout.watchdog import salvaged
from rollover.run.journal_replay import Replay
from rollover.run.journal_scribe import ROLL_BACK, STEP, Scribe
from rollover.run.metrics_row import Rows
from rollover.run.parts import Parts
from rollover.run.records import Records
from rollover.run.roll_back import RollBack
from rollover.run.snapshot import Owners, Snapshot, load_snapshot
from rollover.run.stop import Stop
from rollover.track.live import LiveView
from rollover.trainer.batch import Batch
from rollover.types import Group

Tell = Callable[[dict[str, float], list[Group], Batch], None]


class Recovery:
    """Of one run. `quiesce` parks what is in flight: a snapshot is a cut at which nothing runs.

    `publish` hands the trainer's weights to the engine; `tell(row, groups, batch)` writes down what a step says of
    itself. `taken`: the groups of the step that is being trained. `told_version`: of the newest metrics row.
    `resume_command`: what to type to go on with this run.
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
        publish: Callable[[], Awaitable[object]],
        tell: Tell,
        resume_command: str,
    ) -> None:
        self.config, self.parts, self.owners, self.directory = config, parts, owners, owners.directory
        self.rows, self.records, self.view, self.stop = rows, records, view, stop
        self.quiesce, self.publish, self.tell, self.resume_command = quiesce, publish, tell, resume_command
        self.taken: list[Group] = []
        self.saved_version, self.told_version = -1, 0  # of the newest checkpoint, and of the newest row
        self.changed = False  # whether anything happened to a rollout since the newest checkpoint
        self.journal = Journal(self.directory.journal, view.message)
        self.mirror = self.directory.mirror
        if self.mirror is not None:
            self.mirror.say = view.message
        self.scribe = Scribe(self.journal, owners.history.seconds, lambda: parts.prompts.version)
        rows.scribe = self.scribe if self.journaled else None
        rows.mirror = self.mirror
        self._timer: asyncio.Task[None] | None = None

    # What happens

    def on_event(self, event: Event) -> None:
        """For Lifecycle.on_event."""
        self.changed = True
        self.scribe.on_event(event)

    def on_row(self, trace_bytes: int) -> None:
        """The row of the newest step is written, and the trace, which has so many bytes now."""
        self.told_version = self.parts.trainer.policy_version
        if self.journal.writes:
            with self.scribe.timed():  # a row that the journal knows of is on the disk
                self.directory.metrics.sync()
        self.scribe.on_row(self.told_version, trace_bytes)
        if self._timer is not None and self._timer.done():
            self._timer.result()

    # Saving

    async def begin(self) -> None:
        """From now on the journal is written, if it is on. It begins at a checkpoint, or with the run."""
        if not self.directory.resume:
            self.journal.discard()
        if self.journaled and not self.journal.writes:
            if self.parts.lifecycle.cache.num_admitted or self.parts.trainer.policy_version:
                self.changed = True
            else:
                self.scribe.begin(None)
        if self.changed:  # what was read back must not be read back twice, journaled from now on or not
            await self.checkpoint()
        if self.journaled:
            self._timer = asyncio.ensure_future(self._write_progress())

    async def _write_progress(self) -> None:
        while True:
            await asyncio.sleep(self.config.checkpoint.journal_s)
            found = await self.parts.driver.asker.progress(self.scribe.running)
            lifecycle = self.parts.lifecycle
            for rollout in lifecycle.cache.running():
                room = lifecycle.cache.remaining(rollout.rollout_id)
                if believed := salvaged(found.get(rollout.rollout_id, ()), rollout.num_tokens, room):
                    self.scribe.progress({rollout.rollout_id: believed})
            self.journal.sync()
            if self.mirror is not None:
                self.mirror.beat()

    def close(self) -> None:
        if self._timer is not None and not self._timer.cancel() and not self._timer.cancelled():
            self._timer.exception()  # seen: what ends it ends the run, too
        self.journal.close()
        if self.mirror is not None:
            self.mirror.close()

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint must be written after the step that was just told."""
        config, step = self.config.checkpoint, self.parts.trainer.policy_version
        due = config.every_steps > 0 and step % config.every_steps == 0
        return due or self.journal.num_bytes > config.journal_max_gb * 1e9

    @property
    def journaled(self) -> bool:
        """Whether there is a journal: of what the lifecycle tells, so not of groups that come from elsewhere."""
        return self.owners.producer.journaled and self.config.checkpoint.journal_s > 0

    async def checkpoint(self) -> None:
        """Write one, if anything happened since the last."""
        version = self.parts.trainer.policy_version
        await self.quiesce()
        if version == self.saved_version and not self.changed:
            return
        self.view.phase("writing a checkpoint")
        self.records.write(version, [], None)
        with self.rows.timed("checkpoint"):
            mark = self.scribe.begin(checkpoint_name(version)) if self.journaled else None
            snapshot = Snapshot.begin(self.owners, mark)
            if self.mirror is not None:
                self.mirror.copy()  # the checkpoint counts on what is written down by now
            snapshot.write(self.directory.store)
            self.directory.on_checkpoint()  # before the journal goes, from which a run without a checkpoint goes on
            if mark is not None:
                self.journal.commit(mark)
            else:
                self.journal.discard()
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
            if version != max(self.told_version, self.saved_version):
                raise ValueError(f"metrics.jsonl has no row of step {version}")
            await self.checkpoint()
        except Exception as failure:
            newest = next(reversed(self.directory.store.list()), "the start")
            journal = " and its journal" if self.journal.num_bytes else ""
            self.view.message(
                f"that checkpoint could not be written ({failure}): --resume goes on from {newest}{journal}"
            )

    # Going on

    async def restore(self) -> None:
        """Go on from the checkpoint that is to be resumed and its journal; without either the run begins again."""
        directory, parts, changes = self.directory, self.parts, self.directory.changes
        if directory.fetched_from:
            self.view.message(f"the files of this run come from {directory.fetched_from}")
        name = directory.checkpoint_to_resume()
        mark = None
        if name is not None:
            self.view.phase(f"restoring {name}")
            mark = load_snapshot(name, self.owners)
            self.saved_version = parts.trainer.policy_version
        usable = self.owners.producer.journaled and (name is None or (mark is not None and directory.is_newest(name)))
        journal = self.journal.read(mark) if usable else []
        if name is None and not journal:
            directory.truncate(-1)
            self.journal.discard()
            self.view.message("the run ended before its first checkpoint: it begins again")
            return
        resume_rules.refuse(changes, held=bool(parts.lifecycle.cache.groups or sum(p.num_records for p in journal) > 1))
        parts.lifecycle.stream_ended &= not directory.tasks_changed  # there may be more of them now
        replay = self._replay(journal)
        version = parts.trainer.policy_version
        recorded = bool(self.config.run.replay_rollouts)
        if not recorded:
            parts.lifecycle.check_restored(version, parts.engine.max_tokens)
            await self.publish()
            if replay.unpublished:
                self.owners.history.on_new_version(version)
        if isinstance(replay, RollBack):  # before rows are cut: no later start, with whatever settings, trains them
            self.journal.go_on(journal[-1])
            self.scribe.on_roll_back()
            self.journal.halt()
        self._go_on(version, replay)
        if journal and mark is not None:
            self.journal.commit(mark)  # the process that wrote the checkpoint may have died before that
        if len(journal) == 1 and not replay.num_records and self.journaled:
            self.journal.go_on(journal[0])
        if not recorded:
            parts.driver.on_new_version(version)
        held = sum(len(g.rollouts) for g in parts.lifecycle.cache.groups.values())
        of_journal = f" and {replay.num_records} records of its journal ({replay.num_steps} steps)"
        self.view.message(
            f"resumed from {name or 'the start'}{of_journal if replay.num_records else ''}:"
            f" {held} rollouts in the cache go on where they were"
        )
        if changes:
            self.view.message("settings that changed since:" + "".join(f"\n  {change}" for change in changes))

    def _replay(self, journal: list[Part]) -> Replay:
        """What the journal tells happens again; steps are trained again, or rolled back. Nothing is generated."""
        owners, next_task, on_row = self.owners, self.parts.reuse.reroll.as_before, self.records.dropped.clear
        kinds = {record.meta["kind"] for part in journal for record in part.records()}
        otherwise = resume_rules.trains_otherwise(self.directory.changes, self.config)
        if STEP in kinds and (otherwise or ROLL_BACK in kinds or self.config.checkpoint.lost_steps == "roll_back"):
            replay = RollBack(owners, next_task, self._lose, on_row)
        else:
            replay = Replay(owners, next_task, self._train_again, on_row)
        for part in journal:
            self.view.phase(f"reading {part.path.name} of the journal")
            replay.read(part.records())
        replay.end()
        if isinstance(replay, RollBack):
            needs_weights = self.config.algorithm.proximal == "snapshot"
            num = replay.give_up(self.config.staleness_bound, needs_weights=needs_weights)
            held_again = replay.of_lost_steps & owners.lifecycle.cache.groups.keys()
            self.parts.reuse.reroll.on_roll_back(replay.version, held_again)
            why = f", since {', '.join(change.key for change in otherwise)} changed" if otherwise else ""
            self.view.message(
                f"{replay.num_steps} steps after the checkpoint are rolled back{why}: their groups are held again, but"
                f" for {num} that can no longer be trained in bound"
            )
        return replay

    def _train_again(self, groups: list[Group], version: int) -> None:
        self.view.phase(f"training step {version + 1} again")
        self.rows.begin()
        with self.rows.timed("train"):
            batch = self.parts.reuse.build(groups, version)
            trained = self.parts.trainer.train_step(batch)
        self.parts.reuse.after_step(groups, batch, version)
        self.owners.history.trained(version + 1)
        self.trained_again = groups, batch, trained, version

    def _lose(self, groups: list[Group], version: int) -> None:
        """The tasks that come next depend on what failed in the step at `version`, though its weights are lost."""
        self.parts.reuse.reroll.on_step(groups, version + 1)

    def _go_on(self, version: int, replay: Replay) -> None:
        """Cut the run's files to what it goes on from; write the row of the last step, if the kill was before it."""
        directory, lifecycle = self.directory, self.parts.lifecycle
        row_is_missing = replay.untold and not directory.metrics.reaches(version)
        if replay.untold and not row_is_missing:
            replay.told()  # before `held`: what was dropped until then is recorded
        held = {*lifecycle.cache.groups, *(group.group_id for group, _ in self.records.dropped)}
        told = version - row_is_missing
        directory.truncate(told, held, replay.trace_bytes, lifecycle.cache.num_admitted or None)
        self.rows.restore(directory.metrics.rows()[-1] if told else {}, next_is_missing=row_is_missing)
        if row_is_missing:
            groups, batch, trained, before = self.trained_again
            self.tell(self.rows.of_step(groups, batch, trained, before, 0), groups, batch)
        self.told_version = version

"""The way back: the newest checkpoint, what the journal tells after it, and where the run goes on. For `--resume`, and
for a run whose backend was lost (restart.py).

    load_snapshot ──▶ Replay: steps are trained again    ──▶ weights to the engine ──▶ files cut to there ──▶ the loop
                  └─▶ RollBack: they are given up

Owns nothing beyond the restart. What is in a checkpoint is snapshot.py's business, and what a record of the journal
does replay.py's.
"""

from __future__ import annotations

import logging

from rollover.checkpoint.journal import Part
from rollover.config import resume as resume_rules
from rollover.rollout.lifecycle import Lifecycle
from rollover.run.checkpointing import Checkpointing
from rollover.run.context import RunContext
from rollover.run.event_log import ROLL_BACK, STEP, EventLog
from rollover.run.metrics_row import Rows
from rollover.run.replay import Replay, RollBack
from rollover.run.tracking import Tracking
from rollover.run.weight_sync import WeightSync
from rollover.staleness import beyond_bound
from rollover.track.tracker import Cut
from rollover.trainer.batch import Batch
from rollover.types import Group, RolloutState

logger = logging.getLogger(__name__)


class Resume:
    """Takes one run to where its earlier process ended, or had to begin again. Its parts have not done anything yet."""

    def __init__(
        self,
        context: RunContext,
        checkpointing: Checkpointing,
        event_log: EventLog,
        weight_sync: WeightSync,
        rows: Rows,
        tracking: Tracking,
    ) -> None:
        self.config, self.parts, self.directory = context.config, context.parts, context.directory
        self.checkpointing, self.event_log, self.weight_sync = checkpointing, event_log, weight_sync
        self.rows, self.tracking = rows, tracking
        self.trackers = self.directory.trackers
        # Of the newest step that was trained again: what its row is made of.
        self._trained_again: tuple[list[Group], Batch, dict[str, float], int] | None = None

    @property
    def newest_groups(self) -> list[Group] | None:
        """The groups of the newest step that was trained again; None where none was."""
        return None if self._trained_again is None else self._trained_again[0]

    async def restore(self) -> None:
        """Go on from the checkpoint that is to be resumed and its journal; without either the run begins again."""
        directory, parts, event_log = self.directory, self.parts, self.event_log
        if directory.fetched_from:
            logger.info(f"the files of this run come from {directory.fetched_from}")
        name, mark = directory.checkpoint_to_resume(), None
        if name is not None:
            self.trackers.on_phase(f"restoring {name}")
            mark = self.checkpointing.restore(name)
        # A journal continues the newest checkpoint, or the start of the run. It says nothing of an older checkpoint.
        usable = event_log.generates and (name is None or (mark is not None and directory.is_newest(name)))
        files = event_log.journal.read(mark) if usable else []
        if name is None and not files:
            num_steps = directory.metrics.path.read_bytes().count(b"\n")
            directory.truncate(Cut(-1))
            event_log.journal.discard()
            lost = f", and no journal tells of its {num_steps} steps, which are lost" if num_steps else ""
            logger.warning(f"the run ended before its first checkpoint{lost}: it begins again")
            if parts.again and self.weight_sync.needed:  # the engine may have the weights of steps that are lost
                await self.weight_sync.sync()
            return
        held = bool(parts.lifecycle.cache.groups or sum(file.num_records for file in files) > 1)
        resume_rules.refuse(directory.changes, held=held)
        parts.lifecycle.stream_ended &= not directory.tasks_changed  # there may be more of them now
        replay = self._replay(files, from_start=name is None)
        version = parts.trainer.policy_version
        if self.weight_sync.needed:
            check_restored(parts.lifecycle, version, parts.engine.max_tokens)
            await self.weight_sync.sync()
            if replay.unpublished:
                parts.trace.on_weight_sync(version)
        if isinstance(replay, RollBack):  # before rows are cut: no later start, with whatever settings, trains them
            event_log.roll_back(files[-1])
        self._cut_files(version, replay)
        if files and mark is not None:
            event_log.journal.commit(mark)  # the process that wrote the checkpoint may have died before that
        if len(files) == 1 and not replay.num_records and event_log.is_on:
            event_log.journal.go_on(files[0])
        if self.weight_sync.needed:
            parts.driver.on_new_version(version)
        self._log(name, replay)

    def _replay(self, files: list[Part], *, from_start: bool) -> Replay:
        """What the journal tells happens again; steps are trained again, or rolled back. Nothing is generated."""
        parts, dropped = self.parts, self.tracking.dropped
        kinds = {kind for file in files for kind in file.kinds}
        otherwise = resume_rules.trains_otherwise(self.directory.changes, self.config, from_start=from_start)
        next_task = parts.reuse.reroll.as_before
        if STEP in kinds and (otherwise or ROLL_BACK in kinds or self.config.checkpoint.lost_steps == "roll_back"):
            replay = RollBack(parts, next_task, self._lose, dropped.clear)
        else:
            replay = Replay(parts, next_task, self._train_again, dropped.clear)
        for file in files:
            self.trackers.on_phase(f"reading {file.path.name} of the journal")
            replay.read(file.records())
        replay.end()
        if isinstance(replay, RollBack):
            needs_weights = self.config.algorithm.proximal == "snapshot"
            num = replay.give_up(self.config.staleness_bound, needs_weights=needs_weights)
            held_again = replay.of_lost_steps & parts.lifecycle.cache.groups.keys()
            parts.reuse.on_roll_back(replay.version, held_again)
            why = f", since {', '.join(change.key for change in otherwise)} changed" if otherwise else ""
            logger.info(
                f"{replay.num_steps} steps after the checkpoint are rolled back{why}: their groups are held again, but"
                f" for {num} that can no longer be trained in bound"
            )
        return replay

    def _train_again(self, groups: list[Group], version: int) -> None:
        self.trackers.on_phase(f"training step {version + 1} again")
        self.rows.begin()
        with self.rows.timed("train"):
            reward_kl, batches = self.parts.trainer.reward_kl, self.parts.batches
            penalties = None if reward_kl is None else reward_kl.penalties(batches.sampled(groups, version))
            batch = batches.build(groups, version, penalties)
            trained = self.parts.trainer.train_step(batch)
        self.parts.reuse.after_step(groups, batch, version)
        self.parts.lifecycle.clock.version = version + 1
        self._trained_again = groups, batch, trained, version

    def _lose(self, groups: list[Group], version: int) -> None:
        self.parts.reuse.on_lost_step(groups, version)

    def _cut_files(self, version: int, replay: Replay) -> None:
        """Cut the run's files to what it goes on from; write the row of the last step, if the kill was before it."""
        directory, lifecycle = self.directory, self.parts.lifecycle
        row_is_missing = replay.untold and not directory.metrics.reaches(version)
        if replay.untold and not row_is_missing:
            replay.told()  # before `held`: what was dropped until then is recorded
        held = {*lifecycle.cache.groups, *(group.group_id for group, _ in self.tracking.dropped)}
        told = version - row_is_missing
        self.parts.trace.resumes_at = replay.trace_bytes
        directory.truncate(Cut(told, held, lifecycle.cache.num_admitted or None))
        self.rows.restore(directory.metrics.last_row if told else {}, next_is_missing=row_is_missing)
        if row_is_missing:
            assert self._trained_again is not None
            groups, batch, trained, before = self._trained_again
            trained = self.rows.own_metrics(groups) | trained
            row = self.rows.of_step(groups, batch, trained, before, 0)
            self.tracking.on_step(row, version, groups, batch, self.parts.trainer.token_stats)

    def _log(self, name: str | None, replay: Replay) -> None:
        """Where the run goes on, and with which other settings."""
        held = sum(len(g.rollouts) for g in self.parts.lifecycle.cache.groups.values())
        of_journal = f" and {replay.num_records} records of its journal ({replay.num_steps} steps)"
        logger.info(
            f"resumed from {name or 'the start'}{of_journal if replay.num_records else ''}:"
            f" {held} rollouts in the cache go on where they were"
        )
        if changes := self.directory.changes:
            logger.info("settings that changed since:" + "".join(f"\n  {change}" for change in changes))


def check_restored(lifecycle: Lifecycle, version: int, max_tokens: int) -> None:
    """ValueError where this config cannot go on with the rollouts that a snapshot brought back.

    `version`: the trainer's. `max_tokens`: the longest rollout, prompt included, that the engine takes.
    """
    config = lifecycle.config
    groups = lifecycle.cache.groups.values()
    if config.finish_first and beyond_bound(groups, version, config.max_staleness, config.groups_per_step):
        raise ValueError(
            f"--resume: the {len(groups)} groups that the checkpoint holds cannot all be trained with"
            f" rollout.max_staleness = {config.max_staleness} and rollout.groups_per_step = {config.groups_per_step}."
            " Set them back to what the run had (config.resolved.json), or set"
            ' rollout.on_stale = "drop" to lose groups that get too old'
        )
    for rollout in (r for g in groups for r in g.rollouts):
        unfinished = rollout.state in (RolloutState.WAITING, RolloutState.PARKED, RolloutState.ACTING)
        if unfinished and len(rollout.prompt) + config.max_new_tokens > max_tokens:
            raise ValueError(
                f"--resume with rollout.max_new_tokens = {config.max_new_tokens}: the unfinished rollout"
                f" {rollout.rollout_id} has a prompt of {len(rollout.prompt)} and {rollout.num_tokens} tokens so"
                f" far, and the engine takes {max_tokens} in all. Set it (and engine.kv_memory_gb) back to what the run"
                " had"
            )
        for segment in rollout.segments:
            was = segment.sampling.temperature
            if segment.trainable and was not in (0.0, config.temperature):
                raise ValueError(
                    f"--resume with rollout.temperature = {config.temperature:g}: rollout"
                    f" {rollout.rollout_id} was begun at {was:g}, and a rollout has one temperature."
                    f" Set rollout.temperature = {was:g}"
                )

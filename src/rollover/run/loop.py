"""The one loop: collect groups, build the batch, step, sync weights, log.

    producer.produce ─groups─▶ batches.build ▶ trainer.train_step ──▶ weight_sync: engine.load_weights
          ▲                                                                      │
          └── driver.on_new_version (stale drops) ◀── version + 1 ───────────────┘
                         │
              metrics row, record, journal, checkpoint

Sync, partial and asynchronous training are settings of the scheduler, not other loops. Between two generation phases
nothing runs (with rollout.overlap: after `Overlap.interrupt_all`), so a checkpoint there is a consistent cut. Whoever
trains (the command line, `rollover.train`, a loop of the user's own) asks api/session.py for one step after the other,
and that a `RestartableRun` (restart.py), which has another `Run` where the trainer's backend was lost.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rollover.config import Config
from rollover.config import resume as resume_rules
from rollover.config.table import value_of
from rollover.models.allocator import return_freed_memory
from rollover.run.checkpointing import Checkpointing, stateful_parts
from rollover.run.directory import view_command
from rollover.run.estimate import estimate_of
from rollover.run.evaluate import Evaluator
from rollover.run.event_log import EventLog
from rollover.run.metrics_row import Rows
from rollover.run.model_card import write_model_card
from rollover.run.overlap import Overlap
from rollover.run.producer import build_producer
from rollover.run.resume import Resume
from rollover.run.setup import RunContext, check_tasks
from rollover.run.supervised import HeldOutLoss
from rollover.run.tracking import Tracking, step_progress, write_tokenizer
from rollover.run.weight_sync import WeightSync
from rollover.track.live import LiveView
from rollover.track.summary import RunSummary, run_summary
from rollover.trainer.batch import Batch
from rollover.trainer.profile import profiled
from rollover.trainer.reward_kl import Penalties
from rollover.types import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """A training step that was made: `number` is the trainer's policy version after it, `groups` are those that it
    trained, and `metrics` is its row of metrics.jsonl (docs/metrics.md)."""

    number: int
    groups: list[Group]
    metrics: dict[str, float]


class Run:
    """One run of the loop, in its directory: `begin`, then `next_step` until that has no more, then `close`.

    `changes`: the options that the user changes between two steps.
    """

    def __init__(self, context: RunContext, changes: OptionChanges) -> None:
        self.context, self.changes = context, changes
        config, parts = self.config, self.parts = context.config, context.parts
        self.directory, self.hooks, self.stop = context.directory, context.hooks, context.stop
        trackers = self.trackers = self.directory.trackers
        self.enough = ""  # why training ends before its last step, by eval.patience
        self.ended = False  # all that was left to do is done, or a stop was requested
        self._did_what_was_due_at: int | None = None  # trainer version
        producer = self.producer = build_producer(
            config, parts.loaded, parts.engine, self.stop, lambda version: self.overlap.collect(version), parts.examples
        )
        self.held_out_loss = HeldOutLoss(config, parts.examples, parts.batches) if parts.examples else None
        self.event_log = EventLog(
            context.journal,
            parts.lifecycle.clock,
            parts.prompts,
            generates=producer.generates,
            every_s=config.checkpoint.journal_s,
            mirror=self.directory.mirror,
        )
        trackers.the(LiveView).watch(step_progress(config, parts), config.train.num_steps)
        self.rows = Rows(context, self.event_log, overlaps=config.rollout.overlap and producer.generates)
        self.overlap = Overlap(context, self.rows)
        self.weight_sync = WeightSync(context, self.rows, self.event_log, needed=producer.uses_engine)
        is_possible = producer.uses_engine or config.algorithm.supervised
        self.evaluator = Evaluator(context, self.overlap, self.weight_sync, is_possible=is_possible)
        self.tracking = Tracking.of_run(context, recorded=not producer.uses_engine)
        stateful = stateful_parts(parts, producer)
        self.checkpointing = Checkpointing(context, stateful, self.event_log, self.overlap, self.tracking)
        # Who reads what happens to groups and rollouts. What a killed run needs is in the event log alone.
        parts.lifecycle.listeners = [
            parts.lifetimes.on_event,
            parts.trace.on_event,
            self.tracking.on_event,
            self.checkpointing.on_event,
            self.event_log.on_event,
            parts.reuse.on_event,
        ]

    async def begin(self) -> Step | None:
        """Check the rewards, go on where an earlier process ended, or the backend was lost, and listen to signals.

        Returns the last step that was trained again after a loss, where there is one.
        """
        newest = None
        if self.producer.generates and not self.parts.again:
            await check_tasks(self.config, self.parts.rewarder, self.trackers, self.parts.batches.teacher_prompts)
        if self.directory.resume:
            resume = Resume(
                self.context, self.checkpointing, self.event_log, self.weight_sync, self.rows, self.tracking
            )
            await resume.restore()
            if self.parts.again and (groups := resume.newest_groups) is not None:
                newest = Step(self.parts.trainer.policy_version, groups, self.directory.metrics.last_row)
        if self.config.model.lora.path and not self.parts.trainer.policy_version and self.weight_sync.needed:
            await self.weight_sync.sync()  # the engine began with the model alone
        await self.weight_sync.wake()  # the backend may have been lost while the servers slept
        self.checkpointing.hold_best(self.evaluator.best_step)  # before one is written, and others go
        await self.checkpointing.begin()
        self.directory.write_config()
        self.directory.write_resume(self.context.resume_command)
        if self.config.track.rollouts:
            write_tokenizer(self.parts.loaded.tokenizer, self.directory.path)
        self.directory.on_begun()
        self.stop.listen(self.parts.driver.interrupt_for_good)
        return newest

    async def next_step(self) -> Step | None:
        """Do what is due by now (an evaluation, a checkpoint, changed options), and make the next step. None where
        there is none, or a stop is requested: then all is done that is left to do at the end."""
        if self.ended:
            return None
        await self._do_what_is_due()
        if self.parts.trainer.policy_version < self.config.train.num_steps and not (self.stop.requested or self.enough):
            await self.changes.make(self.checkpointing)
            if (made := await self.step()) is not None:
                return made
        await self._end()
        self.ended = True
        return None

    async def step(self) -> Step | None:
        """One training step: collect, build the batch, step, sync weights, log. None where there is nothing (more) to
        train on."""
        parts, trainer = self.parts, self.parts.trainer
        version = trainer.policy_version
        parts.prompts.on_step(version)
        await self.hooks.call("on_step_start", version + 1)

        groups = await self._collect(version)
        if not groups:
            return None
        await self.weight_sync.sleep()

        self.trackers.on_phase("training")
        self.checkpointing.taken = groups
        with self.overlap.training(version):
            penalties = await self._penalties(groups, version)
            batch = parts.batches.build(groups, version, penalties)
            own = self.rows.own_metrics(groups) | self.producer.metrics()
            work, goes_on = lambda: self._train(batch, version), penalties is not None
            trained = own | await self.overlap.train(work, version, goes_on=goes_on)
        self.checkpointing.taken = []
        parts.reuse.after_step(groups, batch, version)
        self.event_log.on_step(version)
        parts.lifecycle.clock.version = version + 1
        return_freed_memory()

        num_bytes = 0
        try:
            num_bytes = await self.weight_sync.sync_if_due()
            parts.driver.on_new_version(trainer.policy_version)
        finally:  # the step was trained, whatever becomes of its weights
            row = self.rows.of_step(groups, batch, trained, version, num_bytes)
            self.tracking.on_step(row, trainer.policy_version, groups, batch, trainer.token_stats)
            self.event_log.on_row(trainer.policy_version, self.directory.metrics, parts.trace.num_bytes)
        await self.hooks.call("on_step_end", dict(row))
        return Step(trainer.policy_version, groups, row)

    async def evaluate(self) -> dict[str, Any] | None:
        """See Evaluator.evaluate."""
        row = await self.evaluator.evaluate()
        await self._keep_best()
        return row

    def summary(self) -> RunSummary:
        """The summary of the whole run, all its processes together."""
        config, directory = self.config, self.directory
        paths = {"run": str(directory.path)}
        if config.checkpoint.save_final_model:
            paths["model"] = str(directory.model)
        errors = self.parts.observed.commonest_error()
        if directory.of_evaluations.best_model_step is not None:
            paths["best model"] = str(directory.of_evaluations.best_model)
        rows, evals = directory.metrics.rows(), directory.evals.rows()
        return run_summary(config.run.name, rows, evals, paths, errors, self.enough, view_command(directory.path))

    async def close(self, *, keep: bool = False) -> None:
        """End the event log, the engine, the reward workers, the backend and the trainer's thread.

        `keep`: engine and reward workers go on, for the run that takes this one's place.
        """
        if keep:  # an event of what still winds down is none of the run's that comes next
            self.parts.lifecycle.listeners.clear()
        self.stop.unlisten()
        async with AsyncExitStack() as rest:  # each of them, even if another fails
            rest.callback(self.overlap.close)
            rest.push_async_callback(self.parts.close, keep=keep)
            self.event_log.close()

    # Private

    async def _do_what_is_due(self) -> None:
        """Once at each trainer version, between two steps."""
        config, version = self.config, self.parts.trainer.policy_version
        every, before = config.eval.every_steps, self._did_what_was_due_at
        evaluates = bool(every) and version % every == 0
        if before is None:  # it begins, or goes on
            if not self.parts.again and (
                told := estimate_of(config, self.parts.loaded.model, config.train.num_steps - version)
            ):
                logger.info(told)
            if evaluates if version else config.eval.at_start:
                await self._evaluate()  # a stop may have cut off the evaluation of the last step
            elif not version:
                self.evaluator.check_tasks()
            self.rows.begin()
        elif before != version:
            if evaluates and version < config.train.num_steps:
                await self._evaluate()
            if self.checkpointing.is_due:
                await self.checkpointing.checkpoint()
        self._did_what_was_due_at = version

    async def _evaluate(self) -> None:
        """If that is wanted and was not done; then training may have to end (`enough`)."""
        await self.evaluator.evaluate_if_wanted()
        await self._keep_best()
        if not self.enough and self.parts.trainer.policy_version < self.config.train.num_steps:
            if enough := self.evaluator.why_enough:
                self.enough = enough
                logger.info(f"training ends here: {enough}")

    async def _keep_best(self) -> None:
        """The weights of the best evaluation stay: as a checkpoint, as a model."""
        self.evaluator.save_best_model()
        await self.checkpointing.keep_best(self.evaluator.best_step)

    async def _collect(self, version: int) -> list[Group] | None:
        """The groups of the step at trainer `version`; none where it says that there are no more, or is stopped."""
        self.rows.engine_growth()  # what an evaluation did is not this step's
        self.trackers.on_phase("generating")
        with self.parts.trace.span("generate"):
            groups = await self.producer.produce(version + 1, version)
        if groups is not None and not groups:
            what, num_steps = self.producer.source, self.config.train.num_steps
            logger.info(f"the {what} are used up after {version} of {num_steps} steps")
        return_freed_memory()
        return groups

    async def _penalties(self, groups: list[Group], version: int) -> Penalties | None:
        """The KL in the rewards of the step at trainer `version`; None where there is none."""
        reward_kl = self.parts.trainer.reward_kl
        if reward_kl is None:
            return None
        samples = self.parts.batches.sampled(groups, version)
        return await self.overlap.train(lambda: reward_kl.penalties(samples), version)

    def _train(self, batch: Batch, version: int) -> dict[str, float]:
        with profiled(self.config, version + 1, self.directory.path, self.parts.trainer.backend):
            metrics = self.parts.trainer.train_step(batch)
        if self.held_out_loss is not None:
            metrics |= self.held_out_loss.after_step(version + 1, self.parts.trainer.backend)
        return metrics

    async def _end(self) -> None:
        """There is no further step: a checkpoint and the last evaluation; say how to go on, or save the model."""
        # Before the last evaluation: nothing that happens to that may cost the run.
        await self.checkpointing.checkpoint()
        if not self.stop.requested:
            await self._evaluate()
        step = self.parts.trainer.policy_version
        if self.stop.requested:
            logger.info(f"stopped after step {step}; continue with:\n  {self.context.resume_command}")
            return
        if self.config.checkpoint.save_final_model:
            self.trackers.on_phase("saving the model")
            self.parts.trainer.backend.save_model(self.directory.model)
            write_model_card(self.directory.model, self.config, step, self.evaluator.newest())
        finished = step >= self.config.train.num_steps or bool(self.enough)
        self.directory.end(step, "" if finished else self.producer.source, self.enough)


class OptionChanges:
    """The changes of options in a run of `config`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._wanted: dict[str, Any] = {}

    def ask_for(self, key: str, value: Any) -> None:
        """Change an option from the next step on. ConfigError where it cannot (config/resume.py)."""
        resume_rules.check_in_run(self.config, key, value)
        self._wanted[key] = value

    async def make(self, checkpointing: Checkpointing) -> None:
        """Change what was asked for, and write it down; nothing if all of it is as it was.

        `checkpointing`: of the run, whose checkpoints it writes.
        """
        changes = [resume_rules.Change(k, value_of(self.config, k), value) for k, value in self._wanted.items()]
        if not (changes := [change for change in changes if change.old != change.new]):
            return
        if checkpointing.event_log.is_on and resume_rules.trains_otherwise(changes, self.config):
            await checkpointing.checkpoint()  # steps that a journal tells of are trained again as they were
        for change in changes:
            resume_rules.change_in_run(self.config, change.key, change.new)
        checkpointing.directory.write_config(replace=True)
        logger.info("changed from here on: " + ", ".join(map(str, changes)))

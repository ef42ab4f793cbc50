"""The training loop: collect groups, build the batch, step, sync weights, log.

    producer.produce ─groups─▶ batches.build ▶ trainer.train_step ──▶ pipeline.sync: engine.load_weights
          ▲                                                                  │
          └── driver.on_new_version (stale drops) ◀── version + 1 ───────────┘
                         │
              step_log: metrics row, records       event_log: journal       checkpointing

Sync, partial and asynchronous training are settings of the scheduler, not other loops. Nothing runs between two
generation phases (with rollout.overlap: after `Pipeline.interrupt_all`), so a checkpoint there is consistent.
api/session.py calls `next_step`, and builds another `Run` where the trainer's backend is lost.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from rollover.config import Config
from rollover.config import resume as resume_rules
from rollover.config.table import value_of
from rollover.models.allocator import return_freed_memory
from rollover.run.checkpointing import Checkpointing, stateful_components
from rollover.run.device_use import estimate_of
from rollover.run.directory import view_command
from rollover.run.evaluate import Evaluator
from rollover.run.event_log import EventLog
from rollover.run.pipeline import Pipeline
from rollover.run.producer import build_producer
from rollover.run.resume import Resume
from rollover.run.setup import RunContext, preflight
from rollover.run.step_log import StepLog
from rollover.run.supervised import HeldOutLoss
from rollover.track.summary import RunSummary, run_summary
from rollover.trainer.batch import Batch
from rollover.types import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """A finished training step: the trainer's policy version after it, the groups that it trained, and its row of
    metrics.jsonl (docs/metrics.md)."""

    number: int
    groups: list[Group]
    metrics: dict[str, float]


class Run:
    """One run in its directory: `begin`, then `next_step` until it returns None, then `close`.

    `changes`: options that the user changes between two steps.
    """

    def __init__(self, context: RunContext, changes: OptionChanges) -> None:
        self.context, self.changes = context, changes
        config, components = self.config, self.components = context.config, context.components
        self.directory, self.hooks, self.stop = context.directory, context.hooks, context.stop
        self.trackers = self.directory.trackers
        self.early_stop = ""  # reason to end training early, by eval.patience
        self.ended = False  # all steps and the end are done, or a stop was requested
        self._maintained_at: int | None = None  # trainer version of the last `_maintain`
        examples = components.examples
        self.held_out_loss = HeldOutLoss(config, examples, components.batches) if examples else None
        other = build_producer(config, components.loaded, components.engine, self.stop, examples)
        self.event_log = EventLog(
            context.journal,
            components.lifecycle.clock,
            components.prompts,
            generates=other is None,
            every_s=config.checkpoint.journal_s,
            mirror=self.directory.mirror,
        )
        self.step_log = StepLog(context, self.event_log)
        syncs = other is None or other.uses_engine
        self.pipeline = Pipeline(context, self.step_log, self.event_log, syncs=syncs)
        self.producer = other or self.pipeline
        self.evaluator = Evaluator(context, self.pipeline)
        stateful = stateful_components(components, self.producer)
        self.checkpointing = Checkpointing(context, stateful, self.event_log, self.pipeline)
        components.lifecycle.listeners = [
            components.lifetimes.on_event,
            components.trace.on_event,
            self.step_log.records.on_event,
            self.checkpointing.on_event,
            self.event_log.on_event,
            components.reuse.on_event,
        ]

    async def begin(self) -> Step | None:
        """Check the rewards, resume if the directory has a run, and listen to signals.

        Returns the last step that was trained again after a loss of the backend, if any.
        """
        newest = None
        if self.producer is self.pipeline and not self.components.is_restart:
            await preflight(
                self.config, self.components.rewarder, self.trackers, self.components.batches.teacher_prompts
            )
        if self.directory.resume:
            resume = Resume(self.context, self.checkpointing)
            await resume.restore()
            if self.components.is_restart and (groups := resume.newest_groups) is not None:
                newest = Step(self.components.trainer.policy_version, groups, self.directory.metrics.last_row)
        if self.config.model.lora.path and not self.components.trainer.policy_version and self.pipeline.syncs:
            await self.pipeline.sync()  # the engine has loaded the model without the adapter
        await self.pipeline.wake()  # the backend may have been lost while the servers were asleep
        self.checkpointing.protect_best(self.evaluator.best_step)  # a write deletes old ones
        await self.checkpointing.begin()
        self.directory.write_config()
        self.directory.write_resume()
        if self.config.track.rollouts:
            self.directory.write_tokenizer(self.components.loaded.tokenizer)
        self.directory.on_begun()
        self.stop.listen(self.components.driver.interrupt_for_good)
        return newest

    async def next_step(self) -> Step | None:
        """Evaluate and write a checkpoint if due, then make the next step.

        None where no step is left or a stop is requested; the run has then ended (`_end`).
        """
        if self.ended:
            return None
        await self._maintain()
        version = self.components.trainer.policy_version
        if version < self.config.train.num_steps and not (self.stop.requested or self.early_stop):
            await self.changes.apply(self.checkpointing)
            if (step := await self.step()) is not None:
                return step
        await self._end()
        self.ended = True
        return None

    async def step(self) -> Step | None:
        """Make one training step: collect, build the batch, step, sync weights, log. None where no groups are left."""
        components, trainer = self.components, self.components.trainer
        version = trainer.policy_version
        components.prompts.on_step(version)
        await self.hooks.call("on_step_start", version + 1)

        groups = await self._collect(version)
        if not groups:
            return None
        await self.pipeline.sleep()

        self.trackers.on_phase("training")
        with self.pipeline.training(version, groups):
            await self.pipeline.generate_ahead(version)
            penalties = None
            if trainer.reward_kl is not None:
                penalties = await self.pipeline.train(lambda: components.penalties(groups, version))
            batch = components.batches.build(groups, version, penalties)
            # Before the step: a custom metric that fails costs no step.
            metrics = self.step_log.custom_metrics(groups) | self.producer.metrics()
            metrics |= await self.pipeline.train(lambda: self._train(batch, version))
        components.after_step(groups, batch, version)
        self.event_log.on_step(version)
        return_freed_memory()

        num_bytes = 0
        try:
            num_bytes = await self.pipeline.sync_if_due()
            components.driver.on_new_version(trainer.policy_version)
        finally:  # the step is trained, even if the sync of its weights fails
            row = self.step_log.on_step(groups, batch, metrics, version, num_bytes)
            self.event_log.on_row(trainer.policy_version, self.directory.metrics, components.trace.num_bytes)
        await self.hooks.call("on_step_end", dict(row))
        return Step(trainer.policy_version, groups, row)

    async def evaluate(self) -> dict[str, Any] | None:
        """Evaluate the current weights: see Evaluator.evaluate."""
        row = await self.evaluator.evaluate()
        await self._keep_best()
        return row

    def summary(self) -> RunSummary:
        """Return the summary of the whole run, over all its processes."""
        config, directory = self.config, self.directory
        paths = {"run": str(directory.path)}
        if config.checkpoint.save_final_model:
            paths["model"] = str(directory.model)
        errors = self.components.observed.commonest_error()
        if directory.evaluation_files.best_model_step is not None:
            paths["best model"] = str(directory.evaluation_files.best_model)
        rows, evals = directory.metrics.rows(), directory.evals.rows()
        return run_summary(config.run.name, rows, evals, paths, errors, self.early_stop, view_command(directory.path))

    async def close(self, *, keep: bool = False) -> None:
        """End the event log, the engine, the reward workers, the backend and the trainer's thread.

        `keep`: keep engine and reward workers, for the Run after a lost backend.
        """
        if keep:  # later events of this run must not reach the next one's listeners
            self.components.lifecycle.listeners.clear()
        self.stop.unlisten()
        async with AsyncExitStack() as rest:  # each of them, even if another fails
            rest.callback(self.pipeline.close)
            rest.push_async_callback(self.components.close, keep=keep)
            self.event_log.close()

    # Private

    async def _maintain(self) -> None:
        """Evaluate and write a checkpoint if due, once at each trainer version."""
        config, version = self.config, self.components.trainer.policy_version
        every, before = config.eval.every_steps, self._maintained_at
        evaluates = bool(every) and version % every == 0
        if before is None:  # the process has just started
            steps_left = config.train.num_steps - version
            if not self.components.is_restart and (
                line := estimate_of(config, self.components.loaded.model, steps_left)
            ):
                logger.info(line)
            if evaluates if version else config.eval.at_start:
                await self._evaluate()  # a stop may have cut off the evaluation of the last step
            elif not version:
                self.evaluator.check_tasks()
            self.step_log.begin()
        elif before != version:
            if evaluates and version < config.train.num_steps:
                await self._evaluate()
            if self.checkpointing.is_due:
                await self.checkpointing.checkpoint()
        self._maintained_at = version

    async def _evaluate(self) -> None:
        """Evaluate the current weights, unless that was done, and look whether training ends early."""
        await self.evaluator.evaluate_if_wanted()
        await self._keep_best()
        if not self.early_stop and self.components.trainer.policy_version < self.config.train.num_steps:
            if reason := self.evaluator.early_stop_reason:
                self.early_stop = reason
                logger.info(f"training ends here: {reason}")

    async def _keep_best(self) -> None:
        """Keep the weights of the best evaluation: as a model, as a checkpoint."""
        self.evaluator.save_best_model()
        await self.checkpointing.keep_best(self.evaluator.best_step)

    async def _collect(self, version: int) -> list[Group] | None:
        """Return the groups of the step at trainer `version`: [] where none are left, None at a stop."""
        self.step_log.engine_growth()  # leaves out what an evaluation generated
        self.trackers.on_phase("generating")
        with self.components.trace.span("generate"):
            groups = await self.producer.produce(version + 1, version)
        if groups is not None and not groups:
            source, num_steps = self.producer.source, self.config.train.num_steps
            logger.info(f"the {source} are used up after {version} of {num_steps} steps")
        return_freed_memory()
        return groups

    def _train(self, batch: Batch, version: int) -> dict[str, float]:
        profile = self.directory.path / "profile" / f"step-{version + 1:06d}.json"
        is_profiled = version + 1 in self.config.train.profile_steps
        with self.components.trainer.backend.profiled(profile) if is_profiled else nullcontext():
            metrics = self.components.trainer.train_step(batch)
        if self.held_out_loss is not None:
            metrics |= self.held_out_loss.after_step(version + 1, self.components.trainer.backend)
        return metrics

    async def _end(self) -> None:
        """End the run: a checkpoint, the last evaluation, and the model, or the command that resumes."""
        # The checkpoint first: a failed evaluation must not cost trained steps.
        await self.checkpointing.checkpoint()
        if not self.stop.requested:
            await self._evaluate()
        step = self.components.trainer.policy_version
        if self.stop.requested:
            logger.info(f"stopped after step {step}; continue with:\n  {self.directory.resume_command}")
            return
        if self.config.checkpoint.save_final_model:
            self.trackers.on_phase("saving the model")
            self.components.trainer.backend.save_model(self.directory.model)
            self.directory.write_model_card(self.directory.model, step, self.evaluator.newest())
        finished = step >= self.config.train.num_steps or bool(self.early_stop)
        self.directory.end(step, "" if finished else self.producer.source, self.early_stop)


class OptionChanges:
    """Changes of options that take effect between two steps. config/resume.py decides which options can change."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._requested: dict[str, Any] = {}

    def request(self, key: str, value: Any) -> None:
        """Change an option from the next step on. ConfigError where it cannot change."""
        resume_rules.check_in_run(self.config, key, value)
        self._requested[key] = value

    async def apply(self, checkpointing: Checkpointing) -> None:
        """Apply the requested changes, and write the configuration if any value differs."""
        changes = [resume_rules.Change(k, value_of(self.config, k), value) for k, value in self._requested.items()]
        if not (changes := [change for change in changes if change.old != change.new]):
            return
        if checkpointing.event_log.is_on and resume_rules.trains_otherwise(changes, self.config):
            await checkpointing.checkpoint()  # a resume repeats the journal's steps with the old options
        for change in changes:
            resume_rules.change_in_run(self.config, change.key, change.new)
        checkpointing.directory.write_config(replace=True)
        logger.info("changed from here on: " + ", ".join(map(str, changes)))

"""The one loop: take READY groups -> build Batch -> step -> publish weights -> release slots.

    producer.produce ─groups─▶ reuse.build ──▶ trainer.train_step ──▶ engine.load_weights(trainer.publish())
          ▲                                                                      │
          └── driver.on_new_version (stale drops) ◀── version + 1 ────────────────┘
                         │
              record, metrics row, checkpoint

Sync, partial and asynchronous training are settings of the scheduler, not other loops. Owns the clock and the signals.
Between two generation phases nothing runs (with rollout.overlap: after `_quiesce`), so a checkpoint there is a
consistent cut. Whoever trains (the command line, `rollover.train`, a loop of the user's own) does it through
api/session.py, which walks through `steps` inside `running`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollover.config import Config
from rollover.config import resume as resume_rules
from rollover.config.fields import value_of
from rollover.models.allocator import return_freed_memory
from rollover.rollout.lifecycle import Event
from rollover.run.blocked_warning import BlockedWarning
from rollover.run.directory import RunDirectory
from rollover.run.held_out import HeldOut
from rollover.run.metrics_row import Rows
from rollover.run.parts import Parts, Threads, look_at_tasks
from rollover.run.producer import Generation, OwnProducer, Producer, RecordedRollouts
from rollover.run.profile import profiled
from rollover.run.records import Records
from rollover.run.recovery import Recovery
from rollover.run.snapshot import Owners
from rollover.run.stop import Stop
from rollover.run.streaming import collect_and_accumulate
from rollover.track.health import Health
from rollover.track.history import RunHistory
from rollover.track.live import LiveView
from rollover.track.summary import RunSummary, run_summary
from rollover.trainer.batch import Batch
from rollover.types import DropReason, Group

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Step:
    """A training step that was made: `number` is the trainer's policy version after it, `groups` are those that it
    trained, and `metrics` is its row of metrics.jsonl (docs/metrics.md)."""

    number: int
    groups: list[Group]
    metrics: dict[str, float]


class Run:
    """One run of the loop, in its directory: `running` around all of it, `steps` inside."""

    def __init__(self, config: Config, resume: bool, command: list[str] | None = None) -> None:
        """`command`: what was typed after `rollover train`, for the command that resumes; None: Python called it."""
        self.config, self.resume, self.command = config, resume, command
        self.directory = RunDirectory(config, resume)
        self.threads = Threads.of(config)
        self.health = Health(() if config.algorithm.compares_siblings else ("groups/zero_variance",))
        # One thread for all steps: it keeps its own team of torch's threads.
        self.trainer_thread = ThreadPoolExecutor(1, "trainer")
        self.stop = Stop()
        self.ended = False  # `steps` came to its end: all that is left to do is done, or a stop was requested
        self.newest: Step | None = None
        self._changes: dict[str, Any] = {}  # of options, from the next step on

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Set up and (resume) before the block, and close all after it. An error in the block is followed by a
        checkpoint of what there is, and so is the end of a block that took not all steps."""
        config = self.config
        with LiveView(config.track.live, config.train.num_steps, title=config.run.name) as self.view:
            self.view.phase("loading the model")
            parts = self.parts = Parts.build(config, self.view.message)
            self.producer = self._producer()
            parts.lifecycle.on_event = self._on_event
            parts.driver.say = parts.observed.say = parts.prompts.stream.say = self.view.message
            self.stop.on_stop = parts.driver.interrupt_for_good
            if self.overlaps:
                parts.trainer.team.before = self._take_cores
            self.blocked = BlockedWarning(self.view.message)
            self.history = RunHistory(self.directory.trace)
            self.rows = Rows(config, parts, self.history, self.overlaps)
            self.held_out = HeldOut(config, parts, self.stop, self.directory.evals, self.view.message)
            recorded = config.track.rollouts and not self.recorded
            self.records = Records(self.directory.rollouts, parts.loaded.tokenizer.decode, recorded)
            self.recovery = Recovery(
                config, parts, Owners.of(parts, self.directory, self.history, self.producer), self.rows, self.records,
                self.view, self.stop, self._quiesce, self.hand_over_weights, self._tell,
                self.directory.resume_command(self.command),
            )  # fmt: skip
            # What is ended without its tokens is in the journal with those that it had: that is not taken back.
            parts.driver.on_abandon = self.recovery.journal.halt
            try:
                await self._prepare()
                try:
                    yield
                    if not self.ended:
                        await self.recovery.checkpoint()
                except Exception as error:
                    await self.recovery.rescue(error)
                    raise
                self.history.flush()
            finally:
                self.recovery.close()
                await parts.close()
                self.trainer_thread.shutdown()

    async def _prepare(self) -> None:
        if isinstance(self.producer, Generation):
            await look_at_tasks(self.config, self.parts.rewarder, self.view)
        if self.resume:
            await self.recovery.restore()
        await self.recovery.begin()
        self.directory.write_config()
        self.stop.listen(self.view.message)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """All steps and evaluations that are left. A stop ends it early; so may whoever asks for no more of them."""
        trainer, config = self.parts.trainer, self.config
        every = config.eval.every_steps
        if trainer.policy_version == 0 or (every and trainer.policy_version % every == 0):
            await self._evaluate()  # the second: a stop may have cut off the evaluation of the last step
        self.rows.begin()
        while trainer.policy_version < config.train.num_steps and not self.stop.requested:
            await self._make_changes()
            if not await self.step():
                break
            assert self.newest is not None
            yield self.newest
            step = trainer.policy_version
            if config.eval.every_steps and step % config.eval.every_steps == 0 and step < config.train.num_steps:
                await self._evaluate()
            if self.recovery.is_due:
                await self.recovery.checkpoint()
        await self.recovery.checkpoint()  # before the last evaluation: nothing that happens to that may cost the run
        if not self.stop.requested:
            await self._evaluate()
        self.ended = True
        if self.stop.requested:
            self.view.message(
                f"stopped after step {trainer.policy_version}; continue with:\n  {self.recovery.resume_command}"
            )
            return
        if config.checkpoint.save_final_model:
            self.view.phase("saving the model")
            trainer.save_model(self.directory.model)
        finished = trainer.policy_version >= config.train.num_steps
        self.directory.end(trainer.policy_version, "" if finished else self.producer.source)

    async def step(self) -> bool:
        """One training step. False when there is nothing (more) to train on."""
        parts, trainer = self.parts, self.parts.trainer
        version = parts.prompts.version = trainer.policy_version
        self.rows.engine_growth()  # what an evaluation did is not this step's
        self.view.phase("generating")
        with self.history.span("generate"):
            groups = await self.producer.produce(version + 1, version)
        if not groups:
            if groups is not None:
                what, num_steps = self.producer.source, self.config.train.num_steps
                self.view.message(f"the {what} are used up after {version} of {num_steps} steps")
            return False
        return_freed_memory()
        self.view.phase("training")
        self.recovery.taken = groups
        with self._training(version):
            batch = parts.reuse.build(groups, version)
            trained = await self._train(batch, version)
        self.recovery.taken = []
        parts.reuse.after_step(groups, batch, version)
        self.recovery.scribe.on_step(version)
        self.history.trained(version + 1)
        return_freed_memory()
        num_bytes = 0
        try:
            num_bytes = await self._hand_over_if_due()
            parts.driver.on_new_version(trainer.policy_version)
        finally:  # the step was trained, whatever becomes of its weights
            self._tell(self.rows.of_step(groups, batch, trained, version, num_bytes), groups, batch)
        return True

    async def _hand_over_if_due(self) -> int:
        """Give the engine the new weights, if they are due; returns their bytes."""
        version = self.parts.trainer.policy_version
        if self.recorded or version % self.config.train.publish_every:
            return 0
        if self.overlaps and self.config.rollout.interrupt == "never":
            await self.parts.driver.drain()  # a wait for generation, which the driver counts as such
        with self.rows.timed("weights"):
            num_bytes = await self.hand_over_weights()
        self.history.on_new_version(version)
        self.recovery.scribe.on_publish(version)
        return num_bytes

    def _tell(self, row: dict[str, float], groups: list[Group], batch: Batch) -> None:
        """Check what a step says of itself, and write it down."""
        self.parts.lifecycle.check()
        bound = self.config.staleness_bound
        assert self.recorded or row["staleness/max"] <= bound, f"staleness {row['staleness/max']} is above {bound}"
        assert row.get("staleness/replayed_max", 0) <= self.config.replay.max_staleness, "replayed above its bound"
        self.records.write(self.parts.trainer.policy_version, groups, batch)
        self.directory.metrics.write(row)
        self.newest = Step(self.parts.trainer.policy_version, groups, row)
        self.recovery.on_row(self.history.flush())
        self.view.update(row)
        for warning in self.health.look(row):
            self.view.message(f"health: {warning}")

    async def _train(self, batch: Batch, version: int) -> dict[str, float]:
        """The training step; with rollout.overlap in a thread of its own, while generation goes on."""

        def work() -> dict[str, float]:
            with profiled(self.config, version + 1, self.directory.path):
                return self.parts.trainer.train_step(batch)

        if not self.overlaps:
            return work()
        self.parts.driver.go_on(version)
        for _ in range(2):  # what may start has begun then, or the driver knows that nothing may
            await asyncio.sleep(0)
        with self._loop_watched(self._generating):
            return await self._beside_generation(work)

    def _take_cores(self) -> None:
        """In the trainer's thread: its share of the cores, or all once the engine has nothing to run beside it."""
        idle = self.parts.driver.clock.idle.running
        self.parts.trainer.team.use(self.threads.alone if idle else self.threads.trainer)

    async def _quiesce(self) -> None:
        """Park what is in flight, if anything is: a snapshot is a cut at which nothing runs."""
        if self.overlaps:
            await self.parts.driver.interrupt_all()

    @property
    def recorded(self) -> bool:
        """Whether no engine is needed."""
        return isinstance(self.producer, RecordedRollouts)

    @property
    def overlaps(self) -> bool:
        """Whether rollouts are generated while the trainer trains."""
        return self.config.rollout.overlap and isinstance(self.producer, Generation)

    def _producer(self) -> Producer:
        config, parts = self.config, self.parts
        if config.run.replay_rollouts:
            return RecordedRollouts(Path(config.run.replay_rollouts))
        if config.tasks.producer:
            return OwnProducer(config, parts.loaded.tokenizer, parts.engine, self.stop)
        return Generation(self._collect)

    async def _collect(self, version: int) -> list[Group] | None:
        with self._loop_watched(self._generating):
            if self.config.train.streaming_min_groups:
                return await self._collect_streaming(version)
            return await self.parts.driver.collect(version)

    async def _collect_streaming(self, version: int) -> list[Group] | None:
        """As `_collect`, and the trainer works on what is ready meanwhile."""
        parts, min_groups = self.parts, self.config.train.streaming_min_groups

        async def run(work: Callable[[], None]) -> None:
            with self._training(version):
                await self._beside_generation(work)

        return await collect_and_accumulate(parts.driver, parts.reuse, parts.trainer, version, min_groups, run)

    @contextmanager
    def _training(self, version: int) -> Iterator[None]:
        """Times the trainer's work, and says so if it does not end."""
        limit_s = self.config.watchdog.train_timeout_s
        with self.rows.timed("train"), self.blocked.over_work(f"the training of step {version + 1}", "begun", limit_s):
            yield

    async def _beside_generation(self, work: Callable[[], Result]) -> Result:
        """The trainer's work in its thread, while the engine goes on with the cores that are left to it."""
        engine, team = self.parts.engine, self.parts.trainer.team
        engine.use_threads(self.threads.engine)
        try:
            loop, share = asyncio.get_running_loop(), self.threads.trainer
            return await loop.run_in_executor(self.trainer_thread, team.compute, share, work)
        finally:
            team.use(self.threads.alone)
            engine.use_threads(self.threads.alone)

    async def hand_over_weights(self) -> int:
        """Hand the trainer's weights to the engine; returns their bytes."""
        version, limit_s = self.parts.trainer.policy_version, self.config.watchdog.weights_timeout_s
        state = "being handed to the engine, begun"
        with self.blocked.over_work(f"the weights of policy version {version}", state, limit_s):
            weights = await self.parts.trainer.publish()
            return (await self.parts.engine.load_weights(version, weights)).num_bytes

    def change(self, key: str, value: Any) -> None:
        """Change an option from the next step on. ConfigError where it cannot (config/resume.py)."""
        resume_rules.check_in_run(self.config, key, value)
        self._changes[key] = value

    async def _make_changes(self) -> None:
        changes = [resume_rules.Change(k, value_of(self.config, k), value) for k, value in self._changes.items()]
        self._changes.clear()
        if not (changes := [change for change in changes if change.old != change.new]):
            return
        if self.recovery.journaled and resume_rules.trains_otherwise(changes, self.config):
            await self.recovery.checkpoint()  # steps that a journal tells of are trained again as they were
        for change in changes:
            resume_rules.change_in_run(self.config, change.key, change.new)
        self.directory.write_config(replace=True)
        self.view.message("changed from here on: " + ", ".join(map(str, changes)))

    async def evaluate(self) -> dict[str, Any] | None:
        """Evaluate the present weights on the held-out tasks, once: their row of eval.jsonl; None if it was stopped.

        ValueError where there are none, or none can be evaluated.
        """
        if self.config.eval.num_tasks == 0 or self.recorded:
            raise ValueError("nothing is held out: set eval.num_tasks (it has no effect on recorded rollouts)")
        if (row := self.held_out.newest) is not None:
            return row
        await self._quiesce()
        self.view.phase("evaluating")
        with self.rows.timed("eval"), self._loop_watched(lambda: "evaluating"):
            return await self.held_out.evaluate()

    async def _evaluate(self) -> None:
        """Evaluate if that is wanted, once per policy version.

        A failure ends the run only before the first step: later it must not cost what was trained.
        """
        if self.stop.requested or self.config.eval.num_tasks == 0 or self.recorded or self.held_out.newest:
            return
        version = self.parts.trainer.policy_version
        await self._quiesce()  # what fails there is no evaluation
        try:
            await self.evaluate()
        except ValueError as error:
            if version == 0 and not self.stop.requested:
                raise
            self.view.message(f"the evaluation after {version} steps failed: {error}")

    def summary(self) -> RunSummary:
        """Of the whole run, all its processes together."""
        config, directory = self.config, self.directory
        paths = {"run": str(directory.path)}
        if config.checkpoint.save_final_model:
            paths["model"] = str(directory.model)
        errors = self.parts.observed.commonest_error()
        return run_summary(config.run.name, directory.metrics.rows(), directory.evals.rows(), paths, errors)

    def _on_event(self, event: Event) -> None:
        self.history.on_event(event)
        self.recovery.on_event(event)
        self.records.on_event(event)
        if event.reason is DropReason.FILTERED:
            self.parts.reuse.on_filtered(event.group)

    def _generating(self) -> str:
        return f"generating: {self.parts.driver.watchdog.describe(time.monotonic())}"

    def _loop_watched(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        """Warns when a step of the engine holds up the event loop."""
        return self.blocked.over_event_loop(doing, self.config.watchdog.rollout_timeout_s)

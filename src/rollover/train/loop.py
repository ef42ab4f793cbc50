"""The one loop: take READY groups -> build Batch -> step -> publish weights -> release slots.

    producer.produce ─groups─▶ reuse.build ──▶ trainer.train_step ──▶ engine.load_weights(trainer.publish())
          ▲                                                                      │
          └── driver.after_publish (stale drops) ◀── version + 1 ────────────────┘
                         │
              record, metrics row, checkpoint

Sync, partial and asynchronous training are settings of the scheduler, not other loops. Owns the clock and the signals.
Between two generation phases nothing runs (with rollout.overlap: after `_quiesce`), so a checkpoint there is a
consistent cut.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from rollover.checkpoint.snapshot import Owners
from rollover.config import Config
from rollover.config.load import Resolved
from rollover.models.allocator import return_freed_memory
from rollover.rollout.lifecycle import Event
from rollover.track.chronicle import Chronicle
from rollover.track.health import Health
from rollover.track.live import LiveView
from rollover.track.summary import RunSummary, print_summary, run_summary
from rollover.train.alarm import Alarm
from rollover.train.batch import Batch
from rollover.train.directory import RunDirectory
from rollover.train.evaluate import encode_tasks, evaluate
from rollover.train.producer import Generation, OwnProducer, Producer, RecordedRollouts
from rollover.train.profile import profiled
from rollover.train.records import Records
from rollover.train.recovery import Recovery
from rollover.train.rows import Rows
from rollover.train.setup import Parts, Threads, held_out_tasks, look_at_tasks
from rollover.train.stop import Stop
from rollover.train.streaming import collect_and_accumulate
from rollover.types import DropReason, Group

INTERRUPTED = 130
Result = TypeVar("Result")


def run_training(resolved: Resolved, resume: bool, command: list[str] | None = None) -> int:
    """`rollover train`: exit code. `command` is what the user typed after `train`, for the resume command."""
    run = Run(resolved.config, resume, command or [])
    try:
        if resume and (finished := run.directory.why_finished()) is not None:
            print(f"rollover: notice: {finished}", file=sys.stderr)
            return 0
        return asyncio.run(run.main())
    finally:
        run.directory.close()


class Run:
    """One run of the loop, in its directory."""

    def __init__(self, config: Config, resume: bool, command: list[str]) -> None:
        self.config, self.resume, self.command = config, resume, command
        self.directory = RunDirectory(config, resume)
        self.threads = Threads.of(config)
        self.health = Health(() if config.algorithm.compares_siblings else ("groups/zero_variance",))
        # One thread for all steps: it keeps its own team of torch's threads.
        self.trainer_thread = ThreadPoolExecutor(1, "trainer")

    async def main(self) -> int:
        """Set up, (resume,) evaluate, train, evaluate, summarise. Returns the exit code."""
        config = self.config
        with LiveView(config.track.live, config.train.num_steps, title=config.run.name) as self.view:
            self.view.phase("loading the model")
            parts = self.parts = Parts.build(config, self.view.message)
            self.stop = Stop()
            self.producer = self._producer()
            parts.lifecycle.on_event = self._on_event
            parts.driver.say = parts.observed.say = parts.prompts.stream.say = self.view.message
            self.stop.on_stop = parts.driver.request_stop
            if self.overlaps:
                parts.trainer.team.before = self._take_cores
            self.alarm = Alarm(self.view.message)
            self.chronicle = Chronicle(self.directory.trace)
            self.rows = Rows(config, parts, self.chronicle, self.overlaps)
            recorded = config.track.rollouts and not self.recorded
            self.records = Records(self.directory.rollouts, parts.loaded.tokenizer.decode, recorded)
            self.recovery = Recovery(
                config, parts, Owners.of(parts, self.directory, self.chronicle, self.producer), self.rows, self.records,
                self.view, self.stop, self._quiesce, self._publish, self._tell,
                self.directory.resume_command(self.command),
            )  # fmt: skip
            # What is ended without its tokens is in the journal with those that it had: that is not taken back.
            parts.driver.on_abandon = self.recovery.journal.halt
            try:
                code = await self._main()
                self.chronicle.flush()
            finally:
                self.recovery.close()
                await parts.close()
                self.trainer_thread.shutdown()
        if code == 0:
            print_summary(self._summary())
        return code

    async def _main(self) -> int:
        if isinstance(self.producer, Generation):
            await look_at_tasks(self.config, self.parts.rewarder, self.view)
        if self.resume:
            await self.recovery.restore()
        await self.recovery.begin()
        self.directory.write_config()
        self.stop.listen(self.view.message)
        try:
            return await self._run()
        except Exception as error:
            await self.recovery.rescue(error)
            raise

    async def _run(self) -> int:
        """All steps and evaluations that are left. Returns the exit code."""
        trainer, config = self.parts.trainer, self.config
        every = config.eval.every_steps
        if trainer.policy_version == 0 or (every and trainer.policy_version % every == 0):
            await self._evaluate()  # the second: a stop may have cut off the evaluation of the last step
        self.rows.begin()
        while trainer.policy_version < config.train.num_steps and not self.stop.requested:
            if not await self._step():
                break
            step = trainer.policy_version
            if config.eval.every_steps and step % config.eval.every_steps == 0 and step < config.train.num_steps:
                await self._evaluate()
            if self.recovery.is_due:
                await self.recovery.checkpoint()
        await self.recovery.checkpoint()  # before the last evaluation: nothing that happens to that may cost the run
        if not self.stop.requested:
            await self._evaluate()
        if self.stop.requested:
            self.view.message(
                f"stopped after step {trainer.policy_version}; continue with:\n  {self.recovery.resume_command}"
            )
            return INTERRUPTED
        if config.checkpoint.save_final_model:
            self.view.phase("saving the model")
            trainer.save_model(self.directory.model)
        finished = trainer.policy_version >= config.train.num_steps
        self.directory.end(trainer.policy_version, "" if finished else self.producer.source)
        return 0

    async def _step(self) -> bool:
        """One training step. False when there is nothing (more) to train on."""
        parts, trainer = self.parts, self.parts.trainer
        version = parts.prompts.version = trainer.policy_version
        self.rows.engine_growth()  # what an evaluation did is not this step's
        self.view.phase("generating")
        with self.chronicle.span("generate"):
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
        self.chronicle.trained(version + 1)
        return_freed_memory()
        num_bytes = 0
        try:
            num_bytes = await self._hand_over()
            parts.driver.after_publish(trainer.policy_version)
        finally:  # the step was trained, whatever becomes of its weights
            self._tell(self.rows.of_step(groups, batch, trained, version, num_bytes), groups, batch)
        return True

    async def _hand_over(self) -> int:
        """Give the engine the new weights, if they are due; returns their bytes."""
        version = self.parts.trainer.policy_version
        if self.recorded or version % self.config.train.publish_every:
            return 0
        if self.overlaps and self.config.rollout.interrupt == "never":
            await self.parts.driver.drain()  # a wait for generation, which the driver counts as such
        with self.rows.timed("weights"):
            num_bytes = await self._publish()
        self.chronicle.publish(version)
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
        self.recovery.on_row(self.chronicle.flush())
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
        idle = self.parts.driver.engine_idle
        self.parts.trainer.team.use(self.threads.alone if idle else self.threads.trainer)

    async def _quiesce(self) -> None:
        """Park what is in flight, if anything is: a snapshot is a cut at which nothing runs."""
        if self.overlaps:
            await self.parts.driver.park()

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
        with self.rows.timed("train"), self._alarmed(f"the training of step {version + 1}", "begun", limit_s):
            yield

    def _alarmed(self, what: str, state: str, limit_s: float) -> AbstractContextManager[object]:
        """Says so if a block that nothing can end from outside takes longer than that."""

        def text(seconds: float) -> str:
            return f"{what} ({state} {seconds:.3g} s ago): it cannot be ended from here, so the run waits"

        return self.alarm.over(text, limit_s)

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

    async def _publish(self) -> int:
        """Hand the trainer's weights to the engine; returns their bytes."""
        version, limit_s = self.parts.trainer.policy_version, self.config.watchdog.weights_timeout_s
        state = "being handed to the engine, begun"
        with self._alarmed(f"the weights of policy version {version}", state, limit_s):
            weights = await self.parts.trainer.publish()
            return (await self.parts.engine.load_weights(version, weights)).num_bytes

    async def _evaluate(self) -> None:
        """Evaluate on the held-out tasks and append the result to eval.jsonl, once per policy version.

        A failure ends the run only before the first step: later it must not cost what was trained.
        """
        config, parts = self.config, self.parts
        version, rows = parts.trainer.policy_version, self.directory.evals.rows()
        done = bool(rows) and rows[-1]["step"] == version
        if done or self.stop.requested or config.eval.num_tasks == 0 or self.recorded:
            return
        await self._quiesce()
        self.view.phase("evaluating")
        started = time.perf_counter()
        try:
            with self.rows.timed("eval"), self._loop_watched(lambda: "evaluating"):
                if not hasattr(self, "held_out"):
                    tasks = held_out_tasks(config, self.view.message)
                    self.held_out = encode_tasks(tasks, parts.loaded.tokenizer, parts.prompts.max_prompt_tokens)
                # A stop waits for no answer and no score.
                result = await self.stop.unless_requested(
                    evaluate(
                        self.held_out, parts.engine, parts.observed, parts.loaded.tokenizer, config,
                        parts.stop_token_ids, self.view.message,
                    )
                )  # fmt: skip
        except ValueError as error:
            if version == 0 and not self.stop.requested:
                raise
            self.view.message(f"the evaluation after {version} steps failed: {error}")
            return
        if result is None:
            return
        seconds = time.perf_counter() - started
        self.directory.evals.write({"step": version, "policy_version": version, "seconds": seconds, **result})
        self.view.message(f"held-out mean reward after {version} steps: {result['mean']:.3f}")

    def _summary(self) -> RunSummary:
        config, directory = self.config, self.directory
        paths = {"run": str(directory.path)}
        if config.checkpoint.save_final_model:
            paths["model"] = str(directory.model)
        errors = self.parts.observed.commonest_error()
        return run_summary(config.run.name, directory.metrics.rows(), directory.evals.rows(), paths, errors)

    def _on_event(self, event: Event) -> None:
        self.chronicle.on_event(event)
        self.recovery.on_event(event)
        self.records.on_event(event)
        if event.reason is DropReason.FILTERED:
            self.parts.reuse.on_filtered(event.group)

    def _generating(self) -> str:
        return f"generating: {self.parts.driver.watchdog.describe(time.monotonic())}"

    # Clocks

    @contextmanager
    def _loop_watched(self, doing: Callable[[], str]) -> Iterator[None]:
        """Warn when a step of the engine holds up the event loop, so that no other watchdog can look."""

        def text(seconds: float) -> str:
            return (
                f"the event loop has stood still for {seconds:.3g} s while {doing()}:"
                " nothing can be ended from here, so the run waits"
            )

        loop, limit_s = asyncio.get_running_loop(), self.config.watchdog.rollout_timeout_s
        with self.alarm.over_loop(text, limit_s, loop.call_later):
            yield

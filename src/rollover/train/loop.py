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
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from rollover.checkpoint.snapshot import Owners, load_snapshot, write_snapshot
from rollover.config import Config
from rollover.config.load import Resolved
from rollover.models.allocator import return_freed_memory
from rollover.rollout.lifecycle import Event, EventKind
from rollover.track.chronicle import Chronicle
from rollover.track.health import Health
from rollover.track.live import LiveView
from rollover.track.metrics import is_counter
from rollover.track.recorder import RecordedGroup
from rollover.track.summary import RunSummary, print_summary, run_summary
from rollover.train.alarm import Alarm
from rollover.train.batch import Batch
from rollover.train.directory import RunDirectory
from rollover.train.evaluate import encode_tasks, evaluate
from rollover.train.producer import Generation, OwnProducer, Producer, RecordedRollouts
from rollover.train.profile import profiled
from rollover.train.report import (
    mask_metrics,
    peak_rss_bytes,
    reward_metrics,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
    waste_metrics,
)
from rollover.train.setup import Parts, Threads, held_out_tasks, look_at_tasks
from rollover.train.streaming import collect_and_accumulate
from rollover.types import DropReason, Group

INTERRUPTED = 130
Result = TypeVar("Result")


def run_training(resolved: Resolved, resume: bool, command: list[str] | None = None) -> int:
    """`rollover train`: exit code. `command` is what the user typed after `train`, for the resume command."""
    run = Run(resolved.config, resume, command or [])
    return asyncio.run(run.main())


class Run:
    """One run of the loop, in its directory."""

    def __init__(self, config: Config, resume: bool, command: list[str]) -> None:
        self.config, self.resume, self.command = config, resume, command
        self.directory = RunDirectory(config, resume)
        self.stopping = False
        self.saved_version = -1
        self.seconds: dict[str, float] = {}
        self.counted: dict[str, float] = {}
        self.carried: dict[str, float] = {}  # counters of engine and rewards, of the processes before this one
        self.dropped: list[tuple[Group, DropReason]] = []
        self.row_started = time.perf_counter()
        self.threads = Threads.of(config)
        self.health = Health()
        # One thread for all steps: it keeps its own team of torch's threads.
        self.trainer_thread = ThreadPoolExecutor(1, "trainer", torch.set_num_threads, (self.threads.trainer,))

    async def main(self) -> int:
        """Set up, (resume,) evaluate, train, evaluate, summarise. Returns the exit code."""
        with LiveView(self.config.track.live, self.config.train.num_steps, title=self.config.run.name) as self.view:
            self.view.phase("loading the model")
            parts = self.parts = Parts.build(self.config)
            self.producer = self._producer()
            parts.lifecycle.on_event = self._on_event
            parts.driver.say = parts.observed.say = self.view.message
            if self.overlaps:
                parts.trainer.before_micro_batch = self._take_cores
            self.alarm = Alarm(self.view.message)
            self.chronicle = Chronicle(self.directory.trace)
            self.owners = Owners(
                parts.trainer, parts.lifecycle, parts.prompts, self.directory, self.chronicle, parts.reuse
            )
            try:
                code = await self._main()
                self.chronicle.flush()
            finally:
                await parts.close()
                self.trainer_thread.shutdown()
        if code == 0:
            print_summary(self._summary())
        return code

    async def _main(self) -> int:
        if isinstance(self.producer, Generation):
            await look_at_tasks(self.config, self.parts.rewarder, self.view)
        if self.resume:
            self._restore()
        self.directory.write_config()
        self._listen_for_signals()
        trainer, config = self.parts.trainer, self.config
        every = config.eval.every_steps
        if trainer.policy_version == 0 or (every and trainer.policy_version % every == 0):
            await self._evaluate()  # the second: a stop may have cut off the evaluation of the last step
        self.row_started = time.perf_counter()
        self.seconds.clear()  # the evaluation before the first step belongs to no row
        while trainer.policy_version < config.train.num_steps and not self.stopping:
            if not await self._step():
                break
            step = trainer.policy_version
            if config.eval.every_steps and step % config.eval.every_steps == 0 and step < config.train.num_steps:
                await self._evaluate()
            if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
                await self._checkpoint()
        await self._checkpoint()  # before the last evaluation: nothing that happens to that may cost the run
        if not self.stopping:
            await self._evaluate()
        if self.stopping:
            self.view.message(
                f"stopped after step {trainer.policy_version}; continue with:\n  {self._resume_command()}"
            )
            return INTERRUPTED
        if config.checkpoint.save_final_model:
            self.view.phase("saving the model")
            trainer.save_model(self.directory.model)
        return 0

    async def _step(self) -> bool:
        """One training step. False when there is nothing (more) to train on."""
        parts, trainer = self.parts, self.parts.trainer
        version = parts.prompts.version = trainer.policy_version
        self._engine_growth()  # what an evaluation did is not this step's
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
        with self._training(version):
            batch = parts.reuse.build(groups, version)
            trained = await self._train(batch, version)
        parts.reuse.after_step(groups, batch, version)
        return_freed_memory()
        num_bytes = 0
        if not self.recorded and trainer.policy_version % self.config.train.publish_every == 0:
            if self.overlaps and self.config.rollout.interrupt == "never":
                await parts.driver.drain()  # a wait for generation, which the driver counts as such
            with self._timed("weights"):
                num_bytes = self._publish()
            self.chronicle.publish(trainer.policy_version)
        parts.driver.after_publish(trainer.policy_version)
        row = self._row(groups, batch, trained, version, num_bytes)
        self._record(groups, batch)
        self.directory.metrics.write(row)
        self.chronicle.flush()
        self.view.update(row)
        for warning in self.health.look(row):
            self.view.message(f"health: {warning}")
        return True

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
        torch.set_num_threads(self.threads.alone if idle else self.threads.trainer)

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
            return OwnProducer(config, parts.loaded.tokenizer, parts.engine)
        return Generation(self._collect)

    async def _collect(self, version: int) -> list[Group] | None:
        try:
            with self._loop_watched(self._generating):
                if self.config.train.streaming_min_groups:
                    return await self._collect_streaming(version)
                return await self.parts.driver.collect(version)
        except ValueError:  # a reward service that went down, say: what was trained so far is kept
            if self.parts.lifecycle.ledger.generated_tokens:  # before the first step there are answers to look at, too
                await self._checkpoint()
            raise

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
        with self._timed("train"), self._alarmed(f"the training of step {version + 1}", "begun", limit_s):
            yield

    def _alarmed(self, what: str, state: str, limit_s: float) -> AbstractContextManager[object]:
        """Says so if a block that nothing can end from outside takes longer than that."""

        def text(seconds: float) -> str:
            return f"{what} ({state} {seconds:.3g} s ago): it cannot be ended from here, so the run waits"

        return self.alarm.over(text, limit_s)

    async def _beside_generation(self, work: Callable[[], Result]) -> Result:
        """The trainer's work in its thread, while the engine goes on with the cores that are left to it."""
        engine = self.parts.engine
        engine.use_threads(self.threads.engine)
        try:
            return await asyncio.get_running_loop().run_in_executor(self.trainer_thread, work)
        finally:
            engine.use_threads(self.threads.alone)

    def _publish(self) -> int:
        """Hand the trainer's weights to the engine; returns their bytes."""
        version, limit_s = self.parts.trainer.policy_version, self.config.watchdog.weights_timeout_s
        state = "being handed to the engine, begun"
        with self._alarmed(f"the weights of policy version {version}", state, limit_s):
            return self.parts.engine.load_weights(version, self.parts.trainer.publish()).num_bytes

    def _row(
        self, groups: list[Group], batch: Batch, trained: dict[str, float], version: int, num_bytes: int
    ) -> dict[str, float]:
        parts, driver = self.parts, self.parts.driver
        ledger = parts.lifecycle.metrics()
        parts.lifecycle.check()
        ages = staleness_metrics(batch, version, self.chronicle.lifetimes.ready_versions)
        bound = self.config.staleness_bound
        assert self.recorded or ages["staleness/max"] <= bound, f"staleness {ages} is above {bound}"
        assert ages.get("staleness/replayed_max", 0) <= self.config.replay.max_staleness, f"replayed: {ages}"
        waits = {"generate": driver.generation_s, "score": driver.scoring_s, "schedule": driver.scheduling_s}
        now = time.perf_counter()
        step_s, self.row_started = now - self.row_started, now
        times = {f"time/{k}_s": self.seconds.pop(k, 0.0) for k in ("train", "weights", "checkpoint", "eval")}
        times |= {f"time/{phase}_s": self._since_last(phase, total) for phase, total in waits.items()}
        row: dict[str, float] = {
            "step": parts.trainer.policy_version,
            "policy_version": parts.trainer.policy_version,
            "time": time.time(),
            **reward_metrics(groups),
            **rollout_metrics(groups),
            **self.chronicle.lifetimes.step_metrics(),
            **ages,
            "staleness/bound": bound,
            **trained,
            **ledger,
            **parts.reuse.metrics(),
            "tokens/step_generated": self._since_last("generated", ledger["tokens/generated"]),
            "tokens/step_trained": float(batch.num_loss_tokens),
            **mask_metrics(batch),
            "waste/dropped_tokens": self._since_last("dropped", ledger["tokens/dropped"]),
            "tasks/skipped_long_prompt": parts.prompts.num_skipped,
            "tasks/left_out": parts.prompts.num_left_out,
            **self._owners_counters(),
            **times,
            "time/other_s": max(0.0, step_s - sum(times.values())),
            "time/step_s": step_s,
            **self._engine_waits(),
            "weights/bytes": num_bytes,
            "memory/peak_rss_bytes": peak_rss_bytes(),
        }
        return row | speed_metrics(row) | waste_metrics(self._engine_growth(), row)

    def _engine_growth(self) -> dict[str, float]:
        """Growth of the engine's counters since the last call."""
        return {key: self._since_last(key, value) for key, value in self.parts.engine.stats().items()}

    def _engine_waits(self) -> dict[str, float]:
        """The engine's side of the waiting: in this step, and with rollout.overlap only."""
        idle = self.parts.driver.idle_s()
        if not self.overlaps:
            return {}
        return {f"wait/engine_for_{whom}_s": self._since_last(f"idle/{whom}", s) for whom, s in idle.items()}

    def _owners_counters(self) -> dict[str, float]:
        """Counters and gauges of engine, rewards and watchdog; counters go on where a resumed run had ended."""
        now = {**self.parts.rewarder.stats(), **self.parts.engine.stats(), **self.parts.driver.watchdog.stats()}
        return {key: value + self.carried.get(key, 0.0) for key, value in now.items()}

    def _record(self, groups: list[Group], batch: Batch | None) -> None:
        """Write the groups that were trained by the last step, and those dropped since the last record."""
        if not self.config.track.rollouts or self.recorded:
            return
        advantages = {s.rollout_id: float(s.advantages[0]) for s in batch.samples} if batch is not None else {}
        records = [self._recorded(g, advantages, None) for g in groups]
        records += [self._recorded(group, {}, reason) for group, reason in self.dropped]
        self.dropped.clear()
        if records:
            self.directory.rollouts.write(self.parts.trainer.policy_version, records)

    def _recorded(self, group: Group, advantages: dict[str, float], reason: DropReason | None) -> RecordedGroup:
        decode = self.parts.loaded.tokenizer.decode
        texts = [decode(r.token_ids(), skip_special_tokens=True) for r in group.rollouts]
        return RecordedGroup(group, texts, [advantages.get(r.rollout_id) for r in group.rollouts], reason)

    async def _evaluate(self) -> None:
        """Evaluate on the held-out tasks and append the result to eval.jsonl, once per policy version.

        A failure ends the run only before the first step: later it must not cost what was trained.
        """
        config, parts = self.config, self.parts
        version, rows = parts.trainer.policy_version, self.directory.evals.rows()
        done = bool(rows) and rows[-1]["step"] == version
        if done or self.stopping or config.eval.num_tasks == 0 or self.recorded:
            return
        await self._quiesce()
        self.view.phase("evaluating")
        started = time.perf_counter()
        try:
            with self._timed("eval"), self._loop_watched(lambda: "evaluating"):
                if not hasattr(self, "held_out"):
                    self.held_out = encode_tasks(
                        held_out_tasks(config), parts.loaded.tokenizer, parts.prompts.max_prompt_tokens
                    )
                if self.stopping:
                    return
                result = await evaluate(
                    self.held_out, parts.engine, parts.observed, parts.loaded.tokenizer, config, parts.stop_token_ids
                )
        except ValueError as error:
            if version == 0 and not self.stopping:
                raise
            self.view.message(f"the evaluation after {version} steps failed: {error}")
            return
        if self.stopping:
            return  # the interruption cut its answers short
        seconds = time.perf_counter() - started
        self.directory.evals.write({"step": version, "policy_version": version, "seconds": seconds, **result})
        self.view.message(f"held-out mean reward after {version} steps: {result['mean']:.3f}")

    # Snapshots

    async def _checkpoint(self) -> None:
        version = self.parts.trainer.policy_version
        if version == self.saved_version and not self.stopping:
            return  # when stopping, rollouts went on since
        await self._quiesce()
        self.view.phase("writing a checkpoint")
        self._record([], None)
        with self._timed("checkpoint"):
            name = write_snapshot(self.owners)
        self.directory.on_checkpoint()
        self.saved_version = version
        if version < self.config.train.num_steps and not self.stopping:
            self.view.message(f"checkpoint {name}; if this run ends early, continue with: {self._resume_command()}")

    def _restore(self) -> None:
        name = self.directory.checkpoint_to_resume()
        if name is None:
            self.directory.truncate(-1)
            self.view.message("the run ended before its first checkpoint: it begins again")
            return
        self.view.phase(f"restoring {name}")
        parts = self.parts
        load_snapshot(name, self.owners)
        version = self.saved_version = parts.trainer.policy_version
        if not self.recorded:
            parts.lifecycle.check_restored(version, parts.engine.max_tokens)
            self._publish()
            parts.driver.after_publish(version)
        self.directory.truncate(version, parts.lifecycle.cache.groups.keys(), self.chronicle.trace_bytes)
        row = self.directory.metrics.rows()[-1] if version else {}
        self.carried = {k: row[k] for k in self._owners_counters() if k in row and is_counter(k)}
        self._since_last("generated", parts.lifecycle.ledger.generated_tokens)
        self._since_last("dropped", row.get("tokens/dropped", 0))
        held = sum(len(g.rollouts) for g in parts.lifecycle.cache.groups.values())
        self.view.message(f"resumed from {name}: {held} rollouts in the cache go on where they were")

    def _resume_command(self) -> str:
        return self.directory.resume_command(self.command)

    def _summary(self) -> RunSummary:
        config, directory = self.config, self.directory
        paths = {"run": str(directory.path)}
        if config.checkpoint.save_final_model:
            paths["model"] = str(directory.model)
        errors = self.parts.observed.commonest_error()
        return run_summary(config.run.name, directory.metrics.rows(), directory.evals.rows(), paths, errors)

    def _on_event(self, event: Event) -> None:
        self.chronicle.on_event(event)
        if event.reason is DropReason.FILTERED:
            self.parts.reuse.on_filtered(event.group)
        if event.kind is EventKind.DROP and event.reason is not None and self.config.track.rollouts:
            self.dropped.append((event.group, event.reason))

    def _generating(self) -> str:
        return f"generating: {self.parts.driver.watchdog.describe(time.monotonic())}"

    # Signals and clocks

    def _listen_for_signals(self) -> None:
        """First Ctrl-C (or SIGTERM): park and checkpoint. Second: stop at once."""
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: object) -> None:
            if self.stopping:
                raise KeyboardInterrupt
            self.stopping = True
            self.view.message("stopping: parking rollouts and writing a checkpoint (again: stop at once)")
            loop.call_soon_threadsafe(self.parts.driver.request_stop)

        signal.signal(signal.SIGINT, handle)
        signal.signal(signal.SIGTERM, handle)

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

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with self.chronicle.span(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _since_last(self, name: str, cumulative: float) -> float:
        """Growth of a cumulative number since the last row."""
        before = self.counted.get(name, 0.0)
        self.counted[name] = cumulative
        return cumulative - before

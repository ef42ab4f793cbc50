"""The one loop: take READY groups -> build Batch -> step -> publish weights -> release slots.

    driver.collect ──groups──▶ build_batch ──▶ trainer.train_step ──▶ engine.load_weights(trainer.publish())
          ▲                                                                      │
          └── driver.after_publish (stale drops) ◀── version + 1 ────────────────┘
                         │
              record, metrics row, checkpoint

Sync and partial training are settings of the scheduler, not other loops. Owns the run directory and the clock. Between
two generation phases nothing runs, so a checkpoint there is a consistent cut.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollover.checkpoint.snapshot import Owners, load_snapshot, write_snapshot
from rollover.checkpoint.store import CheckpointStore
from rollover.config.load import Resolved
from rollover.rollout.driver import Event, EventKind
from rollover.rollout.staleness import staleness_bound
from rollover.track.live import LiveView
from rollover.track.metrics import validate
from rollover.track.recorder import RecordedGroup, RolloutRecorder
from rollover.track.sinks import JsonlSink, atomic_write_text
from rollover.track.summary import RunSummary, SampleAnswer, print_summary
from rollover.train.batch import Batch, build_batch
from rollover.train.evaluate import encode_tasks, evaluate
from rollover.train.profile import profiled
from rollover.train.replay import ReplayedRollouts
from rollover.train.report import (
    peak_rss_bytes,
    reward_metrics,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
)
from rollover.train.setup import Parts, held_out_tasks, probe_rewards, run_dir
from rollover.types import DropReason, Group

INTERRUPTED = 130


def run_training(resolved: Resolved, resume: bool, command: list[str] | None = None) -> int:
    """`rollover train`: exit code. `command` is what the user typed after `train`, for the resume command."""
    run = Run(resolved, resume, command or [])
    return asyncio.run(run.main())


class Run:
    """One run of the loop, in its directory."""

    def __init__(self, resolved: Resolved, resume: bool, command: list[str]) -> None:
        self.config = resolved.config
        self.resume = resume
        self.dir = run_dir(self.config)
        self.command = command
        self._check_directory()
        self.dir.mkdir(parents=True, exist_ok=True)
        self.metrics = JsonlSink(self.dir / "metrics.jsonl", check=validate)
        self.evals = JsonlSink(self.dir / "eval.jsonl")
        self.recorder = RolloutRecorder(self.dir / "rollouts")
        self.store = CheckpointStore(
            self.config.checkpoint.dir or str(self.dir / "checkpoints"), self.config.checkpoint.keep
        )
        self.stopping = False
        self.seconds: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.counted: dict[str, float] = {}
        self.partial_rollouts = [0, 0]
        self.dropped: list[tuple[Group, DropReason]] = []
        self.last_row: dict[str, float] = {}
        self.row_started = time.perf_counter()

    def _check_directory(self) -> None:
        existing = (self.dir / "metrics.jsonl").exists() and (self.dir / "metrics.jsonl").stat().st_size > 0
        if existing and not self.resume:
            raise ValueError(f"run.dir = {str(self.dir)!r} holds a run already: add --resume, or give another run.dir")
        if self.resume and not self.config.run.dir:
            raise ValueError("--resume needs run.dir: add --run.dir <directory of the run>")

    async def main(self) -> int:
        """Set up, (resume,) evaluate, train, evaluate, summarise. Returns the exit code."""
        with LiveView(self.config.track.live, self.config.train.num_steps, title=self.config.run.name) as self.view:
            self.view.phase("loading the model")
            self.parts = Parts.build(self.config)
            self.replay = ReplayedRollouts.of(self.config)
            parts = self.parts
            parts.driver.on_event = self._on_event
            self.owners = Owners(
                parts.trainer, parts.cache, parts.scheduler, parts.ledger, parts.prompts,
                self.metrics, self.evals, self.recorder,
            )  # fmt: skip
            try:
                code = await self._main()
            finally:
                await parts.close()
        if code == 0:
            print_summary(self._summary())
        return code

    async def _main(self) -> int:
        atomic_write_text(self.dir / "config.resolved.json", self.config.model_dump_json(indent=2) + "\n")
        if self.resume:
            self._restore()
        if self.replay is None:
            self.view.phase("checking the reward functions")
            await probe_rewards(self.config, self.parts.rewarder)
        self._listen_for_signals()
        await self._evaluate_if(not self._eval_rows())
        trainer, config = self.parts.trainer, self.config
        self.row_started = time.perf_counter()
        self.seconds.clear()  # the evaluation before the first step belongs to no row
        while trainer.policy_version < config.train.num_steps and not self.stopping:
            if not await self._step():
                break
            step = trainer.policy_version
            if config.eval.every_steps and step % config.eval.every_steps == 0 and step < config.train.num_steps:
                await self._evaluate_if(True)
            if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
                self._checkpoint()
        if self.stopping:
            self._checkpoint()
            self.view.message(f"stopped after step {trainer.policy_version}; continue with:\n  {self.resume_command()}")
            return INTERRUPTED
        await self._evaluate_if(trainer.policy_version > 0)
        self._finish()
        return 0

    async def _step(self) -> bool:
        """One training step. False when there is nothing (more) to train on."""
        parts, trainer = self.parts, self.parts.trainer
        version = trainer.policy_version
        self.view.phase("generating")
        groups = self.replay.next() if self.replay is not None else await parts.driver.collect(version)
        if not groups:
            if groups is not None:
                self.view.message(f"the tasks are used up after {version} of {self.config.train.num_steps} steps")
            return False
        self.view.phase("training")
        with self._timed("train"), profiled(self.config, version + 1, self.dir):
            batch = build_batch(groups, self.config.algorithm)
            trained = trainer.train_step(batch)
        num_bytes = 0
        if self.replay is None:
            with self._timed("weights"):
                num_bytes = parts.engine.load_weights(trainer.policy_version, trainer.publish()).num_bytes
            parts.driver.after_publish(trainer.policy_version)
        row = self._row(groups, batch, trained, version, num_bytes)
        if self.config.track.rollouts and self.replay is None:
            self._record(groups, batch)
        self.metrics.write(row)
        self.view.update(row)
        return True

    def _row(
        self, groups: list[Group], batch: Batch, trained: dict[str, float], version: int, num_bytes: int
    ) -> dict[str, float]:
        parts = self.parts
        ledger = parts.ledger.metrics(parts.cache)
        parts.ledger.check(parts.cache)
        generate, score = (
            self._since_last("generate", parts.driver.generation_s),
            self._since_last("score", parts.driver.scoring_s),
        )
        now = time.perf_counter()
        step_s, self.row_started = now - self.row_started, now
        times = {f"time/{k}_s": self.seconds.pop(k, 0.0) for k in ("train", "weights", "checkpoint", "eval")}
        times |= {"time/generate_s": generate, "time/score_s": score}
        row: dict[str, float] = {
            "step": parts.trainer.policy_version,
            "policy_version": parts.trainer.policy_version,
            "time": time.time(),
            **reward_metrics(groups),
            **rollout_metrics(groups),
            **staleness_metrics(batch, version),
            "staleness/bound": staleness_bound(self.config.rollout),
            **trained,
            **ledger,
            "tokens/step_generated": self._since_last("generated", ledger["tokens/generated"]),
            "tokens/step_trained": float(batch.num_loss_tokens),
            "tasks/skipped_long_prompt": parts.prompts.num_skipped,
            **parts.rewarder.stats(),
            **parts.engine.stats(),
            **times,
            "time/other_s": max(0.0, step_s - sum(times.values())),
            "time/step_s": step_s,
            "weights/bytes": num_bytes,
            "memory/peak_rss_bytes": peak_rss_bytes(),
        }
        rollouts = [r for g in groups for r in g.rollouts]
        self.partial_rollouts[0] += sum(len(r.versions) >= 2 for r in rollouts)
        self.partial_rollouts[1] += len(rollouts)
        self.last_row = row | speed_metrics(row)
        return self.last_row

    def _record(self, groups: list[Group], batch: Batch) -> None:
        advantages = {s.rollout_id: float(s.advantages[0]) for s in batch.samples}
        records = [self._recorded(g, advantages, None) for g in groups]
        records += [self._recorded(group, {}, reason) for group, reason in self.dropped]
        self.dropped.clear()
        self.recorder.write(self.parts.trainer.policy_version, records)

    def _recorded(self, group: Group, advantages: dict[str, float], reason: DropReason | None) -> RecordedGroup:
        decode = self.parts.loaded.tokenizer.decode
        texts = [decode(r.token_ids(), skip_special_tokens=True) for r in group.rollouts]
        return RecordedGroup(group, texts, [advantages.get(r.rollout_id) for r in group.rollouts], reason)

    async def _evaluate_if(self, wanted: bool) -> None:
        """Evaluate on the held-out tasks and append the result to eval.jsonl."""
        config, parts = self.config, self.parts
        if not wanted or self.stopping or config.eval.num_tasks == 0 or self.replay is not None:
            return
        self.view.phase("evaluating")
        with self._timed("eval"):
            if not hasattr(self, "held_out"):
                self.held_out = encode_tasks(held_out_tasks(config), parts.loaded.tokenizer, config)
            result = await evaluate(
                self.held_out, parts.engine, parts.rewarder, parts.loaded.tokenizer, config, parts.stop_token_ids
            )
        if self.stopping:
            return  # the interruption cut its answers short
        version = parts.trainer.policy_version
        self.evals.write({"step": version, "policy_version": version, **result})
        self.view.message(f"held-out mean reward after {version} steps: {result['mean']:.3f}")

    def _eval_rows(self) -> list[dict[str, Any]]:
        path = self.dir / "eval.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    # Snapshots

    def _checkpoint(self) -> None:
        self.view.phase("writing a checkpoint")
        with self._timed("checkpoint"):
            name = write_snapshot(self.store, self.owners)
        if self.parts.trainer.policy_version < self.config.train.num_steps and not self.stopping:
            self.view.message(f"checkpoint {name}; if this run ends early, continue with: {self.resume_command()}")

    def _restore(self) -> None:
        names = self.store.list()
        wanted = self.config.checkpoint.resume_from
        if not names:
            raise ValueError(
                f"--resume: no checkpoint in {self.config.checkpoint.dir or self.dir / 'checkpoints'}:"
                " delete the directory of the run, or give another run.dir, and start without --resume"
            )
        if wanted and wanted not in names:
            raise ValueError(f"checkpoint.resume_from = {wanted!r}: there is {', '.join(names)}")
        name = wanted or names[-1]
        self.view.phase(f"restoring {name}")
        load_snapshot(self.store, name, self.owners)
        self.parts.engine.load_weights(self.parts.trainer.policy_version, self.parts.trainer.publish())
        self._since_last("generated", self.parts.ledger.metrics(self.parts.cache)["tokens/generated"])
        held = sum(len(g.rollouts) for g in self.parts.cache.groups.values())
        self.view.message(f"resumed from {name}: {held} rollouts in the cache go on where they were")

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        words = [w for w in self.command if w != "--resume"]
        if "--run.dir" not in words and not any(w.startswith("--run.dir=") for w in words):
            words += ["--run.dir", str(self.dir)]
        return " ".join(["rollover", "train", *(w if " " not in w else repr(w) for w in words), "--resume"])

    # The end

    def _finish(self) -> None:
        self._checkpoint()
        if self.config.checkpoint.save_final_model:
            self.view.phase("saving the model")
            self.parts.trainer.save_model(self.dir / "model")

    def _summary(self) -> RunSummary:
        paths = {"run": str(self.dir)}
        if self.config.checkpoint.save_final_model:
            paths["model"] = str(self.dir / "model")
        evals = self._eval_rows()
        before, after = (evals[0], evals[-1]) if len(evals) >= 2 else (None, None)
        samples = []
        if before is not None and after is not None:
            for b, a in zip(before["samples"], after["samples"], strict=True):
                samples.append(SampleAnswer(b["prompt"], b["completion"], a["completion"], b["score"], a["score"]))
        partial, trained = self.partial_rollouts
        return RunSummary(
            title=self.config.run.name,
            steps=self.parts.trainer.policy_version,
            eval_before=before,
            eval_after=after,
            samples=samples,
            last_row=self.last_row,
            partial_share=partial / trained if trained else None,
            time_s=self.totals | {k: self.counted.get(k, 0.0) for k in ("generate", "score")},
            paths=paths,
        )

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.DROP and event.reason is not None:
            self.dropped.append((event.group, event.reason))

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
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.totals[name] = self.totals.get(name, 0.0) + spent

    def _since_last(self, name: str, cumulative: float) -> float:
        """Growth of a cumulative number since the last row."""
        before = self.counted.get(name, 0.0)
        self.counted[name] = cumulative
        return cumulative - before

"""The evaluations of a run: its held-out tasks, the same ones every time, and the rows of eval.jsonl.

Owns the encoded tasks, and that there is one evaluation a policy version. When one is due is decided by the loop.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from rollover.run.best import best_of, check_metric, why_enough
from rollover.run.context import RunContext
from rollover.run.evaluate import EvalTasks, answers_of, check_roles, held_out_tasks, summarised
from rollover.run.model_card import write_model_card
from rollover.run.overlap import Overlap
from rollover.run.weight_sync import WeightSync
from rollover.track.answers import write_answers

logger = logging.getLogger(__name__)


class Evaluator:
    """Evaluates with the run's engine. `is_possible`: whether that has the trainer's weights; of recorded rollouts it
    does not."""

    def __init__(self, context: RunContext, overlap: Overlap, weight_sync: WeightSync, *, is_possible: bool) -> None:
        self.config, self.parts, self.directory = context.config, context.parts, context.directory
        self.hooks, self.stop, self.trackers = context.hooks, context.stop, context.directory.trackers
        self.overlap, self.weight_sync, self.is_possible = overlap, weight_sync, is_possible
        self._tasks: EvalTasks | None = None

    async def evaluate(self) -> dict[str, Any] | None:
        """Evaluate the present weights, once: their row of eval.jsonl; None where a stop cut the evaluation off.

        ValueError where nothing is held out, no task can be evaluated, or every reward fails.
        """
        if not self._is_wanted:
            raise ValueError("nothing is held out: set eval.num_tasks (it has no effect on recorded rollouts)")
        if (row := self.newest()) is not None:
            return row
        return await self._told(await self._evaluate())

    async def evaluate_if_wanted(self) -> None:
        """Evaluate if anything is held out and the run is not being stopped, once per policy version.

        A failure ends the run only before the first step: later it must not cost what was trained.
        """
        if self.stop.requested or not self._is_wanted or self.newest():
            return
        version = self.parts.trainer.policy_version
        await self.overlap.interrupt_all()  # what fails there is no evaluation
        try:
            row = await self._evaluate()
        except ValueError as error:
            if version == 0 and not self.stop.requested:
                raise
            logger.warning(f"the evaluation after {version} steps failed: {error}")
        else:
            await self._told(row)

    def check_tasks(self) -> None:
        """Report the tasks that are left out. ValueError as for an evaluation before the first step."""
        if self._is_wanted:
            self._held_out()

    @property
    def best_step(self) -> int | None:
        """After which step the best evaluation was made; None before the first."""
        best = best_of(self.directory.evals.rows(), self.config.eval.metric)
        return None if best is None else best["step"]

    @property
    def why_enough(self) -> str:
        """Why training ends by eval.patience; "" where it goes on."""
        return why_enough(self.directory.evals.rows(), self.config.eval) if self.is_possible else ""

    def newest(self) -> dict[str, Any] | None:
        """The evaluation of the present policy version; None if it has none."""
        rows = self.directory.evals.rows()
        return rows[-1] if rows and rows[-1]["step"] == self.parts.trainer.policy_version else None

    def save_best_model(self) -> None:
        """Write the model of the present weights, if their evaluation is the best one (checkpoint.save_best_model), and
        that was not done. The weights before the first step are the model that the run began with."""
        version, files = self.parts.trainer.policy_version, self.directory.of_evaluations
        if not self.config.checkpoint.save_best_model or not version or self.best_step != version:
            return
        if files.best_model_step != version:
            self.trackers.on_phase("saving the best model")
            files.forget_best_model()
            self.parts.trainer.backend.save_model(files.best_model)
            write_model_card(files.best_model, self.config, version, self.newest())
            files.on_best_model(version)

    def _held_out(self) -> EvalTasks:
        if self._tasks is None:
            parts = self.parts
            self._tasks = held_out_tasks(self.config, parts.prompts.encode, parts.engine.max_tokens)
        return self._tasks

    @property
    def _is_wanted(self) -> bool:
        return self.is_possible and self.config.eval.num_tasks > 0

    def _check_metric(self, result: dict[str, Any], version: int) -> None:
        """Before the first step a metric that is not there ends the run; later it must not cost what was trained."""
        try:
            check_metric(result, self.config.eval.metric)
        except ValueError as error:
            if not version:
                raise
            logger.warning(f"{error}. Until then no evaluation is the best one")

    @property
    def _looks_at_metric(self) -> bool:
        config = self.config
        return bool(config.eval.patience or config.checkpoint.keep_best or config.checkpoint.save_best_model)

    async def _evaluate(self) -> dict[str, Any] | None:
        """The new row of eval.jsonl; None where a stop cut it off, which waits for no answer and no score."""
        await self.overlap.interrupt_all()
        self.trackers.on_phase("evaluating")
        with self.overlap.rows.timed("eval"), self.overlap.event_loop_watched(lambda: "evaluating"):
            await self.weight_sync.before_evaluation()
            return await self._evaluated()

    async def _told(self, row: dict[str, Any] | None) -> dict[str, Any] | None:
        """The row, after the user's hook has had a copy of it."""
        if row is not None:
            await self.hooks.call("on_evaluate", dict(row))
        return row

    async def _evaluated(self) -> dict[str, Any] | None:
        config, parts = self.config, self.parts
        version, started = parts.trainer.policy_version, time.perf_counter()
        tokenizer = parts.loaded.tokenizer
        held_out = self._held_out()
        found = await self.stop.unless_requested(
            answers_of(held_out, parts.engine, parts.environment, tokenizer, config, parts.stop_token_ids),
            config.watchdog.grace_s,
        )
        if found is None:
            return None
        if config.track.answers:
            write_answers(self.directory.of_evaluations.answers_of(version), found.answers)
        result = summarised(found, config)
        if not version:
            check_roles(found, config.workflow.roles)
        if self._looks_at_metric and not self.directory.evals.rows():
            self._check_metric(result, version)
        seconds = time.perf_counter() - started
        self.trackers.on_eval({"step": version, "policy_version": version, "seconds": seconds, **result})
        logger.info(f"held-out mean reward after {version} steps: {result['mean']:.3f}")
        return self.newest()

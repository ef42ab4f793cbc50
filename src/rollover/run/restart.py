"""A run that outlives its trainer's backend: where that is lost, it goes on from its newest checkpoint and journal.

    Run ──BackendLost──▶ park (the journal has the tokens) ──▶ close what was the backend's ──▶ Run anew ──▶ Resume
                              engine, reward workers, lock, trackers, hooks and signals stay ──┘

It does what a kill and `--resume` do, in one process: there is no second way back (resume.py). Owns the present `Run`,
and what is kept from one to the next. Never trains, and never decides what is lost.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rollover.checkpoint.journal import Journal
from rollover.config import Config
from rollover.config.backend import is_tinker
from rollover.models.devices import decide_dtype
from rollover.run.directory import RunDirectory
from rollover.run.hooks import Hooks
from rollover.run.loop import OptionChanges, Run, Step
from rollover.run.setup import Kept, Parts, RestartBudget, RunContext
from rollover.run.stop import Stop
from rollover.track.summary import RunSummary
from rollover.track.trace import Trace
from rollover.track.tracker import Cut, RunInfo
from rollover.trainer.backend import BackendLost

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@asynccontextmanager
async def running(
    config: Config, directory: RunDirectory, stop: Stop, resume_command: str
) -> AsyncIterator[RestartableRun]:
    """Set up a run in its directory and (--resume) go on with it before the block, and close all of it after the block.

    An error in the block is followed by a checkpoint of what there is, and so is the end of a block that took not all
    steps. `resume_command`: what to type to go on with it.
    """
    decided = "" if is_tinker(config) else decide_dtype(config, directory.decided_dtype)
    info = RunInfo(config.run.name, directory.path, config.model_dump(mode="json"), resumed=directory.resume)
    with directory.trackers as trackers:
        trackers.on_start(info)
        if decided:
            logger.info(decided)
        hooks = Hooks(config, stop)
        run = RestartableRun(config, directory, hooks, stop, resume_command)
        try:
            await run.begin()
            async with hooks.training(info):
                try:
                    yield run
                    await run.end()
                except Exception as error:
                    await run.rescue(error)
                    raise
            trackers.the(Trace).flush()
        finally:
            await run.close()


class RestartableRun:
    """A run in its directory, over losses of its backend: `begin`, then what is wanted of it, then `close`.

    Everything but `begin`, `rescue` and `close` goes on where the backend is lost; BackendLost after
    cluster.max_restarts losses without a step in between. A run that is being stopped then ends instead.
    """

    def __init__(self, config: Config, directory: RunDirectory, hooks: Hooks, stop: Stop, resume_command: str) -> None:
        self.config, self.directory, self.hooks, self.stop = config, directory, hooks, stop
        self.trackers, self.resume_command = directory.trackers, resume_command
        self.changes, self.restart_budget = OptionChanges(config), RestartBudget(config.cluster.max_restarts)
        self._kept: Kept | None = None
        self._run: Run | None = None
        self._over = False  # the backend was lost, and there is no other run
        self._untold: Step | None = None  # trained again, after a loss before it was told
        self._version = 0  # as far as it is known

    @property
    def policy_version(self) -> int:
        """Training steps made by the trainer's present weights; of those that were lost, while there are none."""
        return self._version if self._run is None else self._run.parts.trainer.policy_version

    async def begin(self) -> None:
        """Go on where an earlier process ended, or begin."""
        await self._lasting(lambda run: asyncio.sleep(0))

    def begin_steps(self) -> None:
        """Begin timing steps: the time since the last one belongs to no metrics row."""
        if self._run is not None:
            self._run.rows.begin()

    async def next_step(self) -> Step | None:
        """See Run.next_step. After a loss of the backend steps come again whose weights are lost, with their numbers,
        unless they were trained again on the same groups (checkpoint.lost_steps)."""

        async def next_of(run: Run) -> Step | None:
            step, self._untold = self._untold, None
            return step or await run.next_step()

        if (step := await self._lasting(next_of)) is not None:
            self.restart_budget.on_step(step.number)
        return step

    async def checkpoint(self) -> None:
        """Write a checkpoint, if anything happened since the last."""
        await self._lasting(lambda run: run.checkpointing.checkpoint())

    async def evaluate(self) -> dict[str, Any] | None:
        """See Evaluator.evaluate."""
        return await self._lasting(lambda run: run.evaluate())

    async def end(self) -> None:
        """No more is wanted of it: a checkpoint, unless all steps were made or a stop was requested."""
        if self._run is not None and not self._run.ended:
            await self.checkpoint()

    async def rescue(self, error: Exception) -> None:
        """See Checkpointing.rescue. Without a backend there is nothing to add to what is on the disk."""
        if self._run is not None:
            await self._run.checkpointing.rescue(error)

    def summary(self) -> RunSummary:
        """Of a run that has come to its end."""
        assert self._run is not None
        return self._run.summary()

    async def close(self) -> None:
        """End everything."""
        if self._run is not None:
            await self._run.close()
        elif self._kept is not None:
            await self._kept.close()

    # Private

    async def _lasting(self, work: Callable[[Run], Awaitable[Result]]) -> Result | None:
        """What `work` gives, with another run each time the backend is lost. None where a stop is requested meanwhile.
        BackendLost after too many losses."""
        while not self._over:
            try:
                if self._run is None:
                    await self._build()
                assert self._run is not None
                found = await work(self._run)
                self._version = self._run.parts.trainer.policy_version
                return found
            except BackendLost as error:
                why = str(error)  # and not the error: it holds what was the backend's
            await self._on_loss(why)
        return None

    async def _on_loss(self, why: str) -> None:
        """Close what was the backend's. BackendLost where that is the last loss that is borne."""
        budget = self.restart_budget
        budget.on_loss()
        logger.warning(f"the trainer's backend is lost: {why}")
        await self._part()
        self._over = self.stop.requested or budget.too_many
        if self.stop.requested:
            logger.warning(
                f"stopped without a checkpoint, as there is no backend; continue with:\n  {self.resume_command}"
            )
            return
        if budget.too_many:
            raise BackendLost(
                f"the trainer's backend was lost {budget.in_a_row} times without a step in between"
                f" (cluster.max_restarts = {budget.most}), the last time: {why}. Mend that, and continue with:"
                f"\n  {self.resume_command}"
            )
        logger.info(
            f"restart {budget.in_a_row} of {budget.most} without a step in between: the run goes on from"
            " what is on the disk, with the same engine and reward workers"
        )

    async def _part(self) -> None:
        """Park what runs, and close the run that has lost its backend."""
        run, self._run = self._run, None
        if run is None:
            return
        driver = run.parts.driver
        try:
            await driver.interrupt_all()  # scores are waited for: a worker whose call is given up is started again
        except Exception:  # the engine is gone, say: what it had not returned is lost
            await driver.abandon()
        # What is kept of them in the engine may be of weights that are lost.
        held = run.parts.lifecycle.cache.groups.values()
        run.parts.engine.release([rollout.rollout_id for group in held for rollout in group.rollouts])
        await run.close(keep=True)
        self.directory.on_restart()

    async def _build(self) -> None:
        """A run that has begun, or gone on."""
        trace = self.trackers.the(Trace)
        if self._kept is not None:
            # What was the backend's may be as large as what comes now: a timer that was cancelled ends, and then nobody
            # has it but itself.
            await asyncio.sleep(0)
            gc.collect()
            trace.resume_at(0)
            trace.clock.set(0.0, 0)
        if not self.directory.resume:
            self.directory.truncate(Cut(-1))  # an evaluation may have been written before the first step
        self.trackers.on_phase("loading the model")
        logs = self.directory.logs
        # What is ended without its tokens is in the journal with those that it had: that is not taken back.
        journal = Journal(self.directory.journal)
        parts = await Parts.build(self.config, trace, logs, self._kept, journal.halt)
        self._kept = parts.kept
        try:
            context = RunContext(
                self.config,
                parts,
                self.directory,
                self.hooks,
                self.stop,
                self.restart_budget,
                journal,
                self.resume_command,
            )
            run = Run(context, self.changes)
        except BaseException:
            await parts.close(keep=True)
            raise
        try:
            newest = await run.begin()
        except BaseException:
            await run.close(keep=True)
            self.directory.on_restart()
            raise
        self._run, self._version = run, parts.trainer.policy_version
        self._untold = newest if newest is not None and newest.number > self.restart_budget.furthest else None

"""A training run, step by step, in its directory: what `rollover train`, `rollover.train` and a caller's own loop use.

    async with Session(...) as session:
        async for step in session.steps():
            ...

    Session ──▶ Run (run/loop.py) ──BackendLost──▶ park, close the run, keep engine and reward workers ──▶ another Run

Owns the run's directory, the objects that its configuration names, the present `Run`, and restarts after a lost trainer
backend. A restart does what a kill and `--resume` do, in one process: run/resume.py restores both.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rollover.api.settings import Arguments, Layer, Settings
from rollover.checkpoint.journal import Journal
from rollover.config import Config
from rollover.config.backend import is_tinker
from rollover.config.cluster import check_can_train
from rollover.config.load import Resolved
from rollover.files import paths_begin_in, start_folder
from rollover.images import media_kept_in
from rollover.logs import terminal
from rollover.models.devices import decide_dtype
from rollover.run.directory import RunDirectory
from rollover.run.hooks import Hooks
from rollover.run.loop import OptionChanges, Run, Step
from rollover.run.setup import Components, KeptComponents, RestartBudget, RunContext
from rollover.run.stop import Stop, signals_to, take_signals
from rollover.shutdown import run_bounded
from rollover.track.health import reason_nothing_trained
from rollover.track.jsonl import read_rows
from rollover.track.summary import RunSummary, print_summary
from rollover.track.trace import Trace
from rollover.track.tracker import Cut, RunInfo
from rollover.trainer.backend import BackendLost

logger = logging.getLogger(__name__)

INTERRUPTED = 130
_SIGNAL_S = 0.5
Result = TypeVar("Result")


class Session:
    """A training run, step by step. Use it as an async context manager; the arguments are those of `rollover.train`.

    In the block the model is loaded and the run's directory is locked. Where the block ends with an error, or before
    all steps are made, a checkpoint is written; `rollover.train(resume=session.directory)` or another Session goes on.
    The first Ctrl-C ends `steps` early; the second interrupts.
    """

    def __init__(
        self,
        *,
        model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        tasks: Any = None,
        reward: Any = None,
        eval_tasks: Any = None,
        config: Layer | Sequence[Layer] | None = None,
        resume: str | os.PathLike[str] | None = None,
        trust: bool = False,
        **overrides: Any,
    ) -> None:
        arguments = Arguments(model, tasks, reward, eval_tasks, config, resume, overrides, trust=trust)
        self._begin(arguments.settle(), resume is not None)

    @classmethod
    def of(cls, settings: Settings, resume: bool, command: list[str] | None = None) -> Session:
        """Make a session from settings. `command`: words after `rollover train`; None: called by a program."""
        session = cls.__new__(cls)
        session._begin(settings, resume, command)
        return session

    def _begin(self, settings: Settings, resume: bool, command: list[str] | None = None) -> None:
        self._settings = settings
        self._stack, self._stop = AsyncExitStack(), Stop()
        self._is_new = True  # not entered and not closed yet
        self._folder = os.getcwd() if command is None else start_folder()
        self._turn = asyncio.Lock()  # one step, checkpoint or evaluation at a time, over all tasks
        try:
            check_can_train(settings.config)
            with paths_begin_in(self._folder):
                self._directory = RunDirectory(settings.config, resume, command)
        except BaseException:
            settings.release()
            raise
        config = settings.config
        self._is_open = False  # inside the block
        self._changes, self._restart_budget = OptionChanges(config), RestartBudget(config.cluster.max_restarts)
        self._run: Run | None = None  # None before the first one, and after a loss of the backend
        self._kept: KeptComponents | None = None
        self._has_failed = False  # the backend was lost, and the run does not restart
        self._retrained: Step | None = None  # trained again after a loss, and not yielded yet
        self._version = 0  # the trainer's, as of the last call
        self._restores_signals = command is None  # the command line's process ends with its run

    async def __aenter__(self) -> Session:
        if not self._is_new:
            raise RuntimeError(
                "a session is entered once, and this one was entered or closed: make another. Session(resume=directory)"
                " goes on with its run"
            )
        self._is_new = False
        try:
            self._stack.callback(self.close)
            self._stack.enter_context(paths_begin_in(self._folder))
            self._stack.enter_context(media_kept_in(self.directory / "media"))
            signals = self._stack.enter_context(ExitStack())  # restored after the run's last checkpoint
            await self._stack.enter_async_context(self._running())
            self._is_open = True
            if self._restores_signals:
                signals.enter_context(signals_to(self._stop.on_signal))
            else:
                take_signals(self._stop.on_signal)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            async with self._turn:  # wait for a step of another task
                self._is_open = False
        finally:
            await self._stack.__aexit__(kind, error, traceback)

    def close(self) -> None:
        """Release the directory and the live objects. The end of the block calls it."""
        self._is_new = False
        self._directory.close()
        self._settings.release()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Make the remaining steps, and yield each; evaluations and checkpoints of the configuration are in between.

        After the last step come the last evaluation and the saved model. Another call continues a loop that was left.
        Calls of other tasks wait for the end of the step. After a loss of the trainer's backend the run resumes from
        its checkpoint and journal, within this call. Step numbers are repeated for lost steps, with
        checkpoint.lost_steps = "roll_back" or without a journal. BackendLost (trainer/backend.py) after
        cluster.max_restarts losses without a step in between.
        """
        async with self._turn:
            self._check_open()
            if self._run is not None:
                self._run.step_log.begin()  # the time since the last step belongs to no metrics row
        while (step := await self._next_step()) is not None:
            yield step

    async def checkpoint(self) -> None:
        """Write a checkpoint now, if anything happened since the last one."""
        async with self._turn:
            self._check_open()
            await self._checkpoint()

    async def evaluate(self) -> dict[str, Any] | None:
        """Evaluate the current weights on the held-out tasks: the row of eval.jsonl; None after a stop.

        ValueError where nothing is held out (eval.num_tasks), or every reward fails.
        """
        async with self._turn:
            self._check_open()
            return await self._with_restarts(lambda run: run.evaluate())

    def set(self, key: str, value: Any) -> None:
        """Change an option from the next step on. ConfigError for an invalid value, or an option that cannot change
        during a run: the message says how it can."""
        self._check_open()
        self._changes.request(key, value)

    def stop(self) -> None:
        """Request a stop, like the first Ctrl-C, from any thread. `steps` ends after uninterruptible work."""
        self._stop.request()

    def on_signal(self, number: int, frame: object) -> None:
        """Handle a signal: for signal.signal, where the session runs in another thread than the main one."""
        self._stop.on_signal(number, frame)

    @property
    def config(self) -> Config:
        """The current configuration."""
        return self._settings.config

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._directory.path

    @property
    def policy_version(self) -> int:
        """Number of training steps of the current weights."""
        self._check_open()
        return self._version if self._run is None else self._run.components.trainer.policy_version

    @property
    def interrupted(self) -> bool:
        """Whether a stop was requested."""
        return self._stop.requested

    # Private

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("the session is not open: use it inside `async with rollover.Session(...) as session:`")

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Begin or resume the run before the block, and close it after the block.

        An error in the block, and a block that ends before all steps are made, are followed by a checkpoint.
        """
        config, directory = self.config, self._directory
        decided = "" if is_tinker(config) else decide_dtype(config, directory.decided_dtype)
        info = RunInfo(config.run.name, directory.path, config.model_dump(mode="json"), resumed=directory.resume)
        with directory.trackers as trackers:
            trackers.on_start(info)
            if decided:
                logger.info(decided)
            hooks = self._hooks = Hooks(config, self._stop)
            try:
                await self._with_restarts(lambda run: asyncio.sleep(0))
                async with hooks.training(info):
                    try:
                        yield
                        if self._run is not None and not self._run.ended:
                            await self._checkpoint()
                    except Exception as error:
                        if self._run is not None:
                            await self._run.checkpointing.rescue(error)
                        raise
                trackers.of_type(Trace).flush()
            finally:
                run, kept, self._run, self._kept = self._run, self._kept, None, None  # frees model and engine
                if run is not None:
                    await run.close()
                elif kept is not None:
                    await kept.close()

    async def _next_step(self) -> Step | None:
        """Return Run.next_step, or first the step that was trained again after a loss of the backend."""

        async def next_of(run: Run) -> Step | None:
            step, self._retrained = self._retrained, None
            return step or await run.next_step()

        async with self._turn:
            self._check_open()
            if (step := await self._with_restarts(next_of)) is not None:
                self._restart_budget.on_step(step.number)
            return step

    async def _checkpoint(self) -> None:
        await self._with_restarts(lambda run: run.checkpointing.checkpoint())

    def _summary(self) -> RunSummary:
        assert self._run is not None
        return self._run.summary()

    # Restarts

    async def _with_restarts(self, work: Callable[[Run], Awaitable[Result]]) -> Result | None:
        """Return the result of `work`, which is repeated with another Run each time the trainer's backend is lost.

        None where a stop was requested meanwhile. BackendLost after cluster.max_restarts losses without a step in
        between.
        """
        while not self._has_failed:
            try:
                if self._run is None:
                    self._run = await self._new_run()
                found = await work(self._run)
                self._version = self._run.components.trainer.policy_version
                return found
            except BackendLost as error:
                reason = str(error)  # the error itself would keep the lost backend's objects alive
            await self._on_loss(reason)
        return None

    async def _on_loss(self, reason: str) -> None:
        """Close the run that has lost its backend. BackendLost where the restart budget is used up."""
        budget = self._restart_budget
        budget.on_loss()
        logger.warning(f"the trainer's backend is lost: {reason}")
        await self._close_lost_run()
        self._has_failed = self._stop.requested or budget.is_exceeded
        if self._stop.requested:
            logger.warning(
                "stopped without a checkpoint, as there is no backend; continue with:"
                f"\n  {self._directory.resume_command}"
            )
            return
        if budget.is_exceeded:
            raise BackendLost(
                f"the trainer's backend was lost {budget.in_a_row} times without a step in between"
                f" (cluster.max_restarts = {budget.most}), the last time: {reason}. Fix that, and continue with:"
                f"\n  {self._directory.resume_command}"
            )
        logger.info(
            f"restart {budget.in_a_row} of {budget.most} without a step in between: the run continues from"
            " what is on the disk, with the same engine and reward workers"
        )

    async def _close_lost_run(self) -> None:
        """Park the rollouts in flight (the journal has their tokens), and close all but the kept components."""
        run, self._run = self._run, None
        if run is None:
            return
        driver = run.components.driver
        try:
            await driver.interrupt_all()  # waits for scores: a worker whose call is cancelled would be restarted
        except Exception:  # the engine may have failed, too: tokens that it has not returned are lost
            await driver.abandon()
        # The engine may hold KV of weights that are lost.
        held = run.components.lifecycle.cache.groups.values()
        run.components.engine.release([rollout.rollout_id for group in held for rollout in group.rollouts])
        await run.close(keep=True)
        self._directory.on_restart()

    async def _new_run(self) -> Run:
        """Build a Run that has begun, or resumed."""
        directory = self._directory
        trace = directory.trackers.of_type(Trace)
        if self._kept is not None:
            # The lost backend may be as large as the next one: let cancelled timers end, which are its last owners.
            await asyncio.sleep(0)
            gc.collect()
            trace.resume_at(0)
            trace.clock.set(0.0, 0)
        if not directory.resume:
            directory.truncate(Cut(-1))  # an evaluation may have been written before the first step
        directory.trackers.on_phase("loading the model")
        # Rollouts that are abandoned lose tokens that the journal has: `halt` keeps it from recording that.
        journal = Journal(directory.journal)
        components = await Components.build(self.config, trace, directory.logs, self._kept, journal.halt)
        self._kept = components.kept
        try:
            context = RunContext(
                self.config,
                components,
                directory,
                self._hooks,
                self._stop,
                self._restart_budget,
                journal,
            )
            run = Run(context, self._changes)
        except BaseException:
            await components.close(keep=True)
            raise
        try:
            newest = await run.begin()
        except BaseException:
            await run.close(keep=True)
            directory.on_restart()
            raise
        self._version = components.trainer.policy_version
        self._retrained = newest if newest is not None and newest.number > self._restart_budget.furthest else None
        return run


async def finish(session: Session) -> bool:
    """Make all remaining steps, and print a summary. Returns False if the run was stopped before its end."""
    directory = session._directory
    if directory.resume and (notice := directory.finished_notice()) is not None:
        terminal.info(notice)
        session.close()
        return True
    async with session:
        async for _ in session.steps():
            pass
        summary = None if session.interrupted else session._summary()
    if summary is not None:
        print_summary(summary)
    return not session.interrupted


def run_training(resolved: Resolved, resume: bool, command: list[str] | None = None) -> int:
    """Run `rollover train`. Returns the exit code; 2 where the run has ended without any trained step.

    `command`: the words after `train`, for the command that resumes; None: called by a program, whose signal handlers
    are restored.
    """
    session = Session.of(Settings(resolved), resume, command)
    if not run_bounded(finish(session), session.config.watchdog.grace_s):
        return INTERRUPTED
    if reason := reason_nothing_trained(session.config, read_rows(session.directory / "metrics.jsonl")):
        terminal.error(f"nothing was trained: {reason}")
        return 2
    return 0


# A whole run in one call

Trained = tuple[Path, dict[str, Any], Mapping[str, Any]]
"""(directory of the run, its live functions and tasks by name, its configuration)"""


def train_and_wait(arguments: Arguments) -> Trained:
    """Make all remaining steps. If an event loop is running, the run has its own thread."""
    try:
        asyncio.get_running_loop()
        in_thread = True
    except RuntimeError:
        in_thread = False
    session, live = _session(arguments)
    if in_thread:
        _finish_in_thread(session)
    else:
        run_bounded(finish(session), session.config.watchdog.grace_s)
    return session.directory, live, session.config.model_dump()


async def train_here(arguments: Arguments) -> Trained:
    """Make all remaining steps on the running event loop."""
    session, live = _session(arguments)
    await finish(session)
    return session.directory, live, session.config.model_dump()


def _session(arguments: Arguments) -> tuple[Session, dict[str, Any]]:
    settings = arguments.settle()
    live = dict(settings.live)  # the session releases its own at its end
    return Session.of(settings, arguments.resume is not None), live


def _finish_in_thread(session: Session) -> None:
    """Wait for the session, which gets the signals; a second Ctrl-C cancels it and raises KeyboardInterrupt here."""
    outcome: Future[None] = Future()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        await finish(session)

    def thread() -> None:
        try:
            run_bounded(body(), session.config.watchdog.grace_s)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    # In the caller's context: a notebook shows the output below its cell.
    threading.Thread(target=contextvars.copy_context().run, args=(thread,), name="rollover.train").start()
    with signals_to(session.on_signal):
        try:
            while not outcome.done():  # Python handles signals of other threads when this thread wakes
                wait([outcome], timeout=_SIGNAL_S)
        except KeyboardInterrupt:
            for loop, task in running:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(task.cancel)
            raise
    outcome.result()

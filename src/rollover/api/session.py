"""A training run as something to walk through: every step is handed to a loop of the caller's own.

    async with Session(...) as session:
        async for step in session.steps():
            ...

Owns the run's directory and the objects that its configuration names, from the first to the last moment. Never trains
by itself: that is run/loop.py, over losses of the backend run/restart.py. `rollover train` and `rollover.train` are
callers of it, which do nothing in between.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rollover.api.settings import Arguments, Layer, Settings
from rollover.config import Config
from rollover.config.cluster import check_can_train
from rollover.config.load import Resolved
from rollover.files import paths_begin_in, start_folder
from rollover.images import media_kept_in
from rollover.logs import terminal
from rollover.run.directory import RunDirectory
from rollover.run.loop import Step
from rollover.run.restart import RestartableRun, running
from rollover.run.stop import Stop, signals_to, take_signals
from rollover.shutdown import run_bounded
from rollover.track.health import reason_nothing_trained
from rollover.track.jsonl import read_rows
from rollover.track.summary import print_summary

INTERRUPTED = 130


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
        """A session of settled arguments. `command`: what was typed after `rollover train`; None: a program called."""
        session = cls.__new__(cls)
        session._begin(settings, resume, command)
        return session

    def _begin(self, settings: Settings, resume: bool, command: list[str] | None = None) -> None:
        self._settings = settings
        self._stack, self._stop = AsyncExitStack(), Stop()
        self._is_new = True  # neither entered nor closed so far
        self._folder = os.getcwd() if command is None else start_folder()
        self._turn = asyncio.Lock()  # a step, a checkpoint or an evaluation: one at a time, whichever task asks
        try:
            check_can_train(settings.config)
            with paths_begin_in(self._folder):
                self._directory = RunDirectory(settings.config, resume)
        except BaseException:
            settings.release()
            raise
        self._run: RestartableRun | None = None  # inside the block
        self._resume_command = self._directory.resume_command(command)
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
            signals = self._stack.enter_context(ExitStack())  # given back after the run's last checkpoint
            run = running(self.config, self._directory, self._stop, self._resume_command)
            self._run = await self._stack.enter_async_context(run)
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
            async with self._turn:  # wait for the end of a step that another task makes
                self._run = None
        finally:
            await self._stack.__aexit__(kind, error, traceback)

    def close(self) -> None:
        """Release the directory and the objects of a session that is not entered. The end of the block does it, too."""
        self._is_new = False
        self._directory.close()
        self._settings.release()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Make the steps that are left, one each time; evaluations and checkpoints of the configuration between them.

        At the end the last evaluation is made and the model is saved. A loop that was left goes on with the next call.
        What other tasks ask for meanwhile waits for the end of the step.
        Where the trainer's backend is lost, the run goes on from its checkpoint and journal within this call. Numbers
        come again of steps that were lost with it: with checkpoint.lost_steps = "roll_back", or without a journal.
        BackendLost (trainer/backend.py) after cluster.max_restarts losses without a step in between.
        """
        async with self._turn:
            self._open_run().begin_steps()
        while (step := await self._next_step()) is not None:
            yield step

    async def checkpoint(self) -> None:
        """Write a checkpoint now, if anything happened since the last."""
        async with self._turn:
            await self._open_run().checkpoint()

    async def evaluate(self) -> dict[str, Any] | None:
        """Evaluate the present weights on the held-out tasks: the row of eval.jsonl; None if the run is being stopped.

        ValueError where nothing is held out (eval.num_tasks), or every reward fails.
        """
        async with self._turn:
            return await self._open_run().evaluate()

    def set(self, key: str, value: Any) -> None:
        """Change an option from the next step on. ConfigError for one that cannot change while a run goes on, which
        says how it can be changed, and for a value that is wrong."""
        self._open_run().changes.ask_for(key, value)

    def stop(self) -> None:
        """As the first Ctrl-C, from any thread: `steps` ends after what cannot be interrupted."""
        self._stop.request()

    def on_signal(self, number: int, frame: object) -> None:
        """For signal.signal, where the session runs in another thread than the main one."""
        self._stop.on_signal(number, frame)

    @property
    def config(self) -> Config:
        """The configuration, as it is now."""
        return self._settings.config

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._directory.path

    @property
    def policy_version(self) -> int:
        """Training steps made by the trainer's present weights."""
        return self._open_run().policy_version

    @property
    def interrupted(self) -> bool:
        """Whether it was asked to stop."""
        return self._stop.requested

    async def _next_step(self) -> Step | None:
        async with self._turn:
            return await self._open_run().next_step()

    def _open_run(self) -> RestartableRun:
        if self._run is None:
            raise RuntimeError("the session is not open: use it inside `async with rollover.Session(...) as session:`")
        return self._run


async def finish(session: Session) -> bool:
    """Make all steps that are left, and print what came of it. False if the run was stopped before its end."""
    directory = session._directory
    if directory.resume and (finished := directory.why_finished()) is not None:
        terminal.info(finished)
        session.close()
        return True
    async with session:
        run = session._open_run()
        async for _ in session.steps():
            pass
        summary = None if session.interrupted else run.summary()
    if summary is not None:
        print_summary(summary)
    return not session.interrupted


def run_training(resolved: Resolved, resume: bool, command: list[str] | None = None) -> int:
    """`rollover train`: exit code; 2 where the run has ended and trained nothing in its whole life.

    `command` is what the user typed after `train`, for the command that resumes; None: a program called, which gets its
    handlers of signals back.
    """
    session = Session.of(Settings(resolved), resume, command)
    if not run_bounded(finish(session), session.config.watchdog.grace_s):
        return INTERRUPTED
    if reason := reason_nothing_trained(session.config, read_rows(session.directory / "metrics.jsonl")):
        terminal.error(f"nothing was trained: {reason}")
        return 2
    return 0

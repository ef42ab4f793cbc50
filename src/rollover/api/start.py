"""Makes a whole run in one call: in a script, in a cell of a notebook, or on an event loop.

Owns the thread and the event loop of the run.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from rollover.api.session import Session, finish
from rollover.api.settings import Arguments
from rollover.run.stop import signals_to
from rollover.shutdown import run_bounded

_SIGNAL_S = 0.5

Trained = tuple[Path, dict[str, Any], Mapping[str, Any]]
"""(directory of the run, its live functions and tasks by name, its configuration)"""


def train_and_wait(arguments: Arguments) -> Trained:
    """Make all remaining steps. If an event loop is running, the run has its own thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        finish_here = _finish_on_a_loop
    else:
        finish_here = _finish_in_thread
    session, live = _session(arguments)
    finish_here(session)
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


def _finish_on_a_loop(session: Session) -> None:
    run_bounded(finish(session), session.config.watchdog.grace_s)


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

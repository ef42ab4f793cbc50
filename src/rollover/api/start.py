"""A whole run in one call, wherever that is made: in a script, in a notebook's cell, on an event loop.

Owns in which thread and event loop a run goes on. What it trains is settings.py's and session.py's business.
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
"""A run's directory, the functions and tasks that it was given as objects, by their names, and its configuration."""


def train_and_wait(arguments: Arguments) -> Trained:
    """Make all steps that are left. Where an event loop is running the run has a thread of its own."""
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
    """As `train_and_wait`, on the running event loop."""
    session, live = _session(arguments)
    await finish(session)
    return session.directory, live, session.config.model_dump()


def _session(arguments: Arguments) -> tuple[Session, dict[str, Any]]:
    settings = arguments.settle()
    live = dict(settings.live)  # the session gives its own back when it ends
    return Session.of(settings, arguments.resume is not None), live


def _finish_on_a_loop(session: Session) -> None:
    run_bounded(finish(session), session.config.watchdog.grace_s)


def _finish_in_thread(session: Session) -> None:
    """Wait for it. The signals go to the session; a second Ctrl-C cancels it, and raises KeyboardInterrupt here."""
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

    # In the caller's context: a notebook shows what is printed below the cell that it belongs to.
    threading.Thread(target=contextvars.copy_context().run, args=(thread,), name="rollover.train").start()
    with signals_to(session.on_signal):
        try:
            while not outcome.done():  # Python looks at a signal that another thread got when this one wakes
                wait([outcome], timeout=_SIGNAL_S)
        except KeyboardInterrupt:
            for loop, task in running:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(task.cancel)
            raise
    outcome.result()

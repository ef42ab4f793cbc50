"""Warns about a block of code that takes too long and cannot be interrupted.

Each watched block has a daemon thread, since the blocked thread cannot log. It is silent while a library holds the
interpreter's lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

logger = logging.getLogger(__name__)


def over_work(what: str, state: str, limit_s: float) -> AbstractContextManager[object]:
    """Warn when the block takes longer than `limit_s` (0: never). `what`, `state`: words for the message."""

    def text(seconds: float) -> str:
        return f"{what} ({state} {seconds:.3g} s ago): it cannot be ended from here, so the run waits"

    return over(text, limit_s)


def over_event_loop(doing: Callable[[], str], limit_s: float) -> AbstractContextManager[None]:
    """Warn when one step of the running event loop takes longer than `limit_s`: no watchdog can run then."""

    def text(seconds: float) -> str:
        return (
            f"the event loop has stood still for {seconds:.3g} s while {doing()}:"
            " nothing can be ended from here, so the run waits"
        )

    return over_loop(text, limit_s, asyncio.get_running_loop().call_later)


@contextmanager
def over(text: Callable[[float], str], limit_s: float) -> Iterator[Callable[[], None]]:
    """Log `text(seconds)` when the block takes longer than `limit_s` (0: never), and again at doubling times.

    Yields a function that restarts the time.
    """
    if limit_s == 0:
        yield lambda: None
        return
    restarted, ended = threading.Event(), threading.Event()
    watch = (text, limit_s, restarted, ended)
    threading.Thread(target=_watch, args=watch, daemon=True, name="blocked-warning").start()
    try:
        yield restarted.set
    finally:
        ended.set()
        restarted.set()


@contextmanager
def over_loop(
    text: Callable[[float], str], limit_s: float, call_later: Callable[[float, Callable[[], None]], Any]
) -> Iterator[None]:
    """Warn as `over`, for a blocked event loop with this `call_later`. An idle loop does not count."""
    handle: Any = None

    def beat() -> None:
        nonlocal handle
        restart()
        handle = call_later(limit_s / 4, beat)

    with over(text, limit_s) as restart:
        if limit_s:
            beat()
        try:
            yield
        finally:
            if handle is not None:
                handle.cancel()


def _watch(text: Callable[[float], str], limit_s: float, restarted: threading.Event, ended: threading.Event) -> None:
    since, wait = time.monotonic(), limit_s
    while True:
        is_restarted = restarted.wait(min(wait, threading.TIMEOUT_MAX))
        if ended.is_set():
            return
        if is_restarted:
            restarted.clear()
            since, wait = time.monotonic(), limit_s
        else:
            wait = time.monotonic() - since  # the next warning at twice the time
            logger.warning(f"watchdog: {text(wait)}")

"""The first Ctrl-C (or SIGTERM) stops a run in order, the second at once.

Owns who gets the two signals in this process. Never parks or saves anything: the loop does, when it finds that it
was asked to stop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from rollover.rollout.cancelled_tasks import CancelledTasks

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], Any]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What each open block of `signals_to` found: by signal, who had it before. The oldest block comes first.
_found: list[dict[signal.Signals, Any]] = []


class Stop:
    """`requested` is True from the first signal on."""

    def __init__(self) -> None:
        self.requested = False
        self._on_stop: Callable[[], None] | None = None
        self._event = asyncio.Event()
        self._cancelled = CancelledTasks()
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, on_stop: Callable[[], None]) -> None:
        """Call `on_stop` once a stop is requested, in the thread of the running loop, until `unlisten`.

        The signals come to `on_signal`, for which `take_signals` or `signals_to` is called.
        """
        self._loop, self._on_stop = asyncio.get_running_loop(), on_stop
        if self.requested:  # before the run had a loop
            self._stop()

    def unlisten(self) -> None:
        """What was to be called has ended."""
        self._on_stop = None

    def request(self) -> None:
        """Do what the first signal does, from any thread."""
        if self.requested:
            return
        self.requested = True
        line = "stopping: parking rollouts and writing a checkpoint (again: stop at once)"
        try:
            logger.info(line)
        except RuntimeError:  # a line is being printed right now, as to a reader that is slow
            if self._loop is not None:
                self._loop.call_soon_threadsafe(logger.info, line)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def on_signal(self, number: int, frame: object) -> None:
        """The handler of both signals, in the main thread: the first requests a stop, the second interrupts."""
        if self._loop is not None and self._loop.is_closed():
            return  # the run has ended, and so does the process: there is nothing to stop
        if self.requested:
            raise KeyboardInterrupt
        self.request()

    def _stop(self) -> None:
        self._event.set()
        if self._on_stop is not None:
            self._on_stop()

    async def unless_requested(self, work: Coroutine[Any, Any, Result], grace_s: float) -> Result | None:
        """What `work` returns. A stop cancels it: then None, and neither what it has by then nor its error is used. One
        that does not end within `grace_s` then is left alone."""
        task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not self.requested:
                return task.result()
            self._cancelled.add(task)
            await asyncio.wait([task], timeout=grace_s)
            return None
        finally:
            task.cancel()
            signalled.cancel()

    async def within(self, work: Coroutine[Any, Any, object], grace_s: float) -> bool:
        """Wait for `work`, and raise its error. Once a stop is requested it has `grace_s` more; then it is cancelled,
        and left alone where it goes on for as long again. Returns whether it came to its end."""
        task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([task], timeout=grace_s)
            if task.done():
                task.result()
                return True
            self._cancelled.add(task)
            await asyncio.wait([task], timeout=grace_s)
            return False
        finally:
            task.cancel()
            signalled.cancel()


def take_signals(handler: Handler) -> None:
    """From now on the two signals go to `handler`. Elsewhere than in the main thread, which alone gets signals, it does
    nothing: a run there is stopped by `Stop.request`."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, handler)


@contextmanager
def signals_to(handler: Handler) -> Iterator[None]:
    """As `take_signals`, within the block. Afterwards the signals are as they were before it.

    Blocks may end in any order, as sessions do: the signals then go to the newest one that is still open.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    _found.append(found)
    try:
        take_signals(handler)
        yield
    finally:
        at = next(i for i, other in enumerate(_found) if other is found)
        del _found[at]
        if at < len(_found):  # the block that came next found `handler`, and gives back what this one found
            _found[at].update(found)
        else:
            for number, before in found.items():
                if before is not None:  # one that was not set from Python cannot be set again from it
                    signal.signal(number, before)

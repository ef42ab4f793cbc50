"""Stops a run: the first Ctrl-C (or SIGTERM) in order, the second at once.

Owns the handlers of the two signals in this process. Never parks or saves anything: the loop does, when it sees that a
stop is requested.
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

from rollover.shutdown import cancel_in_background

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], Any]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# For each open block of `signals_to`, the oldest first: the handlers before it, by signal.
_found: list[dict[signal.Signals, Any]] = []


class Stop:
    """`requested` is True from the first signal on."""

    def __init__(self) -> None:
        self.requested = False
        self._on_stop: Callable[[], None] | None = None
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, on_stop: Callable[[], None]) -> None:
        """Call `on_stop` once a stop is requested, in the thread of the running loop, until `unlisten`.

        The signals come to `on_signal`, for which `take_signals` or `signals_to` is called.
        """
        self._loop, self._on_stop = asyncio.get_running_loop(), on_stop
        if self.requested:  # before there was a loop
            self._stop()

    def unlisten(self) -> None:
        """Call `on_stop` no more."""
        self._on_stop = None

    def request(self) -> None:
        """Request a stop, from any thread."""
        if self.requested:
            return
        self.requested = True
        line = "stopping: parking rollouts and writing a checkpoint (again: stop at once)"
        try:
            logger.info(line)
        except RuntimeError:  # the signal came while a line is being printed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(logger.info, line)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def on_signal(self, number: int, frame: object) -> None:
        """Handle both signals, in the main thread: the first requests a stop, the second interrupts."""
        if self._loop is not None and self._loop.is_closed():
            return  # the run has ended
        if self.requested:
            raise KeyboardInterrupt
        self.request()

    def _stop(self) -> None:
        self._event.set()
        if self._on_stop is not None:
            self._on_stop()

    async def unless_requested(self, work: Coroutine[Any, Any, Result], grace_s: float) -> Result | None:
        """Return the result of `work`. A stop cancels it: then None, and its error is ignored.

        Work that does not end within `grace_s` of the stop is abandoned.
        """
        task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not self.requested:
                return task.result()
            cancel_in_background(task)
            await asyncio.wait([task], timeout=grace_s)
            return None
        finally:
            task.cancel()
            signalled.cancel()

    async def within(self, work: Coroutine[Any, Any, object], grace_s: float) -> bool:
        """Wait for `work`, and raise its error. Returns whether it has finished.

        After a stop it has `grace_s`; then it is cancelled, and abandoned where it continues for as long again.
        """
        task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([task], timeout=grace_s)
            if task.done():
                task.result()
                return True
            cancel_in_background(task)
            await asyncio.wait([task], timeout=grace_s)
            return False
        finally:
            task.cancel()
            signalled.cancel()


def take_signals(handler: Handler) -> None:
    """Send the two signals to `handler`. Does nothing outside the main thread, which alone gets signals: a run there is
    stopped by `Stop.request`."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, handler)


@contextmanager
def signals_to(handler: Handler) -> Iterator[None]:
    """Send the two signals to `handler` within the block, and restore the handlers after it.

    Blocks may end in any order, as sessions do: the newest open block gets the signals.
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
        if at < len(_found):  # the next block has saved `handler`: it must restore this one's handlers
            _found[at].update(found)
        else:
            for number, before in found.items():
                if before is not None:  # a handler that was not set from Python cannot be restored
                    signal.signal(number, before)

"""The first Ctrl-C (or SIGTERM) stops a run in order, the second at once. Owns the two signals, and who waits for them.

Never parks or saves anything: the loop does, when it finds that it was asked to stop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """`requested` is True from the first signal on; `on_stop` is then called once, in the event loop's thread."""

    def __init__(self) -> None:
        self.requested = False
        self.on_stop: Callable[[], None] = lambda: None
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._say: Callable[[str], None] = print

    def listen(self, say: Callable[[str], None]) -> None:
        """From now on, in the running loop's thread. `say` prints one line.

        Python gives signals to the main thread alone: a run in another one is stopped by `request`.
        """
        self._loop, self._say = asyncio.get_running_loop(), say
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self.on_signal)
        if self.requested:  # before the run had a loop
            self._stop()

    def request(self) -> None:
        """Do what the first signal does, from any thread."""
        if self.requested:
            return
        self.requested = True
        line = "stopping: parking rollouts and writing a checkpoint (again: stop at once)"
        try:
            self._say(line)
        except RuntimeError:  # a line is being printed right now, as to a reader that is slow
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._say, line)
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
        self.on_stop()

    async def unless_requested(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """What `work` returns. A stop cancels it: then None, and neither what it has by then nor its error is used."""
        task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not self.requested:
                return task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        finally:
            task.cancel()
            signalled.cancel()


@contextmanager
def signals_to(handler: Callable[[int, object], None] | None = None) -> Iterator[None]:
    """Within the block the two signals go to `handler` (None: to whom the block gives them); afterwards they are as
    they were. Elsewhere than in the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        if handler is not None:
            for number in _SIGNALS:
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            if old is not None:
                signal.signal(number, old)

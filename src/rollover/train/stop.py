"""The first Ctrl-C (or SIGTERM) stops a run in order, the second at once. Owns the two signals, and who waits for them.

Never parks or saves anything: the loop does, when it finds that it was asked to stop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Stop:
    """`requested` is True from the first signal on; then `on_stop` was called in the event loop's thread, once."""

    def __init__(self) -> None:
        self.requested = False
        self.on_stop: Callable[[], None] = lambda: None
        self._event = asyncio.Event()

    def listen(self, say: Callable[[str], None]) -> None:
        """From now on. `say` prints one line."""
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: object) -> None:
            if loop.is_closed():
                return  # the run has ended, and so does the process: there is nothing to stop
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
            line = "stopping: parking rollouts and writing a checkpoint (again: stop at once)"
            try:
                say(line)
            except RuntimeError:  # a line is being printed right now, as to a reader that is slow
                loop.call_soon_threadsafe(say, line)
            loop.call_soon_threadsafe(self._stop)

        signal.signal(signal.SIGINT, handle)
        signal.signal(signal.SIGTERM, handle)

    def _stop(self) -> None:
        self._event.set()
        self.on_stop()

    async def unless_requested(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """What `work` returns. A signal cancels it: None, and neither what it has by then nor its error is used."""
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

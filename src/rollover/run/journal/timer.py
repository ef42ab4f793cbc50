"""A task that writes now and again while a run goes on, whatever else the event loop does.

Owns that task, and what ends it. What is written is journaling.py's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Timer:
    """From `start` on it calls `write`, and then `beat`, every `every_s` seconds.

    A `write` that takes longer is waited for while `beat` goes on: it is called again once it has returned.
    """

    def __init__(
        self, every_s: float, write: Callable[[], Coroutine[Any, Any, None]], beat: Callable[[], None]
    ) -> None:
        self.every_s, self.write, self.beat = every_s, write, beat
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._write_now_and_again())

    def check(self) -> None:
        """Raise what ended it, if an error did."""
        if self._task is not None and self._task.done():
            self._task.result()

    def close(self) -> None:
        if self._task is not None:
            _end(self._task)

    async def _write_now_and_again(self) -> None:
        writing: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(self.every_s)
                writing = _unfinished(writing) or asyncio.ensure_future(self.write())
                await asyncio.wait([writing], timeout=self.every_s)
                writing = _unfinished(writing)
                self.beat()
        finally:
            if writing is not None:
                _end(writing)


def _unfinished(task: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
    """The task while it runs, else None. Raises what ended it."""
    if task is None or not task.done():
        return task
    return task.result()


def _end(task: asyncio.Task[None]) -> None:
    """Cancel it. Its error, if it has ended with one, is not reported again: what ends the timer ends the run, too."""
    if not task.cancel() and not task.cancelled():
        task.exception()

"""Tasks that nobody waits for any more: cancelled, and kept only so that none is lost or complained about."""

from __future__ import annotations

import asyncio


class CancelledTasks:
    """Of one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future] = set()

    def __len__(self) -> int:
        """Those that have not ended yet."""
        return len(self._tasks)

    def add(self, task: asyncio.Future) -> None:
        """Cancel it and wait for it no more."""
        task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Future) -> None:
        self._tasks.discard(task)
        _ = task.cancelled() or task.exception()  # seen: asyncio need not complain about it

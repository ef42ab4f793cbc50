"""Cancelled tasks, kept until they end: asyncio drops tasks without a reference, and warns of unread errors."""

from __future__ import annotations

import asyncio


class CancelledTasks:
    """The cancelled tasks of one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future] = set()

    def __len__(self) -> int:
        """Count those that have not ended."""
        return len(self._tasks)

    def add(self, task: asyncio.Future) -> None:
        """Cancel a task, and keep it until it ends."""
        task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Future) -> None:
        self._tasks.discard(task)
        _ = task.cancelled() or task.exception()  # read it, so that asyncio does not warn

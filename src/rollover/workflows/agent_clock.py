"""The seconds in which an agent works by itself: those in which none of its model calls is under way.

So a pause, new weights and other rollouts' turns never time an agent out. Nor does the time in which the event loop
stood still, as it does while a trainer trains in its thread, or another agent blocks it: this one could not go on, and
the call that it made meanwhile has not been read yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOKS_PER_LIMIT, _LONGEST_PAUSE_S = 8, 1.0


class AgentClock:
    """Calls `on_timeout` after `limit_s` seconds (0: never) of the agent's own."""

    def __init__(self, limit_s: float, on_timeout: Callable[[], None]) -> None:
        self._left_s, self._limited, self._on_timeout = limit_s, limit_s > 0, on_timeout
        self._num_waits = 0
        self._loop = asyncio.get_running_loop()
        self._pause_s = min(limit_s / _LOOKS_PER_LIMIT, _LONGEST_PAUSE_S)
        self._counted_s = 0.0  # until when its time is counted
        self._alarm: asyncio.TimerHandle | None = None
        self._go_on()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the agent waits for a model call, or for a place to run in: that is not its time."""
        self._num_waits += 1
        if self._num_waits == 1:
            self._stop()
        try:
            yield
        finally:
            self._num_waits -= 1
            if not self._num_waits:
                self._go_on()

    def end(self) -> None:
        """The agent has ended."""
        self._stop()
        self._limited = False

    def _go_on(self) -> None:
        self._counted_s = self._loop.time()
        if self._limited:
            self._alarm = self._loop.call_later(min(self._left_s, self._pause_s), self._look)

    def _look(self) -> None:
        self._stop()
        if self._left_s > 0:
            self._go_on()
        else:
            self._on_timeout()

    def _stop(self) -> None:
        """Its time up to now is counted, but for what is more than two pauses: the event loop stood still then."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
            self._left_s -= min(self._loop.time() - self._counted_s, 2 * self._pause_s)

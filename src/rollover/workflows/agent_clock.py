"""The seconds in which an agent works by itself: those in which none of its model calls is under way.

So a pause, new weights and other rollouts' turns never time an agent out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class AgentClock:
    """Calls `on_timeout` after `limit_s` seconds (0: never) of the agent's own."""

    def __init__(self, limit_s: float, on_timeout: Callable[[], None]) -> None:
        self._left_s, self._limited, self._on_timeout = limit_s, limit_s > 0, on_timeout
        self._num_calls = 0
        self._loop = asyncio.get_running_loop()
        self._began_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._go_on()

    def on_call(self) -> None:
        """A model call begins."""
        self._num_calls += 1
        if self._num_calls == 1:
            self._stop()

    def on_answer(self) -> None:
        """A model call has ended."""
        self._num_calls -= 1
        if not self._num_calls:
            self._go_on()

    def end(self) -> None:
        """The agent has ended."""
        self._stop()
        self._limited = False

    def _go_on(self) -> None:
        self._began_s = self._loop.time()
        if self._limited:
            self._alarm = self._loop.call_later(self._left_s, self._on_timeout)

    def _stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
            self._left_s = max(0.0, self._left_s - (self._loop.time() - self._began_s))

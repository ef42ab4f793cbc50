"""What an Episode may use up: its agent's seconds (workflow.timeout_s), and tokens (workflow.max_tokens).

The seconds are those in which an agent works by itself: none of its model calls is under way. So a pause, new weights
and other rollouts' turns never time an agent out. Nor does the time in which the event loop stood still, as it does
while a trainer trains in its thread, or another agent blocks it: this one could not go on, and the call that it made
meanwhile has not been read yet.

The tokens are those that its turns sample, over all its Rollouts. A turn reserves as many as it may get, and gives back
what it did not sample: so turns that are under way at the same time cannot exceed the bound together.
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


class TokenBudget:
    """Of `most` tokens; 0: as many as the Rollouts may have. `sampled`: those that are on record of an earlier run."""

    def __init__(self, most: int, sampled: int = 0) -> None:
        self.most = most
        self._left = most - sampled
        self._reserved: dict[str, int] = {}  # by the id of the Rollout whose turn is under way
        self._ended = asyncio.Event()  # the next turn has

    async def room(self, wanted: int) -> int:
        """How many of `wanted` tokens a turn may sample now; 0 or less: none is left. Waits while it might get more
        after the end of a turn that is under way. `begin` follows without a pause."""
        if not self.most:
            return wanted
        while self._reserved and self.free < wanted:
            await self._ended.wait()
        return min(wanted, self.free)

    def begin(self, rollout_id: str, num: int) -> None:
        """A turn of the Rollout is under way, which may sample `num` tokens."""
        if self.most:
            self._reserved[rollout_id] = num

    def end(self, rollout_id: str, num_sampled: int) -> None:
        """It has ended."""
        if self.most:
            del self._reserved[rollout_id]
            self._left -= num_sampled
            self._ended.set()
            self._ended = asyncio.Event()

    @property
    def free(self) -> int:
        """Neither sampled nor reserved."""
        return self._left - sum(self._reserved.values())

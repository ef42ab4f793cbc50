"""Exponential backoff for restarts, and deduplication of failure messages. Never waits itself."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_S = 0.5
_LONGEST_S = 30.0


def back_off_s(num: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after the `num`-th failure in a row: each pause is twice as long as the one before."""
    return min(first_s * 2.0 ** min(num - 1, 60), longest_s)


class BackOff:
    """Backoff of one component that is restarted: `begin`, and after each end `is_news` and `pause_s`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._num = clock, 0
        self._began = clock()
        self._said = ""

    def begin(self) -> None:
        """Note a start."""
        self._began = self._clock()

    def works(self) -> None:
        """Note that it works: its next failure is news."""
        self._said = ""

    def is_news(self, why: str) -> bool:
        """Return whether it ended for another reason than the last time."""
        news, self._said = why != self._said, why
        return news

    def pause_s(self) -> float:
        """Return 0.5 s after the first end, twice as much each time, at most 30; 0.5 again after a life of 30 s."""
        self._num = 1 if self._clock() - self._began > _LONGEST_S else self._num + 1
        return back_off_s(self._num, _FIRST_S, _LONGEST_S)

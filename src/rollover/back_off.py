"""How long to wait before something that has ended is started again, and which of its ends are news. Never
waits itself."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_S = 0.5
_LONGEST_S = 30.0


class BackOff:
    """Of one thing that is started again and again: `begin`, and after each end `is_news` and `pause_s`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pause_s = clock, _FIRST_S
        self._began = clock()
        self._said = ""

    def begin(self) -> None:
        """It is started now."""
        self._began = self._clock()

    def works(self) -> None:
        """What ends it from now on is news, whatever ended it before."""
        self._said = ""

    def is_news(self, why: str) -> bool:
        """Whether it ended otherwise than the last time: what fails ever again in one way is told once."""
        news, self._said = why != self._said, why
        return news

    def pause_s(self) -> float:
        """After an end: half a second at first, each time twice as long, up to half a minute; after a longer life than
        that as at first."""
        if self._clock() - self._began > _LONGEST_S:
            self._pause_s = _FIRST_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_S)
        return pause_s

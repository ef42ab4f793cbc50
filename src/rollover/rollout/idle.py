"""Seconds in which the engine ran nothing while nobody waited for it. The driver says when, this counts."""

from __future__ import annotations

import time


class IdleTime:
    """Counts for one cause at a time: "trainer" or "rewards"."""

    def __init__(self) -> None:
        self._seconds = {"trainer": 0.0, "rewards": 0.0}
        self._cause: str | None = None
        self._since = 0.0

    @property
    def running(self) -> bool:
        """Whether the engine is idle now. For any thread."""
        return self._cause is not None

    def set(self, cause: str | None) -> None:
        """From now on the engine is idle for `cause`; None: it is not. What was until now is counted."""
        now = time.perf_counter()
        if self._cause is not None:
            self._seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def seconds(self) -> dict[str, float]:
        """By cause, cumulative and up to now."""
        self.set(self._cause)
        return dict(self._seconds)

"""Clock of a run: the time and trainer version that every event is stamped with (lifecycle.py).

The clock stands still while no process runs and goes back with a checkpoint that is resumed, so that no second is
counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """`read` gives seconds of some origin. `version`: training steps that the trainer has made, whether the engine has
    their weights or not."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self._read, self._origin = read, read()
        self._stands_at: float | None = None
        self.version = 0

    def seconds(self) -> float:
        """Since the start of the run."""
        return self._read() - self._origin if self._stands_at is None else self._stands_at

    @property
    def stands(self) -> bool:
        return self._stands_at is not None

    def stand_at(self, seconds: float) -> None:
        """Stop the clock at `seconds` until `go_on`: events replayed meanwhile happened then, in an earlier process."""
        self._stands_at = seconds

    def go_on(self) -> None:
        """Continue from where the clock stands."""
        self._origin, self._stands_at = self._read() - self.seconds(), None

    def set(self, seconds: float, version: int) -> None:
        """Continue from the `seconds` and trainer `version` of a checkpoint, or from zeros."""
        self._origin, self.version, self._stands_at = self._read() - seconds, version, None

"""Counts where the time of the driver's phases goes. The driver says what begins and what ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """The seconds of the driver's phases, cumulative.

    `generation_s`: the run waited while something was generated, or (`environment_s` of it) for environments alone.
    `scoring_s`: it waited for scores, and nothing was generated. `scheduling_s`: the rest of the phases, which are new
    tasks, decisions and bookkeeping. `idle`: the engine ran nothing. `beside_training`: set while the trainer trains
    beside generation; nobody waits for generation then, so that only `idle` goes on.
    """

    def __init__(self) -> None:
        self.generation_s = self.environment_s = self.scoring_s = self.scheduling_s = 0.0
        self.idle = IdleTime()
        self.beside_training = False

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Counts the time of a block as scheduling, without what `waiting` counts within it."""
        started, waited = time.perf_counter(), self.generation_s + self.scoring_s
        try:
            yield
        finally:
            waited = self.generation_s + self.scoring_s - waited
            self.scheduling_s += time.perf_counter() - started - waited

    @contextmanager
    def waiting(self, *, generating: bool, acting: bool = False) -> Iterator[None]:
        """Counts the time of a block, in which the driver waits, as generation, of environments alone (`acting`), or as
        scoring."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if self.beside_training:
            return
        if generating or acting:
            self.generation_s += seconds
            self.environment_s += seconds if acting else 0.0
        else:
            self.scoring_s += seconds


class IdleTime:
    """Seconds in which the engine ran nothing beside the trainer's work (`Driver.go_on`), by cause, one at a time.

    "trainer": nothing was in flight, and nothing may start before the trainer has trained or handed over its weights;
    "rewards": only scorings were in flight.
    """

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

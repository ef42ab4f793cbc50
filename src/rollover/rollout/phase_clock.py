"""Where the time of generation goes, cumulative: the driver says what begins and ends, this counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """The seconds of the driver's phases.

    `generation_s`: in which something was generated and the run waited for it; `scoring_s`: in which it waited for
    scores alone; `scheduling_s`: the rest of the phases, new tasks, decisions and bookkeeping. `idle`: in which the
    engine ran nothing. `beside_training`: what is generated now is waited for by nobody, so only `idle` counts.
    """

    def __init__(self) -> None:
        self.generation_s = self.scoring_s = self.scheduling_s = 0.0
        self.idle = IdleTime()
        self.beside_training = False

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Counts what of a block is no waiting as scheduling."""
        started, waited = time.perf_counter(), self.generation_s + self.scoring_s
        try:
            yield
        finally:
            waited = self.generation_s + self.scoring_s - waited
            self.scheduling_s += time.perf_counter() - started - waited

    @contextmanager
    def waiting(self, *, generating: bool) -> Iterator[None]:
        """Counts the time of a block as generation, or as scoring."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if self.beside_training:
            return
        if generating:
            self.generation_s += seconds
        else:
            self.scoring_s += seconds


class IdleTime:
    """Seconds in which the engine ran nothing while nobody waited for it (`Driver.go_on`), by cause, one at a time.

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

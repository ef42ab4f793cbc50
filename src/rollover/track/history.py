"""The history of a run: one clock and one trainer version for its trace and its lifetimes, over all its processes.

Owns the run's clock, which stands still while no process runs and goes back with a checkpoint that is resumed, so that
no second is counted twice. Never decides what is told to it, nor when it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rollover.rollout.lifecycle import Event
from rollover.track.lifetimes import Lifetimes
from rollover.track.trace import Trace, TraceFile
from rollover.track.tracker import Cut, Row, Tracker
from rollover.types import Group


class RunHistory(Tracker):
    """What happened in a run, and when. `clock` gives seconds; without a `file` the trace stays in memory."""

    def __init__(self, file: TraceFile | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._file, self._clock, self._origin = file, clock, clock()
        self._stands_at: float | None = None
        self.trace = Trace(self.seconds)
        self.lifetimes = Lifetimes()
        self.trace_bytes = 0  # of trace.jsonl, where the run goes on

    def seconds(self) -> float:
        """Since the start of the run."""
        return self._clock() - self._origin if self._stands_at is None else self._stands_at

    def stand_at(self, seconds: float) -> None:
        """Until `go_on` the clock stands at `seconds`: what is told meanwhile happened then, in an earlier process."""
        self._stands_at = seconds

    def go_on(self) -> None:
        """The clock goes on from where it stands."""
        self._origin, self._stands_at = self._clock() - self.seconds(), None

    def on_event(self, event: Event) -> None:
        """Record what happened to a group or a rollout (a listener of Lifecycle), at one moment for all records."""
        now = self.seconds()
        self.lifetimes.on_event(event, self.trace.version, now)
        self.trace.on_event(event, now)

    def trained(self, version: int) -> None:
        """The trainer is at `version`, whether its weights go to the engine or not."""
        self.trace.version = version

    def span(self, name: str) -> AbstractContextManager[None]:
        """See Trace.span. While the clock stands nothing is recorded: a span would have no length."""
        return self.trace.span(name) if self._stands_at is None else nullcontext()

    def on_published(self, version: int) -> None:
        """The engine samples with the weights of `version` from now on. Called before anything is dropped for it."""
        self.trace.on_published(version)

    def on_step(self, row: Row) -> None:
        self.flush()

    def truncate(self, cut: Cut) -> None:
        """Cut trace.jsonl to its size at `cut`, which may be in the middle of a step: `trace_bytes`."""
        if self._file is not None:
            self._file.truncate(self.trace_bytes)

    @property
    def num_bytes(self) -> int:
        """The size of trace.jsonl now."""
        return 0 if self._file is None else self._file.num_bytes

    def flush(self) -> int:
        """Write the new events of the trace, once a step. Returns the size of the file."""
        if self._file is None:
            return 0
        self._file.write(self.trace.drain())
        return self._file.num_bytes

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. trace.jsonl has what happened so far, durably: a run that resumes cuts it here."""
        trace_bytes = self.flush()
        if self._file is not None:
            self._file.sync()
        return {
            "seconds": self.seconds(),
            "trace_bytes": trace_bytes,
            "lifetimes": self.lifetimes.state_dict(),
        }

    def begin_anew(self) -> None:
        """Forget all that is not in trace.jsonl: the run goes back to a checkpoint, or to its start."""
        self._stands_at = None
        self.load_state_dict({}, (), 0)

    def load_state_dict(self, state: Mapping[str, Any], groups: Iterable[Group], version: int) -> None:
        """`groups`: the held ones; `version`: the trainer's. A checkpoint older than this record has the state {}."""
        now = state.get("seconds", 0.0)
        self._origin = self._clock() - now
        self.trace.version = version
        self.trace.drain()
        self.trace_bytes = state.get("trace_bytes", 0)
        self.lifetimes.load_state_dict(state.get("lifetimes", {}), groups, version, now)

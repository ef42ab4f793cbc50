"""A run that never was, with all that the dashboard draws: steps, visits to an engine, evaluations, dropped groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recorded_run import write_run
from rollover.track.trace import TRACE, TraceEvent, TraceFile

STEPS = 12


def make_run(path: Path, text: Callable[[int], str] = lambda step: f"the answer of step {step}") -> Path:
    """Of twelve of twenty steps."""
    path.mkdir(parents=True)
    write_run(path, steps=STEPS, num_steps=20, text=text)
    events = []
    for step in range(1, STEPS + 1):
        at = 100.0 * step
        events += [TraceEvent("generate_start", at, step - 1)]
        for number in (3 * step, 3 * step + 1):
            for sibling in range(2):
                start, end, segments = at + 1 + sibling, at + 30 + 5 * sibling, ((step - 1, 3),)
                events += [TraceEvent("start", start, step - 1, number, sibling)]
                events += [TraceEvent("finish", end, step - 1, number, sibling, tokens=3, segments=segments)]
        events += [TraceEvent("generate_end", at + 50, step - 1), TraceEvent("train_start", at + 50, step - 1)]
        events += [TraceEvent("train_end", at + 90, step - 1), TraceEvent("publish", at + 91, step)]
    TraceFile(path / TRACE).write(sorted(events, key=lambda event: event.seconds))
    return path

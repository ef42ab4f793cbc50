"""A driver on the fake engine with trace and lifetimes, on a clock that ticks once an event."""

from __future__ import annotations

import asyncio
import itertools

from rollover.rollout.lifecycle import Event, RunClock
from rollover.track.lifetimes import Lifetimes
from rollover.track.trace import Trace, TraceEvent, TraceFile
from rollover.types import Group
from unit.rollout.run import Run
from unit.rollout.world import through_json

MODES = {
    "sync": {},
    "partial": {"interrupt": "when_enough", "in_flight_groups": 5, "max_staleness": 2},
    "slots": {"interrupt": "when_enough", "in_flight_groups": 6, "max_staleness": 2, "max_running": 3},
    "drop": {"interrupt": "when_enough", "in_flight_groups": 7, "max_staleness": 1, "on_stale": "drop"},
    "mask": {"interrupt": "when_enough", "in_flight_groups": 6, "max_staleness": 0, "on_stale": "mask"},
    "budget": {"interrupt": "token_budget", "token_budget": 9, "in_flight_groups": 5, "max_staleness": 3},
    "ahead": {"in_flight_groups": 6, "max_staleness": 2},
}


class TracedRun(Run):
    """`row` of every step: the lifetimes' metrics. `lives`: group id -> (admitted, consumed) in ticks."""

    def __init__(self, file: TraceFile | None = None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.now = 0
        clock = self.lifecycle.clock = RunClock(lambda: float(self.now))
        self.tracing, self.lifetimes = Trace(clock, file), Lifetimes()
        self.lifecycle.listeners = [self._tick]
        self.rows: list[dict[str, float]] = []

    def _tick(self, event: Event) -> None:
        self.now += 1
        self.events.append(event)
        self.lifetimes.on_event(event)
        self.tracing.on_event(event)

    async def step(self) -> list[Group] | None:
        with self.tracing.span("generate"):
            groups = await self.driver.collect(self.version)
        if groups:
            with self.tracing.span("train"):
                self.now += 1
            self.ready_versions = self.lifetimes.ready_versions
            self.publish()
            self.rows.append(self.lifetimes.step_metrics())
        return groups

    def publish(self) -> list[Group]:
        self.lifecycle.clock.on_version(self.version + 1)
        self.tracing.on_weight_sync(self.version + 1)
        return super().publish()

    def save(self):
        state = [self.lifecycle.clock.seconds(), self.tracing.sync(), self.lifetimes.state_dict()]
        return super().save(), through_json(state)

    def load(self, saved) -> None:
        mine, (seconds, num_bytes, lifetimes) = saved
        super().load(mine)
        self.lifecycle.clock.set(seconds, self.version)
        self.tracing.resume_at(num_bytes)
        self.lifetimes.load_state_dict(lifetimes, self.cache.groups.values(), self.version, seconds)

    @property
    def trace(self) -> list[TraceEvent]:
        return self.tracing.events


def traced(mode: str, num_steps: int, **options: object) -> TracedRun:
    run = TracedRun(**MODES[mode], **options)  # type: ignore[arg-type]
    run.steps(num_steps)
    return run


def stopped_in_the_middle(run: TracedRun, after_events: int) -> None:
    """Go on until so many more events have happened, then stop as on Ctrl-C: what runs is parked."""
    counter, tick = itertools.count(1), run._tick

    def stop(event: Event) -> None:
        tick(event)
        if next(counter) == after_events:
            run.driver.interrupt_for_good()

    run.lifecycle.listeners = [stop]

    async def until_stopped() -> None:
        while await run.step() is not None:
            pass

    asyncio.run(until_stopped())

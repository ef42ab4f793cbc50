"""A driver on the fake engine with a history, on a clock that ticks once an event."""

from __future__ import annotations

import asyncio
import itertools

from rollover.rollout.lifecycle import Event
from rollover.track.history import RunHistory
from rollover.track.trace import TraceEvent, TraceFile
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
        self.history = RunHistory(file, clock=lambda: float(self.now))
        self.lifecycle.listeners = [self._tick]
        self.rows: list[dict[str, float]] = []

    def _tick(self, event: Event) -> None:
        self.now += 1
        self.events.append(event)
        self.history.on_event(event)

    async def step(self) -> list[Group] | None:
        with self.history.span("generate"):
            groups = await self.driver.collect(self.version)
        if groups:
            with self.history.span("train"):
                self.now += 1
            self.ready_versions = self.history.lifetimes.ready_versions
            self.publish()
            self.rows.append(self.history.lifetimes.step_metrics())
        return groups

    def publish(self) -> list[Group]:
        self.history.on_published(self.version + 1)
        return super().publish()

    def save(self):
        return super().save(), through_json(self.history.state_dict())

    def load(self, saved) -> None:
        mine, history = saved
        super().load(mine)
        self.history.load_state_dict(history, self.cache.groups.values(), self.version)

    @property
    def trace(self) -> list[TraceEvent]:
        return self.history.trace.events


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

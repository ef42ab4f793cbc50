"""Simulated engines: placement, speed, and the time of the next stop. Pure.

An engine makes decode steps. Each step gives every rollout on the engine one token; its duration depends on the batch
size. A rollout joins at a step boundary after its prefill, during which the other rollouts of the engine wait.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from rollover.config import PlanConfig
from rollover.types import Rollout

_TINY = 1e-9


# A rollout on an engine: minus the step after which it stops, group, sibling, the step after which it began, the
# rollout. So the next one to stop is last in a sorted list, where removal is cheap.
_Running = tuple[int, int, int, int, Rollout]


@dataclass(slots=True, eq=False)
class _Engine:
    """`boundary`: virtual time of its last step boundary, which may lie in the future; `steps`: steps made by then.

    `queue`: running rollouts, sorted. `prefilling`: tokens whose prefill began together at `prefilling_at` and takes
    `prefill_s`.
    """

    boundary: float = 0.0
    steps: int = 0
    queue: list[_Running] = field(default_factory=list)
    num_running: int = 0
    stamp: int = 0
    prefilling: int = 0
    prefilling_at: float = -1.0
    prefill_s: float = 0.0


class Fleet:
    """Engines of equal speed with `slots` each. Counts busy time: `slot_s` (slots x seconds) and `prefill_tokens`."""

    def __init__(self, plan: PlanConfig, slots: int) -> None:
        if len(plan.decode_batches) != len(plan.decode_step_s) or not plan.decode_batches:
            raise ValueError("plan.decode_batches and plan.decode_step_s must have the same number of entries, not 0")
        if sorted(set(plan.decode_batches)) != plan.decode_batches or min(plan.decode_step_s) <= 0:
            raise ValueError("plan.decode_batches must be increasing, and plan.decode_step_s above 0")
        self.slots = slots
        self.step_s: list[float] = step_seconds(plan, slots).tolist()  # at the current speed
        self._speed, self._full_step_s = 1.0, self.step_s
        self._prefill_s, self._prefill_min_s = 1 / plan.prefill_tokens_per_s, plan.prefill_min_s
        self._engines = [_Engine() for _ in range(plan.engines)]
        self._events: list[tuple[float, int, int]] = []  # (time, engine, stamp): the next stop of an engine
        self._dirty: set[int] = set()  # engines whose next stop changed
        # Engines by load; an entry is void if the load of the engine changed since.
        self._loads: list[list[int]] = [[] for _ in range(slots + 1)]
        self._loads[0] = list(range(plan.engines))[::-1]
        self._least = 0
        self.slot_s = 0.0
        self.prefill_tokens = 0

    def place(self, preferred: int | None) -> int:
        """Return the engine for a rollout: the preferred one if it has a free slot, else the least loaded."""
        if preferred is not None and self._engines[preferred].num_running < self.slots:
            return preferred
        while True:
            engines = self._loads[self._least]
            while engines:
                if self._engines[engines[-1]].num_running == self._least:
                    return engines[-1]
                engines.pop()
            self._least += 1

    def start(self, rollout: Rollout, engine: int, num_tokens: int, prefill_tokens: int, now: float) -> None:
        """Run `rollout` for num_tokens more tokens, after the prefill."""
        e = self._engines[engine]
        assert e.num_running < self.slots and num_tokens >= 1
        if e.boundary < now:
            if e.num_running:
                self._step(e, math.ceil((now - e.boundary) / self.step_s[e.num_running] - _TINY))
            else:
                e.boundary = now
        if prefill_tokens:
            self.prefill(engine, prefill_tokens, now)
        insort(e.queue, (-(e.steps + num_tokens), rollout.group_id, rollout.sibling, e.steps, rollout))
        e.num_running += 1
        self._dirty.add(engine)
        self._loads[e.num_running].append(engine)

    def prefill(self, engine: int, num_tokens: int, now: float) -> None:
        """Delay the engine's next step by a prefill, in one pass with the other prefills of this moment."""
        e = self._engines[engine]
        self.prefill_tokens += num_tokens
        if e.prefilling_at != now:
            e.prefilling, e.prefilling_at, e.prefill_s = 0, now, 0.0
        e.prefilling += num_tokens
        prefill_s = max(self._prefill_min_s, e.prefilling * self._prefill_s) / self._speed
        e.boundary += prefill_s - e.prefill_s
        e.prefill_s = prefill_s
        self._dirty.add(engine)

    def set_speed(self, speed: float, now: float) -> None:
        """Make steps and prefills, also the rest of the current ones, take 1 / `speed` of their time."""
        ratio = self._speed / speed
        for index, e in enumerate(self._engines):
            self._step_until(e, now)
            begun_s = now - e.boundary  # elapsed part of the step; below 0: the rest of a prefill
            if e.num_running and begun_s > 0:
                self.slot_s += e.num_running * begun_s * (1 - ratio)
            if e.num_running or begun_s < 0:
                e.boundary = now - begun_s * ratio
            e.prefill_s *= ratio
            self._dirty.add(index)
        self._speed, self.step_s = speed, [seconds / speed for seconds in self._full_step_s]

    def running(self, now: float) -> list[tuple[int, Rollout, int]]:
        """Return (engine, rollout, tokens since its start) of each running rollout, after the steps made by `now`."""
        for e in self._engines:
            self._step_until(e, now)
        return [(i, running[4], e.steps - running[3]) for i, e in enumerate(self._engines) for running in e.queue]

    def pause(self, seconds: float) -> None:
        """Pause all running rollouts, from the moment of `running`."""
        for index, e in enumerate(self._engines):
            if e.num_running:
                e.boundary += seconds
                self._dirty.add(index)

    def next_time(self) -> float:
        """Return the time of the next stop, inf if nothing runs."""
        for index in self._dirty:
            e = self._engines[index]
            e.stamp += 1
            if e.queue:
                heapq.heappush(self._events, (self._next_stop(e), index, e.stamp))
        self._dirty.clear()
        while self._events:
            time, index, stamp = self._events[0]
            if self._engines[index].stamp == stamp:
                return time
            heapq.heappop(self._events)
        return math.inf

    def stopped(self, now: float) -> list[tuple[Rollout, int]]:
        """Remove and return the rollouts that have all their tokens by `now`, with their tokens, in group order."""
        out: list[tuple[int, int, Rollout, int]] = []
        self.next_time()  # the events are up to date
        events = self._events
        while events and events[0][0] <= now + _TINY:
            _, index, stamp = events[0]
            e = self._engines[index]
            if e.stamp != stamp:
                heapq.heappop(events)
                continue
            queue = e.queue
            self._step(e, -queue[-1][0] - e.steps)
            while queue and -queue[-1][0] == e.steps:
                _, group_id, sibling, start, rollout = queue.pop()
                out.append((group_id, sibling, rollout, e.steps - start))
            e.num_running = len(queue)
            e.stamp += 1
            if queue:
                heapq.heapreplace(events, (self._next_stop(e), index, e.stamp))
            else:
                heapq.heappop(events)
            self._lighter(index)
        out.sort()
        return [(rollout, num_tokens) for _, _, rollout, num_tokens in out]

    def interrupt(self, rollout_ids: list[str], now: float) -> list[tuple[Rollout, int]]:
        """Stop these rollouts after the steps made by `now`. Returns them with their tokens, in the order given."""
        found: dict[str, tuple[Rollout, int, int]] = {}
        for index, e in enumerate(self._engines):
            self._step_until(e, now)
            for _, _, _, start, rollout in e.queue:
                found[rollout.rollout_id] = (rollout, e.steps - start, index)
        stopped = [found.pop(rollout_id) for rollout_id in rollout_ids]
        for index in {index for _, _, index in stopped}:
            e = self._engines[index]
            e.queue = [running for running in e.queue if running[4].rollout_id in found]
            e.num_running = len(e.queue)
            self._dirty.add(index)
            self._lighter(index)
        return [(rollout, num_tokens) for rollout, num_tokens, _ in stopped]

    def _next_stop(self, e: _Engine) -> float:
        return e.boundary + (-e.queue[-1][0] - e.steps) * self.step_s[e.num_running]

    def _step_until(self, e: _Engine, now: float) -> None:
        if e.num_running:
            self._step(e, max(0, math.floor((now - e.boundary) / self.step_s[e.num_running] + _TINY)))

    def _step(self, e: _Engine, times: int) -> None:
        if times:
            seconds = times * self.step_s[e.num_running]
            e.steps += times
            e.boundary += seconds
            self.slot_s += e.num_running * seconds

    def _lighter(self, index: int) -> None:
        num_running = self._engines[index].num_running
        self._loads[num_running].append(index)
        self._least = min(self._least, num_running)


def step_seconds(plan: PlanConfig, most: int) -> np.ndarray:
    """Return the seconds of a decode step at batch sizes 0..most: linear between the points and beyond the last one."""
    batches, seconds = np.asarray(plan.decode_batches, float), np.asarray(plan.decode_step_s, float)
    at = np.arange(most + 1, dtype=float)
    out = np.interp(at, batches, seconds)
    if len(batches) > 1:
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2]))
        out += np.maximum(0, at - batches[-1]) * slope
    return out

"""Looks at what is in flight at intervals, and carries out what the watchdog decides about it.

Owns the task that looks. It ends as soon as it has done something about a stall, which wakes the driver: that waits for
this task as it does for what is in flight. Never decides what stalls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rollover.rollout.in_flight import Extending, InFlight, now
from rollover.rollout.watchdog import Action, Stall
from rollover.types import DropReason, Segment

logger = logging.getLogger(__name__)


class Watcher:
    """Watches what is in flight at one driver, and logs each stall. `nobody_scores`: whether scorings wait for someone
    who could do them."""

    def __init__(self, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self.watchdog = in_flight.watchdog
        self.nobody_scores: Callable[[], bool] = lambda: False
        self._task: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The task that looks, for whoever waits for it; none where the watchdog is off."""
        return [] if self._task is None else [self._task]

    def begin(self) -> None:
        """Look from now on. If it looks already, the time of the next look is chosen anew: what has been
        interrupted has less time (watchdog.grace_s) than what runs, so the next look may be due earlier than it was."""
        self.end()
        self._task = asyncio.ensure_future(self._look_until_it_stalls()) if self.watchdog.is_on else None

    def end(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    def go_on(self) -> None:
        """Look again if the task has ended. An error that it ended with is raised."""
        if self._task is not None and self._task.done():
            if not self._task.cancelled():
                self._task.result()
            self.begin()

    async def _look_until_it_stalls(self) -> None:
        flight = self.in_flight
        while True:
            await asyncio.sleep(self.watchdog.pause(now()))
            asked = {r.rollout_id: task for task, r in flight.extends.items() if not task.done()}
            seen, queued = await flight.asker.progress(asked), await flight.asker.queued(asked)
            running = {i: task for i, task in asked.items() if task in flight.extends and not task.done()}
            scoring = {s.key: task for task, s in flight.scorings.tasks.items() if not task.done()}
            progress = {i: seen.get(i, []) for i in running}
            stalls = self.watchdog.look(now(), progress, queued, None if self.nobody_scores() else scoring)
            for stall in stalls:
                logger.warning(str(stall))
                if not stall.is_scoring:
                    self._act(stall, running[str(stall.key)], progress[str(stall.key)])
                elif stall.action is Action.RESCORE:
                    flight.scorings.again(scoring[stall.key])
                else:
                    flight.scorings.fail(scoring[stall.key], f"stalled: {stall.what}")
            if stalls:
                return

    def _act(self, stall: Stall, task: Extending, segments: Sequence[Segment]) -> None:
        """Do something about a rollout that stalls. `segments`: the tokens that its extension is known to have."""
        match stall.action:
            case Action.CONTINUE:
                self.in_flight.asker.interrupt([str(stall.rollout_id)])
            case Action.CANCEL | Action.CANCEL_DROPPED:
                self.in_flight.cancel_extend(task, segments)
            case Action.DROP:
                self.in_flight.drop_soon(stall.group_id, DropReason.STALLED, stall.what)
            case Action.ABANDON:
                self.in_flight.give_up_extend(task, stall.what)

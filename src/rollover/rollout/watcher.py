"""Looks at what is in flight, at times of its own, and does about it what the watchdog decides.

Owns the task that looks: it ends when it has done something, so that whoever waits for what is in flight waits for it,
too. Never decides what stalls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollover.rollout.in_flight import Extending, InFlight, now
from rollover.rollout.watchdog import Action, Stall
from rollover.types import DropReason, Segment


class Watcher:
    """Of one driver. `say` prints a line of each stall."""

    def __init__(self, in_flight: InFlight, say: Callable[[str], None]) -> None:
        self.in_flight, self.say = in_flight, say
        self.watchdog = in_flight.watchdog
        self._task: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What ends when something was done about a stall; nothing if there is nothing to look for."""
        return [] if self._task is None else [self._task]

    def begin(self) -> None:
        """Look from now on: anew if it looks already, for the end of an interruption comes before that of a stall."""
        self.end()
        self._task = asyncio.ensure_future(self._look_until_it_stalls()) if self.watchdog.is_on else None

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def go_on(self) -> None:
        """Look again, if it has ended. Its error is raised."""
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
            scoring = {s.key: task for task, s in flight.scorings.items() if not task.done()}
            progress = {i: seen.get(i, []) for i in running}
            stalls = self.watchdog.look(now(), progress, queued, scoring)
            for stall in stalls:
                self.say(str(stall))
                if not stall.is_scoring:
                    self._act(stall, running[str(stall.key)], progress[str(stall.key)])
                elif stall.action is Action.RESCORE:
                    flight.score_again(scoring[stall.key])
                else:
                    flight.fail_scoring(scoring[stall.key], f"stalled: {stall.what}")
            if stalls:
                return

    def _act(self, stall: Stall, task: Extending, segments: Sequence[Segment]) -> None:
        """Do something about a rollout that stalls. `segments`: what its extension is known to have."""
        match stall.action:
            case Action.CONTINUE:
                self.in_flight.asker.interrupt([str(stall.rollout_id)])
            case Action.CANCEL | Action.CANCEL_DROPPED:
                self.in_flight.cancel_extend(task, segments)
            case Action.DROP:
                self.in_flight.drop_soon(stall.group_id, DropReason.STALLED)
            case Action.ABANDON:
                self.in_flight.give_up_extend(task)

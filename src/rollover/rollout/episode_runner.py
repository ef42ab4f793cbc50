"""Runs the episodes of a workflow: the agents' calls become transitions of the held rollouts.

    a group is admitted ──▶ begin ──▶ its Rollouts act: the agent runs, before its first call
    open ──▶ handle ──▶ a Rollout WAITING with the prompt of a call ──▶ the scheduler, as any other
    restart ──▶ handle ──▶ the Episode's Rollouts are dropped (restarted) and replaced by one without tokens

Owns the agents' requests until they are applied, in order of (group id, sibling) if they arrive together. Never decides
what starts (scheduler.py). If an agent was lost, with the process or its event loop, its function runs again: all its
Rollouts act until the agent repeats their turns, and at its end the turns that it did not repeat are dropped. If the
workflow cannot resume (`Episodes.resumes`), the Episode restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from rollover.rollout.lifecycle import Lifecycle
from rollover.types import Group, Rollout, RolloutState
from rollover.workflows.calls import MODEL
from rollover.workflows.episodes import Episodes
from rollover.workflows.turns import EpisodePlace

_UNOPENED = (RolloutState.WAITING, RolloutState.ACTING)


class EpisodeRunner:
    """Runner of the episodes of one driver. `release` is called with the ids of rollouts that are replaced or cut."""

    def __init__(self, lifecycle: Lifecycle, episodes: Episodes, release: Callable[[list[str]], None]) -> None:
        self.lifecycle, self.episodes, self._release = lifecycle, episodes, release
        # Rollouts to open; None: restart the Episode
        self._requests: list[tuple[EpisodePlace, Rollout | None]] = []
        self._ended: list[EpisodePlace] = []
        self._wakeup: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Count the episodes whose agent runs or waits for the model, and the requests to apply."""
        return self.episodes.num_running + len(self._requests) + len(self._ended)

    @property
    def pending(self) -> list[asyncio.Future]:
        """Return the future that ends when `handle` has something to do."""
        if not len(self):
            return []
        if self._wakeup is None or self._wakeup.done():
            self._wakeup = asyncio.get_running_loop().create_future()
            if self._requests or self._ended:
                self._wakeup.set_result(None)
        return [self._wakeup]

    # Called by the driver

    def start_missing(self) -> None:
        """Start the agent of every unfinished Episode that has none: of new groups, and those that were lost."""
        for group in list(self.lifecycle.cache.groups.values()):
            places = dict.fromkeys((r.group_id, r.sibling) for r in group.rollouts if r.state is not RolloutState.READY)
            for place in places:
                if not self.episodes.has(place):
                    self._resume(group, place)

    def on_admit(self, group: Group) -> None:
        """Begin all episodes of a new group."""
        for rollout in group.rollouts:
            self._begin(group, (rollout.group_id, rollout.sibling))

    def handle(self) -> list[Rollout]:
        """Apply the agents' requests. Returns the Rollouts that are finished now.

        Those are Rollouts whose unrepeated turns were dropped, and those of an Episode that made no call.
        """
        requests, self._requests = sorted(self._requests, key=lambda item: item[0]), []
        ended, self._ended = sorted(self._ended), []
        for place, rollout in requests:
            group = self.lifecycle.cache.groups.get(place[0])
            if group is None:
                continue
            if rollout is not None:
                self.lifecycle.open(rollout)
            else:
                self._begin(group, place)
        finished = []
        for place in ended:
            group = self.lifecycle.cache.groups.get(place[0])
            if group is None:
                continue
            finished += self._drop_unrepeated(place)
            # A WAITING one was opened by a call that its agent abandoned: its turn is played, and ends it.
            finished += [r for r in _rollouts(group, place) if r.state is RolloutState.ACTING and not r.num_tokens]
        return finished

    def end_all(self) -> None:
        """End every Episode, and discard the requests."""
        self._requests.clear()
        self._ended.clear()
        self.episodes.end_all()

    # Host: called by the episodes

    def open(self, rollout: Rollout) -> None:
        self._requests.append(((rollout.group_id, rollout.sibling), rollout))
        self._wake()

    def restart(self, group_id: int, sibling: int) -> None:
        self._requests.append(((group_id, sibling), None))
        self._wake()

    def ended(self, group_id: int, sibling: int) -> None:
        self._ended.append((group_id, sibling))
        self._wake()

    # Private

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _resume(self, group: Group, place: EpisodePlace) -> None:
        """Start an agent for an Episode that has lost its own."""
        rollouts = _rollouts(group, place)
        if not self.episodes.resumes or _has_just_begun(rollouts, group):
            self._begin(group, place)
            return
        for rollout in rollouts:
            self.lifecycle.rerun_agent(rollout)
        first = Rollout(*place, group.task, prompt=group.prompt)
        self.episodes.begin(self, first, group.kept.get(place[1]), [replace(rollout) for rollout in rollouts])

    def _begin(self, group: Group, place: EpisodePlace) -> None:
        rollouts = _rollouts(group, place)
        first = rollouts[0]
        if not _has_just_begun(rollouts, group):
            self._release([r.rollout_id for r in rollouts])
            first = self.lifecycle.restart_episode(group, place[1])
        if first.state is RolloutState.WAITING:
            self.lifecycle.begin_acting(first)
        self.episodes.begin(self, first, group.kept.get(place[1]))

    def _drop_unrepeated(self, place: EpisodePlace) -> list[Rollout]:
        """Drop the recorded turns that a rerun agent, which has ended, did not repeat. Returns Rollouts with turns
        left.
        """
        shortened = []
        unreplayed = list(self.episodes.unreplayed(place).items())
        for rollout_id, num_tokens in reversed(unreplayed):  # so that the first Rollout stays if all are dropped
            self._release([rollout_id])
            shorter = self.lifecycle.truncate(self.lifecycle.cache.rollout(rollout_id), num_tokens)
            shortened += [shorter] if num_tokens else []
        self.episodes.on_truncated(place)
        return shortened


def _rollouts(group: Group, place: EpisodePlace) -> list[Rollout]:
    return [r for r in group.rollouts if r.sibling == place[1]]


def _has_just_begun(rollouts: list[Rollout], group: Group) -> bool:
    """Return whether the Episode's only Rollout is as the group was admitted with it."""
    first = rollouts[0]
    as_admitted = first.prompt == group.prompt and first.role == MODEL
    return len(rollouts) == 1 and first.state in _UNOPENED and not first.num_tokens and as_admitted

"""Plays the episodes of a workflow on the one engine: what they ask for becomes transitions of the held rollouts.

    a group is admitted ──▶ begin ──▶ its Rollouts act: the agent is at work, and has asked for nothing yet
    open ──▶ handle ──▶ a Rollout WAITING with the prompt of a call ──▶ the scheduler, as any other
    restart ──▶ handle ──▶ its Rollouts leave (restarted), and one without a token begins again

Owns what episodes have asked for and is not carried out yet. What arrived together is handled in order of (group id,
sibling). Never decides what starts: the scheduler does. Where an Episode's agent was lost, with the process or with its
event loop, its function is run again: all its Rollouts act, each until its turns are asked for again, and what is not
asked for by the end leaves. Or the Episode begins again (`Episodes.resumes`).
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
    """Runs the episodes of one driver. `forget` is told the ids of rollouts that leave by themselves."""

    def __init__(self, lifecycle: Lifecycle, episodes: Episodes, forget: Callable[[list[str]], None]) -> None:
        self.lifecycle, self.episodes, self._forget = lifecycle, episodes, forget
        # Rollouts to open; None: the Episode is to begin again
        self._asked: list[tuple[EpisodePlace, Rollout | None]] = []
        self._ended: list[EpisodePlace] = []
        self._news: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Episodes whose agent is at work, or waits for the model, and what they have asked for."""
        return self.episodes.num_running + len(self._asked) + len(self._ended)

    @property
    def waited_for(self) -> list[asyncio.Future]:
        """What ends when there is something to carry out."""
        if not len(self):
            return []
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
            if self._asked or self._ended:
                self._news.set_result(None)
        return [self._news]

    # What the driver does

    def ask_for_all(self) -> None:
        """Every Episode that is not finished has an agent at work: a new group's, and those that lost theirs."""
        for group in list(self.lifecycle.cache.groups.values()):
            places = dict.fromkeys((r.group_id, r.sibling) for r in group.rollouts if r.state is not RolloutState.READY)
            for place in places:
                if not self.episodes.has(place):
                    self._go_on_with(group, place)

    def on_admit(self, group: Group) -> None:
        """A new group: all its episodes begin."""
        for rollout in group.rollouts:
            self._begin(group, (rollout.group_id, rollout.sibling))

    def handle(self) -> list[Rollout]:
        """Carry out what was asked for. Returns Rollouts that are finished now: what their Episode did not ask for
        again has left them, or it made no call."""
        asked, self._asked = sorted(self._asked, key=lambda item: item[0]), []
        ended, self._ended = sorted(self._ended), []
        for place, rollout in asked:
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
            finished += self._cut(place)
            # One that waits to begin was opened by a call that nobody waits for: its turn is played, and ends it.
            finished += [r for r in _of(group, place) if _acts_unopened(r)]
        return finished

    def clear(self) -> None:
        """End every Episode: nobody waits for any more."""
        self._asked.clear()
        self._ended.clear()
        self.episodes.end_all()

    # Host

    def open(self, rollout: Rollout) -> None:
        self._asked.append(((rollout.group_id, rollout.sibling), rollout))
        self._wake()

    def restart(self, group_id: int, sibling: int) -> None:
        self._asked.append(((group_id, sibling), None))
        self._wake()

    def ended(self, group_id: int, sibling: int) -> None:
        self._ended.append((group_id, sibling))
        self._wake()

    # Private

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _go_on_with(self, group: Group, place: EpisodePlace) -> None:
        """An Episode whose agent was lost."""
        rollouts = _of(group, place)
        if not self.episodes.resumes or _has_just_begun(rollouts, group):
            self._begin(group, place)
            return
        for rollout in rollouts:
            self.lifecycle.act_again(rollout)
        first = Rollout(*place, group.task, prompt=group.prompt)
        self.episodes.begin(self, first, group.kept.get(place[1]), [replace(rollout) for rollout in rollouts])

    def _begin(self, group: Group, place: EpisodePlace) -> None:
        rollouts = _of(group, place)
        first = rollouts[0]
        if not _has_just_begun(rollouts, group):
            self._forget([r.rollout_id for r in rollouts])
            first = self.lifecycle.restart_episode(group, place[1])
        if first.state is RolloutState.WAITING:
            self.lifecycle.begin_acting(first)
        self.episodes.begin(self, first, group.kept.get(place[1]))

    def _cut(self, place: EpisodePlace) -> list[Rollout]:
        """What was on record of an Episode that has ended, and was not asked for again, leaves. Returns Rollouts that
        have others of their turns."""
        left = []
        unreplayed = list(self.episodes.unreplayed(place).items())
        for rollout_id, num_tokens in reversed(unreplayed):  # the first one stays where nothing else does
            self._forget([rollout_id])
            shorter = self.lifecycle.cut(self.lifecycle.cache.rollout(rollout_id), num_tokens)
            left += [shorter] if num_tokens else []
        self.episodes.on_truncated(place)
        return left


def _of(group: Group, place: EpisodePlace) -> list[Rollout]:
    return [r for r in group.rollouts if r.sibling == place[1]]


def _is_unopened(rollout: Rollout) -> bool:
    return rollout.state in _UNOPENED and not rollout.num_tokens


def _acts_unopened(rollout: Rollout) -> bool:
    return rollout.state is RolloutState.ACTING and _is_unopened(rollout)


def _has_just_begun(rollouts: list[Rollout], group: Group) -> bool:
    """Whether an Episode has one Rollout, as its group was admitted with it."""
    first = rollouts[0]
    as_admitted = first.prompt == group.prompt and first.role == MODEL
    return len(rollouts) == 1 and _is_unopened(first) and as_admitted

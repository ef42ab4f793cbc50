"""The groups that are held: their deadlines, how many are due when, and which are READY, in the order of consumption.

Owns what of a group the staleness bound rests on. Never decides who runs, leaves or waits (the scheduler does), and
never changes a group. The cost of a change does not grow with the groups held, but for a look-up in a sorted list.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rollover.config.rollout import RolloutConfig
from rollover.staleness import NO_DEADLINE, deadline, expiry, is_feasible, urgencies
from rollover.types import Group, Rollout

ReadyKey = tuple[float, int]  # expiry (see staleness.expiry), group id


@dataclass(slots=True, eq=False)
class Held:
    """What is known of a held group."""

    group: Group
    admitted_at: int
    """Trainer version."""
    unfinished: int
    """Rollouts that still generate, or whose environment is at work."""
    deadline: float = NO_DEADLINE
    """See staleness.deadline. It has none before the first token; with overlap, before the first start."""
    place: ReadyKey | None = None
    """Its entry in the sorted list of READY groups."""


class HeldGroups:
    """By group id, in `groups`. `ready`: the places of the READY ones, sorted. `reserved`: those of them that the next
    step takes before all others, sorted. `num_scoring`: groups that are complete, but not READY yet."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.groups: dict[int, Held] = {}
        self.ready: list[ReadyKey] = []
        self.reserved: list[ReadyKey] = []
        self.num_scoring = 0
        self._due: Counter[float] = Counter()  # deadline -> held groups
        self._num_finished = 0  # rollouts whose generation has stopped
        self._num_enough = config.num_enough

    def __len__(self) -> int:
        return len(self.groups)

    # Changes

    def add(self, group: Group, admitted_at: int, unfinished: int) -> Held:
        """Hold a group, with so many rollouts that still generate. Its tokens, if any, give it its deadline."""
        held = self.groups[group.group_id] = Held(group, admitted_at, unfinished)
        self._num_finished += len(group.rollouts) - unfinished
        self.num_scoring += not unfinished
        self.set_deadline(held, deadline(group.min_version, self.config.max_staleness))
        return held

    def finish(self, rollout: Rollout) -> bool:
        """The generation of a rollout has stopped. Returns whether its whole group is finished now."""
        held = self.groups[rollout.group_id]
        held.unfinished -= 1
        self._num_finished += 1
        self.num_scoring += not held.unfinished
        return not held.unfinished

    def join(self, group_id: int) -> None:
        """A rollout joined the group, which is not READY."""
        held = self.groups[group_id]
        self.num_scoring -= not held.unfinished
        held.unfinished += 1

    def unfinish(self, group_id: int) -> None:
        """A rollout of the group, which is not READY, goes on after all."""
        self.join(group_id)
        self._num_finished -= 1

    def leave(self, group_id: int, num: int, unfinished: int) -> None:
        """So many rollouts left the group, so many of them unfinished. An unfinished one is left in it."""
        held = self.groups[group_id]
        held.unfinished -= unfinished
        self._num_finished -= num - unfinished
        assert held.unfinished > 0

    def set_deadline(self, held: Held, new: float) -> None:
        self._count_due(held, -1)
        held.deadline = new
        self._count_due(held, 1)

    def lower_deadline(self, group_id: int, version: int | None) -> bool:
        """The group may have a token of this version. Returns whether it is due earlier for that."""
        held, new = self.groups[group_id], deadline(version, self.config.max_staleness)
        if new >= held.deadline:
            return False
        self.set_deadline(held, new)
        return True

    def set_ready(self, held: Held) -> None:
        """All its rollouts have their rewards."""
        self.num_scoring -= 1
        # Perhaps later than its start had to suppose (overlap), or since its oldest tokens left with an Episode.
        self.set_deadline(held, deadline(held.group.min_version, self.config.max_staleness))
        held.place = (self._expiry(held.group), held.group.group_id)
        insort(self.ready, held.place)

    def reserve(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            place = self.groups[group_id].place
            assert place is not None, f"group {group_id} is not READY"
            insort(self.reserved, place)

    def remove(self, group_id: int) -> Held:
        """The group leaves."""
        held = self.groups.pop(group_id)
        self._num_finished -= len(held.group.rollouts) - held.unfinished
        if held.place is not None:
            del self.ready[bisect_left(self.ready, held.place)]
            if held.place in self.reserved:
                self.reserved.remove(held.place)
        elif not held.unfinished:
            self.num_scoring -= 1
        self._count_due(held, -1)
        return held

    def _count_due(self, held: Held, by: int) -> None:
        if held.deadline == NO_DEADLINE:
            return
        self._due[held.deadline] += by
        if not self._due[held.deadline]:
            del self._due[held.deadline]

    # Questions

    def is_enough(self, stream_ended: bool) -> bool:
        """Whether a step has enough to train on, the staleness bound aside."""
        num_ready = len(self.ready)
        if stream_ended and num_ready == len(self.groups):
            return True
        if self.config.complete_by == "group":
            return num_ready >= self._num_enough
        return num_ready > 0 and self._num_finished >= self._num_enough * self.config.rollouts_per_group

    def next_taken(self) -> list[ReadyKey]:
        """What a step takes of the READY groups, sorted: what is reserved, then the oldest."""
        num = self.config.groups_per_step
        if not self.reserved:
            return self.ready[:num]
        others = [place for place in self.ready[:num] if place not in self.reserved]
        return sorted(self.reserved + others[: num - len(self.reserved)])

    def next_reserved(self, version: int, *, in_bound: bool) -> list[int]:
        """Ids of READY groups that the step at `version` could take besides those that are reserved, oldest first.

        `in_bound`: no group that is due in that step may lose its place to them (docs/staleness.md, "Groups that a
        step takes early").
        """
        num, due = self.config.groups_per_step, Counter(self._due)
        for expires, _ in self.reserved:
            due[expires] -= 1
        places = num - len(self.reserved)
        chosen: list[int] = []
        for expires, group_id in self.ready:
            if len(chosen) == places or (expires, group_id) in self.reserved:
                continue
            if in_bound:
                due[expires] -= 1
                due[version] += len(self.reserved) + len(chosen) + 1
                fits = is_feasible(due, version - 1, num)
                due[version] -= len(self.reserved) + len(chosen) + 1
                if not fits:
                    break
            chosen.append(group_id)
        return chosen

    def leaves_a_feasible_rest(self, version: int, lag: int) -> bool:
        """Whether all groups that the step at `version` would leave behind can still be trained in bound."""
        num = self.config.groups_per_step
        # Whatever has no token yet may get its first one under the oldest version before the next step.
        if len(self.groups) - min(num, len(self.ready)) > self.config.most_in_bound(lag + 1):
            return False
        left, taken_before, next_taken = {}, 0, self.next_taken()
        for due in sorted(self._due):
            taken = min(num, bisect_left(next_taken, (due, math.inf)))  # with this deadline or an earlier one
            left[due] = self._due[due] - (taken - taken_before)
            taken_before = taken
        return is_feasible(left, version, num)

    def to_drop(self, version: int) -> list[int]:
        """See Scheduler.to_drop."""
        if self.config.masks:  # an unfinished group still gets tokens that are in bound
            return sorted(group_id for expires, group_id in self.ready if expires < version)
        stale = [group_id for group_id, held in self.groups.items() if held.deadline < version]
        assert not (stale and self.config.finish_first), f"finish_first let groups {stale} pass the staleness bound"
        return stale

    def urgencies(self, version: int) -> dict[float, int]:
        """Deadline -> urgency: see staleness.urgencies."""
        return urgencies(self._due, version, self.config.groups_per_step)

    # Private

    def _expiry(self, group: Group) -> float:
        return expiry(group, self.config.max_staleness, masks=self.config.masks)

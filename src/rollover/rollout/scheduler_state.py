"""State of the scheduler: the held groups by deadline, and the engine's slots with the queue for them.

    HeldGroups   deadlines, how many groups are due when, READY groups in the order of consumption
    StartQueue   rollouts that may start, one heap per deadline
    Slots        running rollouts, order of parking and resumption, token budgets of a round, limit on continuations

Never decides who runs, leaves or waits (scheduler.py does), and never changes a group or a rollout. The cost of a
change does not grow with the held groups, except for a look-up in a sorted list.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollover.config.rollout import RolloutConfig
from rollover.rollout.order import OrderKey, RolloutView, load_order
from rollover.staleness import NO_DEADLINE, is_feasible
from rollover.types import Group, Rollout, RolloutState

ReadyKey = tuple[float, int]  # RolloutConfig.expiry, group id


@dataclass(slots=True, eq=False)
class HeldGroup:
    """Scheduling data of a held group."""

    group: Group
    admitted_at: int
    """Trainer version."""
    unfinished: int
    """Rollouts that still generate or act."""
    deadline: float = NO_DEADLINE
    """Of its oldest token. NO_DEADLINE before the first token; with overlap, before the first start."""
    ready_key: ReadyKey | None = None
    """Its entry in the sorted list of READY groups."""


class HeldGroups:
    """Held groups by id.

    `ready`: keys of the READY ones, sorted. `reserved`: those that the next step takes before all others, sorted.
    `due`: number of groups by deadline. `num_scoring`: groups that are complete, but not READY yet.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.groups: dict[int, HeldGroup] = {}
        self.ready: list[ReadyKey] = []
        self.reserved: list[ReadyKey] = []
        self.due: Counter[float] = Counter()
        self.num_scoring = 0
        self._num_finished = 0  # rollouts whose generation has stopped
        self._num_enough = config.num_enough

    def __len__(self) -> int:
        return len(self.groups)

    # Changes

    def add(self, group: Group, admitted_at: int, unfinished: int) -> HeldGroup:
        """Hold a group with this number of unfinished rollouts. Its tokens, if any, determine its deadline."""
        held = self.groups[group.group_id] = HeldGroup(group, admitted_at, unfinished)
        self._num_finished += len(group.rollouts) - unfinished
        self.num_scoring += not unfinished
        self.set_deadline(held, self.config.deadline(group.min_version))
        return held

    def finish(self, rollout: Rollout) -> bool:
        """Count a rollout as finished. Returns whether its whole group is finished now."""
        held = self.groups[rollout.group_id]
        held.unfinished -= 1
        self._num_finished += 1
        self.num_scoring += not held.unfinished
        return not held.unfinished

    def join(self, group_id: int) -> None:
        """Add a rollout to the group, which is not READY."""
        held = self.groups[group_id]
        self.num_scoring -= not held.unfinished
        held.unfinished += 1

    def unfinish(self, group_id: int) -> None:
        """Count a finished rollout of the group, which is not READY, as unfinished again."""
        self.join(group_id)
        self._num_finished -= 1

    def leave(self, group_id: int, num: int, unfinished: int) -> None:
        """Remove `num` rollouts, `unfinished` of them unfinished, from the group, which keeps an unfinished one."""
        held = self.groups[group_id]
        held.unfinished -= unfinished
        self._num_finished -= num - unfinished
        assert held.unfinished > 0

    def set_deadline(self, held: HeldGroup, new: float) -> None:
        self._count_due(held, -1)
        held.deadline = new
        self._count_due(held, 1)

    def lower_deadline(self, group_id: int, version: int | None) -> bool:
        """Note that the group may have a token of this version. Returns whether its deadline is earlier now."""
        held, new = self.groups[group_id], self.config.deadline(version)
        if new >= held.deadline:
            return False
        self.set_deadline(held, new)
        return True

    def set_ready(self, held: HeldGroup) -> None:
        """Mark a group whose rollouts all have rewards as READY."""
        self.num_scoring -= 1
        # It may be later now: with overlap the start assumed older weights, and an Episode may have lost its old
        # tokens.
        self.set_deadline(held, self.config.deadline(held.group.min_version))
        held.ready_key = (self.config.expiry(held.group), held.group.group_id)
        insort(self.ready, held.ready_key)

    def reserve(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            key = self.groups[group_id].ready_key
            assert key is not None, f"group {group_id} is not READY"
            insort(self.reserved, key)

    def remove(self, group_id: int) -> HeldGroup:
        held = self.groups.pop(group_id)
        self._num_finished -= len(held.group.rollouts) - held.unfinished
        if held.ready_key is not None:
            del self.ready[bisect_left(self.ready, held.ready_key)]
            if held.ready_key in self.reserved:
                self.reserved.remove(held.ready_key)
        elif not held.unfinished:
            self.num_scoring -= 1
        self._count_due(held, -1)
        return held

    def _count_due(self, held: HeldGroup, by: int) -> None:
        if held.deadline == NO_DEADLINE:
            return
        self.due[held.deadline] += by
        if not self.due[held.deadline]:
            del self.due[held.deadline]

    # Queries

    def is_enough(self, stream_ended: bool) -> bool:
        """Return whether there are enough groups for a step, the staleness bound aside."""
        num_ready = len(self.ready)
        if stream_ended and num_ready == len(self.groups):
            return True
        if self.config.complete_by == "group":
            return num_ready >= self._num_enough
        return num_ready > 0 and self._num_finished >= self._num_enough * self.config.rollouts_per_group

    def next_taken(self) -> list[ReadyKey]:
        """Return the READY groups that a step takes, sorted: the reserved ones, then the oldest."""
        num = self.config.groups_per_step
        if not self.reserved:
            return self.ready[:num]
        others = [key for key in self.ready[:num] if key not in self.reserved]
        return sorted(self.reserved + others[: num - len(self.reserved)])

    def next_reserved(self, version: int, *, in_bound: bool) -> list[int]:
        """Return ids of READY groups that the step at `version` could reserve besides the reserved ones, oldest first.

        `in_bound`: a group that is due in that step never loses its place to them (docs/staleness.md, "Groups that a
        step takes early").
        """
        num, due = self.config.groups_per_step, Counter(self.due)
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

    def is_rest_feasible(self, version: int, lag: int) -> bool:
        """Return whether all groups that the step at `version` leaves behind can still be trained in bound."""
        num = self.config.groups_per_step
        # A group without tokens may get its first one under the oldest version before the next step.
        if len(self.groups) - min(num, len(self.ready)) > self.config.max_groups_in_bound(lag + 1):
            return False
        left, taken_before, next_taken = {}, 0, self.next_taken()
        for due in sorted(self.due):
            taken = min(num, bisect_left(next_taken, (due, math.inf)))  # with this deadline or an earlier one
            left[due] = self.due[due] - (taken - taken_before)
            taken_before = taken
        return is_feasible(left, version, num)


Entry = tuple[bool, OrderKey, str]  # is waiting, the order's key, rollout id


class StartQueue:
    """Rollouts that may start: one heap per group deadline. Outdated heap entries are skipped when popped."""

    def __init__(self) -> None:
        # A heap entry is outdated unless `_queued` has it for its rollout.
        self._queues: defaultdict[float, list[Entry]] = defaultdict(list)
        self._queued: dict[str, tuple[float, Entry, Rollout]] = {}

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._queued

    @property
    def deadlines(self) -> list[float]:
        """Return the deadlines that have a heap."""
        return list(self._queues)

    def put(self, rollout: Rollout, deadline: float, key: OrderKey, waiting: bool) -> None:
        """Queue a rollout, or move it. Waiting rollouts come after parked ones."""
        entry = (waiting, key, rollout.rollout_id)
        self._queued[rollout.rollout_id] = (deadline, entry, rollout)
        heapq.heappush(self._queues[deadline], entry)

    def discard(self, rollout_id: str) -> None:
        self._queued.pop(rollout_id, None)

    def take(self, num: int, ranks: Mapping[float, float]) -> list[Rollout]:
        """Pop the first `num` rollouts, by the rank of their deadline."""
        if num >= len(self._queued):  # sorting all at once is much faster than popping one by one
            everyone = sorted((ranks[deadline], entry, rollout) for deadline, entry, rollout in self._queued.values())
            self._queued.clear()
            self._queues.clear()
            return [rollout for _, _, rollout in everyone]
        firsts: list[tuple[float, Entry, float]] = []  # heap of (rank, first entry, deadline) of the queues
        for due in self.deadlines:
            if (entry := self._first(due)) is not None:
                heapq.heappush(firsts, (ranks[due], entry, due))
        taken: list[Rollout] = []
        while firsts and len(taken) < num:
            rank, entry, deadline = firsts[0]
            taken.append(self._queued.pop(entry[2])[2])
            if (entry := self._first(deadline)) is not None:
                heapq.heapreplace(firsts, (rank, entry, deadline))
            else:
                heapq.heappop(firsts)
        return taken

    def _first(self, deadline: float) -> Entry | None:
        """Return the first entry of this heap, after popping outdated ones."""
        queue, queued = self._queues[deadline], self._queued
        while queue:
            entry = queue[0]
            current = queued.get(entry[2])
            if current is not None and current[1] is entry:
                return entry
            heapq.heappop(queue)
        del self._queues[deadline]
        return None


# Needed at every parking; Enum member lookups are slow.
_WAITING, _ACTING = RolloutState.WAITING, RolloutState.ACTING
_MUST_FINISH = -1  # deadline before all others: the heap of rollouts that may not be interrupted again


class Slots:
    """The engine's slots, and the rollouts that wait for one. `held`: HeldGroups.groups.

    `running`: rollouts with a slot. `must_finish`: ids of running ones that may not be interrupted again.
    """

    def __init__(self, config: RolloutConfig, held: Mapping[int, HeldGroup]) -> None:
        self.config, self.held = config, held
        self.running: set[Rollout] = set()
        self.must_finish: set[str] = set()
        self._order = load_order(config.order)
        self.queue = StartQueue()
        self._spent: dict[str, Rollout] = {}  # by id: rollouts without token budget left in this round
        self._parked_since: dict[str, int] = {}  # by rollout id: sequence number of its last parking
        self._next_parking = 0

    @property
    def round_is_over(self) -> bool:
        """Return whether all unfinished rollouts, at least one, have used up their token budget."""
        return bool(self._spent) and not (self.running or self.queue)

    def enqueue(self, rollout: Rollout) -> None:
        """Queue a rollout that may start, or move it after its group's deadline changed."""
        waiting = rollout.state is _WAITING
        key = (rollout.group_id, rollout.sibling) if waiting else self._order(self._view(rollout))
        deadline = self.held[rollout.group_id].deadline if self.config.finish_first else NO_DEADLINE
        if self.config.next_run_is_last(rollout):
            deadline = _MUST_FINISH
        self.queue.put(rollout, deadline, key, waiting)

    def on_new_deadline(self, group: Group) -> None:
        for sibling in group.rollouts:
            if sibling.rollout_id in self.queue:
                self.enqueue(sibling)

    def take(self, num: int, urgency: Mapping[float, int]) -> list[Rollout]:
        """Pop the first `num` rollouts: by urgency of the group, parked before waiting, then by order key."""
        ranks = {deadline: urgency.get(deadline, math.inf) for deadline in self.queue.deadlines}
        ranks[_MUST_FINISH] = -1
        return self.queue.take(num, ranks)

    def next_round(self) -> None:
        """Renew the token budget of every rollout."""
        spent, self._spent = self._spent, {}
        for rollout in spent.values():
            self.enqueue(rollout)

    # Transitions

    def on_start(self, rollout: Rollout) -> None:
        self.queue.discard(rollout.rollout_id)
        self._spent.pop(rollout.rollout_id, None)
        self.running.add(rollout)
        if self.config.next_run_is_last(rollout):
            self.must_finish.add(rollout.rollout_id)

    def on_park(self, rollout: Rollout) -> None:
        """Free the slot of an unfinished rollout that was parked or acts; or queue an acting one that was parked."""
        self.on_finish(rollout)
        if rollout.state is _ACTING:
            self.queue.discard(rollout.rollout_id)  # the first rollout of an Episode: its agent acts before it starts
            return
        self._parked_since[rollout.rollout_id] = self._next_parking
        self._next_parking += 1
        if self.config.interrupt == "token_budget":
            self._spent[rollout.rollout_id] = rollout
        else:
            self.enqueue(rollout)

    def on_finish(self, rollout: Rollout) -> None:
        self.running.discard(rollout)  # an acting rollout has no slot
        self.must_finish.discard(rollout.rollout_id)

    def remove(self, rollout: Rollout) -> None:
        """Remove a rollout, which does not run, from the queue."""
        self.queue.discard(rollout.rollout_id)
        self._spent.pop(rollout.rollout_id, None)
        self._parked_since.pop(rollout.rollout_id, None)

    def on_leave(self, held: HeldGroup) -> None:
        """Remove the rollouts of a group that left. None of them runs."""
        for rollout in held.group.rollouts:
            self._parked_since.pop(rollout.rollout_id, None)
            if held.unfinished:
                self.queue.discard(rollout.rollout_id)
                self._spent.pop(rollout.rollout_id, None)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON: the order of parking."""
        return {"parked_since": dict(self._parked_since), "next_parking": self._next_parking}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next_parking = state["next_parking"]
        self._parked_since.update(state["parked_since"])

    # Private

    def _view(self, rollout: Rollout) -> RolloutView:
        group_id, num_tokens = rollout.group_id, rollout.num_tokens
        remaining, admitted_at = self.config.max_new_tokens - num_tokens, self.held[group_id].admitted_at
        # A rollout that ran when the snapshot was taken was never parked: it comes last.
        parked_since = self._parked_since.get(rollout.rollout_id, self._next_parking)
        # Positional arguments: keywords take twice as long, and every parking creates a view.
        return RolloutView(
            rollout.rollout_id, group_id, rollout.sibling, num_tokens, remaining, admitted_at, parked_since
        )

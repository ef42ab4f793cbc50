"""The slots of the engine: who runs, and who may start or go on next, in which order.

Owns the order of parking and of resumption, the token budgets of a phase, and the limit on continuations. Never decides
how many may run or which groups are urgent (the scheduler does), and never starts anything.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rollover.config.rollout import RolloutConfig
from rollover.rollout.held_groups import Held
from rollover.rollout.order import OrderKey, RolloutView, load_order
from rollover.staleness import NO_DEADLINE
from rollover.types import Group, Rollout, RolloutState, StopReason

Entry = tuple[bool, OrderKey, str]  # is waiting, the order's key, rollout id


class StartQueue:
    """One heap for each deadline of a group. What left, or stands elsewhere by now, is passed over when it comes up."""

    def __init__(self) -> None:
        # An entry is void unless it is the one that `_queued` has of the rollout.
        self._queues: defaultdict[float, list[Entry]] = defaultdict(list)
        self._queued: dict[str, tuple[float, Entry, Rollout]] = {}

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._queued

    @property
    def deadlines(self) -> list[float]:
        """All under which something may stand."""
        return list(self._queues)

    def put(self, rollout: Rollout, deadline: float, key: OrderKey, waiting: bool) -> None:
        """Queue it, or move it to another place. What waits comes after what is parked."""
        entry = (waiting, key, rollout.rollout_id)
        self._queued[rollout.rollout_id] = (deadline, entry, rollout)
        heapq.heappush(self._queues[deadline], entry)

    def discard(self, rollout_id: str) -> None:
        self._queued.pop(rollout_id, None)

    def take(self, num: int, ranks: Mapping[float, int]) -> list[Rollout]:
        """The first `num`, of those with the smallest rank of their deadline first."""
        if num >= len(self._queued):  # all of them: sorted at once, which is much faster than one by one
            everyone = sorted((ranks[deadline], entry, rollout) for deadline, entry, rollout in self._queued.values())
            self._queued.clear()
            self._queues.clear()
            return [rollout for _, _, rollout in everyone]
        firsts: list[tuple[int, Entry, float]] = []  # heap of (rank, first entry, deadline) of the queues
        for deadline in self.deadlines:
            if (entry := self._first(deadline)) is not None:
                heapq.heappush(firsts, (ranks[deadline], entry, deadline))
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
        """The first of this queue. Takes what is void off its head."""
        queue, queued = self._queues[deadline], self._queued
        while queue:
            entry = queue[0]
            current = queued.get(entry[2])
            if current is not None and current[1] is entry:
                return entry
            heapq.heappop(queue)
        del self._queues[deadline]
        return None


# Needed at every parking, and a member of an Enum class is slow to look up.
_WAITING, _ACTING, _PAUSED = RolloutState.WAITING, RolloutState.ACTING, StopReason.PAUSED
_MUST_FINISH = -1  # a deadline before all others: the queue of rollouts that may not be interrupted again


class Slots:
    """Slots for the rollouts of the groups in `held`, by group id, which the scheduler keeps up to date.

    `running`: the rollouts that have a slot. `must_finish`: ids of those among them that may not be interrupted again.
    `queue`: the rollouts that may start.
    """

    def __init__(self, config: RolloutConfig, held: Mapping[int, Held]) -> None:
        self.config, self.held = config, held
        self.running: set[Rollout] = set()
        self.must_finish: set[str] = set()
        self._order = load_order(config.order)
        self.queue = StartQueue()
        self._spent: dict[str, Rollout] = {}  # by id: those that have used up their token budget of this round
        self._parked_since: dict[str, int] = {}  # by rollout id: the number of its last parking
        self._next_parking = 0

    @property
    def round_is_over(self) -> bool:
        """Whether some rollouts have used up their token budget, and no other one runs or may start."""
        return bool(self._spent) and not (self.running or self.queue)

    def enqueue(self, rollout: Rollout) -> None:
        """Queue a rollout that may start, or move it to the place that its group's new deadline gives it."""
        waiting = rollout.state is _WAITING
        key = (rollout.group_id, rollout.sibling) if waiting else self._order(self._view(rollout))
        deadline = self.held[rollout.group_id].deadline if self.config.finish_first else NO_DEADLINE
        if was_continued_enough(rollout, self.config.max_continuations):
            deadline = _MUST_FINISH
        self.queue.put(rollout, deadline, key, waiting)

    def on_new_deadline(self, group: Group) -> None:
        for sibling in group.rollouts:
            if sibling.rollout_id in self.queue:
                self.enqueue(sibling)

    def take(self, num: int, urgency: Mapping[float, int]) -> list[Rollout]:
        """The first `num` that may start: by the urgency of their group's deadline, the parked ones before the waiting
        ones, and then by the order's key."""
        not_urgent = self.config.max_staleness + 1
        ranks = {deadline: urgency.get(deadline, not_urgent) for deadline in self.queue.deadlines}
        ranks[_MUST_FINISH] = -1
        return self.queue.take(num, ranks)

    def next_round(self) -> None:
        """Every rollout has its whole token budget again."""
        spent, self._spent = self._spent, {}
        for rollout in spent.values():
            self.enqueue(rollout)

    # What was done

    def on_start(self, rollout: Rollout) -> None:
        self.queue.discard(rollout.rollout_id)
        self._spent.pop(rollout.rollout_id, None)
        self.running.add(rollout)
        if was_continued_enough(rollout, self.config.max_continuations):
            self.must_finish.add(rollout.rollout_id)

    def on_park(self, rollout: Rollout) -> None:
        """The rollout left its slot unfinished: it is parked (WAITING again if it has no token), or acts. Or it does no
        longer act, and is parked."""
        self.on_finish(rollout)
        if rollout.state is _ACTING:
            self.queue.discard(rollout.rollout_id)  # one that had not started, where an agent is at work first
            return
        self._parked_since[rollout.rollout_id] = self._next_parking
        self._next_parking += 1
        if self.config.interrupt == "token_budget":
            self._spent[rollout.rollout_id] = rollout
        else:
            self.enqueue(rollout)

    def on_finish(self, rollout: Rollout) -> None:
        self.running.discard(rollout)  # one that acts had left
        self.must_finish.discard(rollout.rollout_id)

    def forget(self, rollout: Rollout) -> None:
        """It starts no more, for now or for good. It does not run."""
        self.queue.discard(rollout.rollout_id)
        self._spent.pop(rollout.rollout_id, None)
        self._parked_since.pop(rollout.rollout_id, None)

    def on_leave(self, held: Held) -> None:
        """The group left. None of its rollouts runs."""
        for rollout in held.group.rollouts:
            self._parked_since.pop(rollout.rollout_id, None)
            if held.unfinished:
                self.queue.discard(rollout.rollout_id)
                self._spent.pop(rollout.rollout_id, None)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the order of parking."""
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
        # By position, in the order of the fields: by name takes twice as long, and every parking makes one.
        return RolloutView(
            rollout.rollout_id, group_id, rollout.sibling, num_tokens, remaining, admitted_at, parked_since
        )


def was_continued_enough(rollout: Rollout, max_continuations: int) -> bool:
    """Whether the next run of an unfinished rollout must be its last. `max_continuations` 0: there is no limit."""
    if not max_continuations:
        return False
    return sum(s.trainable and s.stop_reason is _PAUSED for s in rollout.segments) >= max_continuations


def token_budget(rollout: Rollout, config: RolloutConfig) -> int:
    """Tokens after which a rollout that starts now is interrupted; 0: it is not."""
    if config.interrupt != "token_budget" or was_continued_enough(rollout, config.max_continuations):
        return 0
    return config.token_budget

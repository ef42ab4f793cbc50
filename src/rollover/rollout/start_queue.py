"""What may start, in order: rollouts that wait or are parked, by urgency, then by the order's key.

Owns the heaps. Never decides who is urgent, and never starts anything: the scheduler does.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

from rollover.rollout.order import OrderKey
from rollover.types import Rollout

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

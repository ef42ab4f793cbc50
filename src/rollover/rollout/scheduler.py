"""The scheduler: what is admitted, started, interrupted, consumed and dropped. A pure state machine.

Owns slots, ages and the order of parking and resumption. It is told of every transition (`on_*`, by Lifecycle) and
answers questions. Never changes a rollout (RolloutCache does), never waits, never reads a clock. What it keeps grows
with the groups held; the cost of an answer does not.

Invariants: at most `config.most_held` groups are held; a step takes at most `groups_per_step` groups, and exactly so
many unless complete_fraction, complete_by or the end of the task stream allow fewer; no token in the loss is staler
than `max_staleness` (proof in docs/staleness.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollover.config.rollout import RolloutConfig
from rollover.rollout.order import RolloutView, load_order
from rollover.rollout.oversubscription import LengthEstimate
from rollover.rollout.staleness import expiry, group_deadline, is_feasible, urgencies
from rollover.rollout.start_queue import StartQueue
from rollover.types import Group, Rollout, RolloutState

_UNFINISHED = (RolloutState.WAITING, RolloutState.RUNNING, RolloutState.PARKED)
_WAITING = RolloutState.WAITING  # asked at every parking, and a member of an Enum class is slow to look up
_MUST_FINISH = -1  # a deadline before all others: the queue of rollouts that may not be interrupted again
_NO_DEADLINE = math.inf


@dataclass(slots=True, eq=False)
class _Held:
    """What the scheduler knows of a held group. `deadline`: see staleness.group_deadline; inf before the first token,
    with overlap before the first start.

    `place`: its entry in the sorted list of READY groups.
    """

    group: Group
    admitted_at: int
    unfinished: int
    deadline: float = _NO_DEADLINE
    place: tuple[float, int] | None = None


class Scheduler:
    """Decides over the held groups.

    `max_running`: at most so many rollouts run at once, the others wait for a slot; None means no limit.
    Raises ValueError for a config under which a step could become impossible.
    """

    def __init__(self, config: RolloutConfig, max_running: int | None = None) -> None:
        self.config = config
        self.max_running = max_running
        self.finish_first = config.finish_first
        self.lengths = LengthEstimate()
        self.in_flight_groups = config.first_in_flight
        self.next_version = 0  # the trainer's at the step that is generated for
        self.lag = 0  # versions that a token sampled from now on is behind it at most
        self._num_enough = config.num_enough
        self._has_budget = config.interrupt == "token_budget"
        self._max_continuations, self._max_staleness = config.max_continuations, config.max_staleness
        self._order = load_order(config.order)
        self._held: dict[int, _Held] = {}
        self._ready: list[tuple[float, int]] = []  # (expiry, group id), sorted: the order of consumption
        self._reserved: list[tuple[float, int]] = []  # those that the next step takes before all others, sorted
        self._due: Counter[float] = Counter()  # deadline -> held groups
        self._running: set[Rollout] = set()
        self._finished = 0  # rollouts of held groups whose generation stopped
        self._scoring = 0  # groups that are complete, but not READY yet
        self._must_finish: set[str] = set()  # running rollouts that may not be interrupted again
        self._queue = StartQueue()  # what may start
        self._spent: dict[str, Rollout] = {}  # had their token budget of this phase
        self._parked_since: dict[str, int] = {}
        self._next_parking = 0
        self._refuse_impossible()

    def _refuse_impossible(self) -> None:
        config = self.config
        if self.in_flight_groups < config.groups_per_step:
            raise ValueError(
                f"rollout.in_flight_groups = {self.in_flight_groups} is below rollout.groups_per_step ="
                f" {config.groups_per_step}: a step would never have enough groups. Raise it, or set it to 0."
            )
        if self.finish_first and config.most_held > config.most_in_bound:
            raise ValueError(
                f"rollout.in_flight_groups = {self.in_flight_groups}: {config.most_held} groups held at once are above"
                f" (1 + rollout.max_staleness) * rollout.groups_per_step = {config.most_in_bound}:"
                ' on_stale = "finish_first" cannot keep the bound. Lower it, raise'
                ' rollout.max_staleness, or set rollout.on_stale = "drop".'
            )
        if self.max_running is not None and self.max_running < 1:
            raise ValueError(f"max_running = {self.max_running} must be at least 1")

    # Questions

    def num_to_admit(self) -> int:
        """How many new tasks may be admitted now."""
        places = self.in_flight_groups - len(self._held)
        if self.config.supplement and not self._enough(stream_ended=False):
            places = min(places + len(self._ready) + self._scoring, self.config.most_held - len(self._held))
        if self.lag:
            # A first token is `lag` versions old already at the next step (docs/staleness.md, generation goes on).
            most = self.config.most_in_bound - self.lag * self.config.groups_per_step
            if self.config.on_stale != "mask":
                places = min(places, most - len(self._held))
            elif most <= 0:
                return 0
        return max(0, places)

    def to_start(self, version: int) -> list[Rollout]:
        """Who gets the free slots: the rollouts that start or resume now, in order.

        Parked ones by the order function, then waiting ones by group id. Rollouts that may not be interrupted again
        precede all others; under finish_first, next are those of groups that the step at `version` cannot do without.
        """
        if self._spent and not (self._running or self._queue or self._scoring):
            self._next_round()
        if not self._queue:
            return []
        free = len(self._queue) if self.max_running is None else self.max_running - len(self._running)
        return self._take(free, version) if free > 0 else []

    def token_budget(self, rollout: Rollout) -> int:
        """Tokens after which a rollout that starts now is interrupted; 0: it is not.

        One that may not be interrupted again has no budget.
        """
        if not self._has_budget or self._was_continued_enough(rollout):
            return 0
        return self.config.token_budget

    def to_consume(self, version: int, stream_ended: bool = False) -> list[int] | None:
        """Ids of the groups that the step at trainer version `version` takes, oldest first; None: not enough yet.

        With `interrupt = "never"` a step waits for every rollout in flight, with "token_budget" for everyone's budget.
        Once enough, it stays enough while running rollouts wind down, though older groups may then take precedence:
        ask again before consuming.
        At the end of the task stream a last, smaller step takes what is left ([] if nothing is).
        """
        config = self.config
        if not self._enough(stream_ended):
            return None
        all_ready = len(self._ready) == len(self._held)
        waits_for_all = config.interrupt == "never" and not config.overlap
        if not all_ready and (waits_for_all or self._must_finish):
            return None
        if config.interrupt == "token_budget" and (self._running or self._queue or self._scoring):
            return None
        if self.finish_first and not self._leaves_a_feasible_rest(version):
            return None
        return [i for _, i in self._next_taken()]

    def to_reserve(self, version: int, at_least: int) -> list[int]:
        """Ids of READY groups that the step at `version` will take, whatever else gets ready for it; oldest first.

        At least so many, or as many as its batch has places left; [] if there are not that many yet. No group that is
        due in this step may lose its place to them (staleness.py, 4).
        """
        config, due = self.config, Counter(self._due)
        for expires, _ in self._reserved:
            due[expires] -= 1
        places = config.groups_per_step - len(self._reserved)
        chosen: list[int] = []
        for expires, group_id in self._ready:
            if len(chosen) == places or (expires, group_id) in self._reserved:
                continue
            if self.finish_first:
                due[expires] -= 1
                due[version] += len(self._reserved) + len(chosen) + 1
                fits = is_feasible(due, version - 1, config.groups_per_step)
                due[version] -= len(self._reserved) + len(chosen) + 1
                if not fits:
                    break
            chosen.append(group_id)
        return chosen if chosen and len(chosen) >= min(at_least, places) else []

    def to_interrupt(self, version: int, stream_ended: bool = False) -> list[str]:
        """Ids of the running rollouts to interrupt now, in group order: all of them, once there is enough."""
        if not self._running or self.to_consume(version, stream_ended) is None:
            return []
        return [r.rollout_id for r in sorted(self._running, key=lambda r: (r.group_id, r.sibling))]

    def is_too_late(self, group: Group) -> bool:
        """Whether the step that is generated for, and every later one, finds none of the group's tokens in bound.

        Only with "mask": what gets READY after new weights are live may have tokens of earlier ones alone.
        """
        too_late = expiry(group, self.config) < self.next_version
        assert not (too_late and self.finish_first), f"group {group.group_id} is READY beyond the staleness bound"
        return too_late

    def to_drop(self, version: int) -> list[int]:
        """Ids of the groups that can no longer be trained in bound, right after `version` was published."""
        if self.config.on_stale == "mask":
            # An unfinished group still gets tokens that are in bound.
            return sorted(i for expires, i in self._ready if expires < version)
        stale = [i for i, held in self._held.items() if held.deadline < version]
        assert not (stale and self.finish_first), f"finish_first let groups {stale} pass the staleness bound"
        return stale

    def check_held(self, version: int) -> None:
        """ValueError if groups that another config left behind cannot be trained in bound by this one."""
        if not self.finish_first:
            return
        in_time = is_feasible(self._due, version - 1, self.config.groups_per_step)
        if len(self._held) > self.config.most_in_bound or not in_time:
            raise ValueError(
                f"--resume: the {len(self._held)} groups that the checkpoint holds cannot all be trained with"
                f" rollout.max_staleness = {self.config.max_staleness} and rollout.groups_per_step ="
                f" {self.config.groups_per_step}. Set them back to what the run had (config.resolved.json), or set"
                ' rollout.on_stale = "drop" to lose groups that get too old'
            )

    # What was done

    def on_begin(self, next_version: int, lag: int) -> None:
        """Generation is for the step at `next_version` now; tokens may be up to `lag` versions behind that."""
        self.next_version, self.lag = next_version, lag

    def on_admit(self, group: Group, version: int) -> None:
        self._held[group.group_id] = _Held(group, version, len(group.rollouts))
        for rollout in group.rollouts:
            self._enqueue(rollout)

    def on_start(self, rollout: Rollout, version: int) -> None:
        self._queue.discard(rollout.rollout_id)
        self._spent.pop(rollout.rollout_id, None)
        self._running.add(rollout)
        if self.config.overlap:
            # Its segments come when it stops, perhaps under later weights than those of its first token.
            self._lower_deadline(self._held[rollout.group_id], version - self.lag + self._max_staleness)
        if self._was_continued_enough(rollout):
            self._must_finish.add(rollout.rollout_id)

    def on_append(self, rollout: Rollout) -> None:
        """The running rollout got segments."""
        held = self._held[rollout.group_id]
        oldest = rollout.min_version
        if oldest is not None:
            self._lower_deadline(held, oldest + self._max_staleness)

    def on_park(self, rollout: Rollout) -> None:
        """A running rollout was parked (it is WAITING again if it has no token)."""
        self._running.remove(rollout)
        self._parked_since[rollout.rollout_id] = self._next_parking
        self._next_parking += 1
        self._must_finish.discard(rollout.rollout_id)
        if self._has_budget:
            self._spent[rollout.rollout_id] = rollout
        else:
            self._enqueue(rollout)

    def on_finish(self, rollout: Rollout) -> bool:
        """The generation of a running rollout stopped. Returns whether its whole group is finished now."""
        self._running.remove(rollout)
        self._finished += 1
        held = self._held[rollout.group_id]
        held.unfinished -= 1
        self._must_finish.discard(rollout.rollout_id)
        if held.unfinished:
            return False
        self._scoring += 1
        return True

    def on_ready(self, group: Group) -> None:
        """All rollouts of the group have their rewards."""
        self._set_ready(self._held[group.group_id], group)
        self.lengths.observe([r.num_tokens for r in group.rollouts])

    def _set_ready(self, held: _Held, group: Group) -> None:
        self._scoring -= 1
        if self.config.overlap and (deadline := group_deadline(group, self._max_staleness)) is not None:
            self._set_deadline(held, deadline)  # perhaps later than its start had to suppose
        held.place = (expiry(group, self.config), group.group_id)
        insort(self._ready, held.place)

    def on_reserve(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            place = self._held[group_id].place
            assert place is not None, f"group {group_id} is not READY"
            insort(self._reserved, place)

    def clear_reserved(self) -> None:
        """The step that groups were reserved for is not trained now."""
        self._reserved.clear()

    def on_leave(self, group: Group) -> None:
        """The group was consumed or dropped. None of its rollouts runs."""
        held = self._held.pop(group.group_id)
        if held.place is not None:
            del self._ready[bisect_left(self._ready, held.place)]
            if held.place in self._reserved:
                self._reserved.remove(held.place)
        elif not held.unfinished:
            self._scoring -= 1
        self._count_due(held, -1)
        self._finished -= len(group.rollouts) - held.unfinished
        for rollout in group.rollouts:
            self._parked_since.pop(rollout.rollout_id, None)
            if held.unfinished:
                self._queue.discard(rollout.rollout_id)
                self._spent.pop(rollout.rollout_id, None)

    def on_give_back(self, group: Group, version: int) -> None:
        """A group that was consumed for the step at `version` is held again, READY."""
        self._hold_again(group, version)

    def on_publish(self) -> None:
        """New weights are live: choose the number of groups in flight, if it is ours to choose; a new phase begins."""
        self._next_round()
        if self.config.in_flight_groups == "auto":
            self.in_flight_groups = self.lengths.in_flight_groups(self.config, self.max_running)

    # Snapshots

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: ages, the order of parking, observed lengths."""
        return {
            "admitted_at": {str(i): held.admitted_at for i, held in self._held.items()},
            "parked_since": dict(self._parked_since),
            "next_parking": self._next_parking,
            "in_flight_groups": self.in_flight_groups,
            "lengths": self.lengths.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], groups: Iterable[Group]) -> None:
        """`groups`: the held ones, as RolloutCache restored them. Nothing runs; this scheduler holds nothing yet."""
        assert not self._held, "a state is loaded into a new scheduler"
        self._next_parking = state["next_parking"]
        if self.config.in_flight_groups == "auto":
            self.in_flight_groups = state.get("in_flight_groups", self.in_flight_groups)
        self._parked_since.update(state["parked_since"])
        for group in groups:
            self._hold_again(group, state["admitted_at"][str(group.group_id)])
        self.lengths.load_state_dict(state.get("lengths", {}))

    # Inside

    def _hold_again(self, group: Group, admitted_at: int) -> None:
        """Hold a group that has a history: none of its rollouts runs."""
        held = self._held[group.group_id] = _Held(group, admitted_at, 0)
        deadline = group_deadline(group, self.config.max_staleness)
        held.deadline = _NO_DEADLINE if deadline is None else deadline
        self._count_due(held, 1)
        for rollout in group.rollouts:
            if rollout.state in _UNFINISHED:
                held.unfinished += 1
                self._enqueue(rollout)
            else:
                self._finished += 1
        if not held.unfinished:
            self._scoring += 1
            if group.ready:
                self._set_ready(held, group)

    def _enough(self, stream_ended: bool) -> bool:
        """Whether a step has enough to train on, the staleness bound aside."""
        num_ready = len(self._ready)
        if stream_ended and num_ready == len(self._held):
            return True
        if self.config.complete_by == "group":
            return num_ready >= self._num_enough
        return num_ready > 0 and self._finished >= self._num_enough * self.config.rollouts_per_group

    def _leaves_a_feasible_rest(self, version: int) -> bool:
        """Whether all groups that the step at `version` would leave behind can still be trained in bound."""
        num = self.config.groups_per_step
        # Whatever has no token yet may get its first one under the oldest version before the next step.
        if len(self._held) - min(num, len(self._ready)) > (self.config.max_staleness - self.lag) * num:
            return False
        left, taken_before, next_taken = {}, 0, self._next_taken()
        for deadline in sorted(self._due):
            taken = min(num, bisect_left(next_taken, (deadline, math.inf)))  # with this deadline or an earlier one
            left[deadline] = self._due[deadline] - (taken - taken_before)
            taken_before = taken
        return is_feasible(left, version, num)

    def _next_taken(self) -> list[tuple[float, int]]:
        """(expiry, group id) of what a step takes of the READY groups, sorted: what is reserved, then the oldest."""
        num = self.config.groups_per_step
        if not self._reserved:
            return self._ready[:num]
        others = [place for place in self._ready[:num] if place not in self._reserved]
        return sorted(self._reserved + others[: num - len(self._reserved)])

    def _enqueue(self, rollout: Rollout) -> None:
        waiting = rollout.state is _WAITING
        key = (rollout.group_id, rollout.sibling) if waiting else self._order(self._view(rollout))
        deadline = self._held[rollout.group_id].deadline if self.finish_first else _NO_DEADLINE
        if self._was_continued_enough(rollout):
            deadline = _MUST_FINISH
        self._queue.put(rollout, deadline, key, waiting)

    def _take(self, num: int, version: int) -> list[Rollout]:
        """The first `num` of all queues: by urgency, then parked before waiting, then by the order's key."""
        urgency = urgencies(self._due, version, self.config.groups_per_step) if self.finish_first else {}
        not_urgent = self.config.max_staleness + 1
        ranks = {deadline: urgency.get(deadline, not_urgent) for deadline in self._queue.deadlines}
        ranks[_MUST_FINISH] = -1
        return self._queue.take(num, ranks)

    def _next_round(self) -> None:
        """Everyone has a token budget again."""
        spent, self._spent = self._spent, {}
        for rollout in spent.values():
            self._enqueue(rollout)

    def _was_continued_enough(self, rollout: Rollout) -> bool:
        """Whether the next run of an unfinished rollout is the last that max_continuations allows."""
        limit = self._max_continuations
        return limit > 0 and sum(s.trainable for s in rollout.segments) >= limit

    def _lower_deadline(self, held: _Held, deadline: float) -> None:
        if deadline >= held.deadline:
            return
        self._set_deadline(held, deadline)
        for sibling in held.group.rollouts:
            if sibling.rollout_id in self._queue:
                self._enqueue(sibling)

    def _set_deadline(self, held: _Held, deadline: float) -> None:
        self._count_due(held, -1)
        held.deadline = deadline
        self._count_due(held, 1)

    def _count_due(self, held: _Held, by: int) -> None:
        if held.deadline == _NO_DEADLINE:
            return
        self._due[held.deadline] += by
        if not self._due[held.deadline]:
            del self._due[held.deadline]

    def _view(self, rollout: Rollout) -> RolloutView:
        group_id, num_tokens = rollout.group_id, rollout.num_tokens
        remaining, admitted_at = self.config.max_new_tokens - num_tokens, self._held[group_id].admitted_at
        # A rollout that ran when the snapshot was taken was never parked: it comes last.
        parked_since = self._parked_since.get(rollout.rollout_id, self._next_parking)
        # By position, in the order of the fields: by name takes twice as long, and every parking makes one.
        return RolloutView(
            rollout.rollout_id, group_id, rollout.sibling, num_tokens, remaining, admitted_at, parked_since
        )

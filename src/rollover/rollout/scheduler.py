"""The scheduler: what is admitted, started, interrupted, consumed and dropped. A pure state machine.

Owns slots, ages and the order of parking and resumption. Never changes a rollout (RolloutCache does), never waits,
never reads a clock: it answers questions about the held groups and is told what was done (`on_*`).

Invariants: at most `in_flight_groups` groups are held; a step takes exactly `groups_per_step` groups, except the last
of a finite task stream; no trained token is staler than `max_staleness` (proof in staleness.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollover.config.rollout import RolloutConfig
from rollover.rollout.order import ORDERS, OrderKey, RolloutView
from rollover.rollout.staleness import group_deadline, in_flight_groups, is_feasible, is_stale, urgencies
from rollover.types import Group, Rollout, RolloutState

Groups = Mapping[int, Group]


class Scheduler:
    """Decides over the held groups (`RolloutCache.groups`).

    `max_running`: at most so many rollouts run at once, the others wait for a slot; None means no limit.
    Raises ValueError for a config under which a step could become impossible.
    """

    def __init__(self, config: RolloutConfig, max_running: int | None = None) -> None:
        self.config = config
        self.in_flight_groups = in_flight_groups(config)
        self.max_running = max_running
        self.finish_first = config.on_stale != "drop"
        self._order = ORDERS[config.order]
        self._admitted_at: dict[int, int] = {}
        self._parked_since: dict[str, int] = {}
        self._next_parking = 0
        most = (1 + config.max_staleness) * config.groups_per_step
        if self.in_flight_groups < config.groups_per_step:
            raise ValueError(
                f"rollout.in_flight_groups = {self.in_flight_groups} is below rollout.groups_per_step ="
                f" {config.groups_per_step}: a step would never have enough groups. Raise it, or set it to 0."
            )
        if self.finish_first and self.in_flight_groups > most:
            raise ValueError(
                f"rollout.in_flight_groups = {self.in_flight_groups} is above (1 + rollout.max_staleness) *"
                f' rollout.groups_per_step = {most}: on_stale = "finish_first" cannot keep the bound. Lower it, raise'
                ' rollout.max_staleness, or set rollout.on_stale = "drop".'
            )
        if max_running is not None and max_running < 1:
            raise ValueError(f"max_running = {max_running} must be at least 1")

    # Questions

    def num_to_admit(self, groups: Groups) -> int:
        """How many new tasks may be admitted now."""
        return max(0, self.in_flight_groups - len(groups))

    def to_start(self, groups: Groups, version: int) -> list[str]:
        """Ids of the rollouts that start or resume now, in order, as many as there are free slots.

        Parked ones by the order function, then waiting ones by group id. Under finish_first, rollouts of groups that
        the step at `version` cannot do without precede all others.
        """
        rollouts = [r for g in groups.values() for r in g.rollouts]
        candidates = [r for r in rollouts if r.state in (RolloutState.PARKED, RolloutState.WAITING)]
        if not candidates:
            return []
        deadlines = self._deadlines(groups) if self.finish_first else {}
        urgency = urgencies(deadlines.values(), version, self.config.groups_per_step)
        not_urgent = self.config.max_staleness + 1

        def key(rollout: Rollout) -> tuple[int, bool, OrderKey]:
            deadline = deadlines.get(rollout.group_id)
            rank = not_urgent if deadline is None else urgency.get(deadline, not_urgent)
            if rollout.state is RolloutState.WAITING:
                return rank, True, (rollout.group_id, rollout.sibling)
            return rank, False, self._order(self._view(rollout))

        candidates.sort(key=key)
        if self.max_running is not None:
            num_running = sum(r.state is RolloutState.RUNNING for r in rollouts)
            candidates = candidates[: max(0, self.max_running - num_running)]
        return [r.rollout_id for r in candidates]

    def to_consume(self, groups: Groups, version: int, stream_ended: bool = False) -> list[int] | None:
        """Ids of the groups that the step at trainer version `version` takes, oldest first; None: not enough yet.

        With `interrupt = "never"` a step waits for every rollout in flight. Once enough, it stays enough while running
        rollouts wind down, though older groups may then take precedence: ask again before consuming.
        At the end of the task stream a last, smaller step takes what is left ([] if nothing is).
        """
        num_wanted = self.config.groups_per_step
        ready = [g for g in groups.values() if g.ready]
        if len(groups) < num_wanted:
            # Everything left must be finished: there is no later group to wait with it.
            return self._oldest(ready) if stream_ended and len(ready) == len(groups) else None
        if len(ready) < num_wanted or (self.config.interrupt == "never" and len(ready) < len(groups)):
            return None
        chosen = self._oldest(ready)[:num_wanted]
        if self.finish_first:
            taken = set(chosen)
            left = [deadline for i, deadline in self._deadlines(groups).items() if i not in taken]
            if not is_feasible(left, version, num_wanted):
                return None
        return chosen

    def to_interrupt(self, groups: Groups, version: int, stream_ended: bool = False) -> list[str]:
        """Ids of the running rollouts to interrupt now: all of them, once there is enough for a step."""
        if self.config.interrupt == "never" or self.to_consume(groups, version, stream_ended) is None:
            return []
        return [r.rollout_id for g in groups.values() for r in g.rollouts if r.state is RolloutState.RUNNING]

    def to_drop(self, groups: Groups, version: int) -> list[int]:
        """Ids of the groups that can no longer be trained in bound, right after `version` was published."""
        stale = [i for i, g in groups.items() if is_stale(g, version, self.config.max_staleness)]
        assert not (stale and self.finish_first), f"finish_first let groups {stale} pass the staleness bound"
        return stale

    def check_held(self, groups: Groups, version: int) -> None:
        """ValueError if groups that another config left behind cannot be trained in bound by this one."""
        if not self.finish_first:
            return
        most = (1 + self.config.max_staleness) * self.config.groups_per_step
        if len(groups) > most or not is_feasible(
            self._deadlines(groups).values(), version - 1, self.config.groups_per_step
        ):
            raise ValueError(
                f"--resume: the {len(groups)} groups that the checkpoint holds cannot all be trained with"
                f" rollout.max_staleness = {self.config.max_staleness} and rollout.groups_per_step ="
                f" {self.config.groups_per_step}. Set them back to what the run had (config.resolved.json), or set"
                ' rollout.on_stale = "drop" to lose groups that get too old'
            )

    # What was done

    def on_admit(self, group: Group, version: int) -> None:
        self._admitted_at[group.group_id] = version

    def on_park(self, rollout: Rollout) -> None:
        self._parked_since[rollout.rollout_id] = self._next_parking
        self._next_parking += 1

    def on_leave(self, group: Group) -> None:
        """The group was consumed or dropped."""
        del self._admitted_at[group.group_id]
        for rollout in group.rollouts:
            self._parked_since.pop(rollout.rollout_id, None)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: ages and the order of parking."""
        return {
            "admitted_at": {str(i): version for i, version in self._admitted_at.items()},
            "parked_since": dict(self._parked_since),
            "next_parking": self._next_parking,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._admitted_at = {int(i): version for i, version in state["admitted_at"].items()}
        self._parked_since = dict(state["parked_since"])
        self._next_parking = state["next_parking"]

    def _view(self, rollout: Rollout) -> RolloutView:
        num_tokens = rollout.num_tokens
        return RolloutView(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            sibling=rollout.sibling,
            num_tokens=num_tokens,
            remaining=self.config.max_new_tokens - num_tokens,
            admitted_at=self._admitted_at[rollout.group_id],
            # A rollout that ran when the snapshot was taken was never parked: it comes last.
            parked_since=self._parked_since.get(rollout.rollout_id, self._next_parking),
        )

    def _deadlines(self, groups: Groups) -> dict[int, int]:
        """Group id -> deadline, of the groups that have one."""
        deadlines = {i: group_deadline(g, self.config.max_staleness) for i, g in groups.items()}
        return {i: deadline for i, deadline in deadlines.items() if deadline is not None}

    @staticmethod
    def _oldest(ready: list[Group]) -> list[int]:
        """By smallest policy version (the earliest deadline), then by id. A group without tokens is the newest."""

        def key(group: Group) -> tuple[bool, int, int]:
            version = group.min_version
            return version is None, version or 0, group.group_id

        return [g.group_id for g in sorted(ready, key=key)]

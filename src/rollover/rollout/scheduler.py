"""The scheduler decides which groups and rollouts are admitted, started, interrupted, consumed and dropped.

A pure state machine: Lifecycle reports every transition (`on_*`). scheduler_state.py keeps the held groups with their
deadlines, and the slots. Never changes a rollout (RolloutCache does), never waits, never reads a clock. Memory grows
with the held groups; the cost of a decision does not.

Invariants: at most `config.most_held` groups are held; a step takes at most `groups_per_step` groups, and exactly so
many unless complete_fraction, complete_by or the end of the task stream allow fewer; no token in the loss is staler
than `max_staleness` (proof in docs/staleness.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rollover.config.rollout import RolloutConfig
from rollover.rollout.scheduler_state import HeldGroups, Slots
from rollover.staleness import urgencies
from rollover.types import Group, Rollout, RolloutState

_MEMORY = 64  # groups over which the averages run
_STARTS = (RolloutState.WAITING, RolloutState.RUNNING, RolloutState.PARKED)
_UNFINISHED = (*_STARTS, RolloutState.ACTING)


class Scheduler:
    """Scheduler of the held groups.

    `max_running`: rollouts that run at once; the others wait for a slot. None means no limit.
    Raises ValueError for a config under which a step could become impossible.
    """

    def __init__(self, config: RolloutConfig, max_running: int | None = None) -> None:
        self.config = config
        self.max_running = max_running
        self.lengths = LengthEstimate()
        self.in_flight_groups = config.first_in_flight
        self.next_version = 0  # trainer version of the step that is generated for
        self.lag = 0  # maximum staleness at that step of a token sampled from now on
        self._held = HeldGroups(config)
        self._slots = Slots(config, self._held.groups)
        if self.in_flight_groups < config.groups_per_step or not config.holds_the_bound:
            raise ValueError(
                f"rollout.in_flight_groups = {config.in_flight_groups} is below rollout.groups_per_step, or more than"
                " rollout.max_staleness allows: a step could become impossible (load_config says what to change)"
            )
        if max_running is not None and max_running < 1:
            raise ValueError(f"max_running = {max_running} must be at least 1")

    # Decisions

    def num_to_admit(self) -> int:
        """Return how many new tasks may be admitted now."""
        held = self._held
        places = self.in_flight_groups - len(held)
        if self.config.supplement and not held.is_enough(stream_ended=False):
            places = min(places + len(held.ready) + held.num_scoring, self.config.most_held - len(held))
        if self.lag:
            # A first token is already `lag` versions old at the next step (docs/staleness.md).
            most = self.config.max_groups_in_bound(self.lag)
            if not self.config.masks:
                places = min(places, most - len(held))
            elif most <= 0:
                return 0
        return max(0, places)

    def to_start(self, version: int) -> list[Rollout]:
        """Return the rollouts that get the free slots, in order.

        Rollouts that may not be interrupted again come first; under finish_first, then those of groups that the step at
        `version` must take. Then parked ones by the order function, then waiting ones by group id.
        """
        slots = self._slots
        if slots.round_is_over and not self._held.num_scoring:
            slots.next_round()
        if not slots.queue:
            return []
        free = len(slots.queue) if self.max_running is None else self.max_running - len(slots.running)
        if free <= 0:
            return []
        urgent = urgencies(self._held.due, version, self.config.groups_per_step) if self.config.finish_first else {}
        return slots.take(free, urgent)

    def to_consume(self, version: int, stream_ended: bool = False) -> list[int] | None:
        """Return the ids of the groups for the step at trainer `version`, oldest first; None if there are not enough
        yet.

        With `interrupt = "never"` a step waits for every rollout in flight, with "token_budget" until all budgets are
        used. Enough stays enough while running rollouts wind down, but older groups may take precedence by then: call
        again before consuming. At the end of the task stream the last step may be smaller ([] if no group is left).
        """
        config, held, slots = self.config, self._held, self._slots
        if not held.is_enough(stream_ended):
            return None
        all_ready = len(held.ready) == len(held)
        waits_for_all = config.interrupt == "never" and not config.overlap
        if not all_ready and (waits_for_all or slots.must_finish):
            return None
        if config.interrupt == "token_budget" and (slots.running or slots.queue or held.num_scoring):
            return None
        if self.config.finish_first and not held.is_rest_feasible(version, self.lag):
            return None
        return [i for _, i in held.next_taken()]

    def reserve(self, version: int, at_least: int) -> list[int]:
        """Reserve READY groups for the step at `version`, whatever gets ready later. Returns their sorted ids.

        They stay held until the step consumes them. Returns at least `at_least` groups, or as many as its batch still
        needs; [] if there are fewer. A group that is due in this step never loses its place to them.
        """
        places = self.config.groups_per_step - len(self._held.reserved)
        chosen = self._held.next_reserved(version, in_bound=self.config.finish_first)
        if not chosen or len(chosen) < min(at_least, places):
            return []
        self._held.reserve(chosen)
        return sorted(chosen)

    def clear_reserved(self) -> None:
        """Release the reserved groups: the step that they were reserved for was abandoned."""
        self._held.reserved.clear()

    def to_interrupt(self, version: int, stream_ended: bool = False) -> list[str]:
        """Return the ids of the running rollouts to interrupt, in group order: all of them once there is enough."""
        running = self._slots.running
        if not running or self.to_consume(version, stream_ended) is None:
            return []
        return [r.rollout_id for r in sorted(running, key=lambda r: (r.group_id, r.sibling))]

    def to_drop(self, version: int) -> list[int]:
        """Return the ids of the groups beyond the staleness bound, now that the trainer is at `version`."""
        held = self._held
        if self.config.masks:  # an unfinished group still gets tokens that are in bound
            return sorted(group_id for expires, group_id in held.ready if expires < version)
        stale = [group_id for group_id, group in held.groups.items() if group.deadline < version]
        assert not (stale and self.config.finish_first), f"finish_first let groups {stale} pass the staleness bound"
        return stale

    # Transitions

    def begin_step(self, next_version: int, oldest_version: int) -> None:
        """Generate for the step at `next_version` from now on, under policy versions >= `oldest_version`."""
        self.next_version, self.lag = next_version, next_version - oldest_version

    def on_admit(self, group: Group, version: int) -> None:
        self._held.add(group, version, len(group.rollouts))
        for rollout in group.rollouts:
            self._slots.enqueue(rollout)

    def on_start(self, rollout: Rollout, version: int) -> None:
        self._slots.on_start(rollout)
        if self.config.overlap:
            # Its segments arrive when it stops, perhaps under later weights than its first token.
            self.on_tokens(rollout, version - self.lag)

    def on_tokens(self, rollout: Rollout, oldest_version: int | None) -> None:
        """Lower the group's deadline: the rollout may have tokens of `oldest_version` or later (None: no tokens)."""
        if self._held.lower_deadline(rollout.group_id, oldest_version):
            self._slots.on_new_deadline(self._held.groups[rollout.group_id].group)

    def on_park(self, rollout: Rollout) -> None:
        """Free the slot of a rollout that was parked or acts; or queue an acting one that was parked."""
        self._slots.on_park(rollout)

    def on_finish(self, rollout: Rollout) -> bool:
        """Finish a running or acting rollout. Returns whether its whole group is finished now."""
        self._slots.on_finish(rollout)
        return self._held.finish(rollout)

    def on_open(self, rollout: Rollout, *, joins: bool) -> None:
        """Queue a WAITING rollout of a held group that is not READY. `joins`: it is new in the group."""
        if joins:
            self._held.join(rollout.group_id)
        self._slots.enqueue(rollout)

    def on_restart(self, leaving: Sequence[Rollout], unfinished: int, by: Rollout) -> None:
        """Replace the `leaving` rollouts of a group, `unfinished` of them unfinished, by one. None of them runs."""
        self._held.join(by.group_id)
        self._held.leave(by.group_id, len(leaving), unfinished)
        for rollout in leaving:  # before the new one is queued, which has the id of the first of them
            self._slots.remove(rollout)
        self._slots.enqueue(by)

    def on_rerun_agent(self, rollout: Rollout, *, finished: bool) -> None:
        """Remove a rollout whose agent runs again from the queue. `finished`: it had been finished."""
        if finished:
            self._held.unfinish(rollout.group_id)
        self._slots.remove(rollout)

    def on_rollout_left(self, rollout: Rollout) -> None:
        """Remove an unfinished rollout, which does not run, from its group, which has others."""
        self._held.leave(rollout.group_id, 1, 1)
        self._slots.remove(rollout)

    def on_ready(self, group: Group) -> None:
        """Mark the group as READY: all its rollouts have rewards."""
        self._held.set_ready(self._held.groups[group.group_id])
        self.lengths.observe([r.num_tokens for r in group.rollouts])

    def on_leave(self, group: Group) -> None:
        """Remove a group that was consumed or dropped. None of its rollouts runs."""
        self._slots.on_leave(self._held.remove(group.group_id))

    def requeue(self, group: Group, admitted_at: int) -> None:
        """Hold an existing group again (a restored checkpoint, an untrained step). None of its rollouts runs."""
        unfinished = [r for r in group.rollouts if r.state in _UNFINISHED]
        held = self._held.add(group, admitted_at, len(unfinished))
        for rollout in unfinished:
            if rollout.state in _STARTS:
                self._slots.enqueue(rollout)
        if group.ready:
            self._held.set_ready(held)

    def on_new_version(self) -> None:
        """Renew the token budgets, and with "auto" the number of groups, for a new trainer version."""
        self._slots.next_round()
        if self.config.in_flight_groups == "auto":
            self.in_flight_groups = self.lengths.in_flight_groups(self.config, self.max_running)

    # Snapshots

    def state_dict(self) -> dict[str, Any]:
        """Return JSON: admission versions, the order of parking, observed lengths."""
        return {
            "admitted_at": {str(i): held.admitted_at for i, held in self._held.groups.items()},
            **self._slots.state_dict(),
            "in_flight_groups": self.in_flight_groups,
            "lengths": self.lengths.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], groups: Iterable[Group]) -> None:
        """Restore into a new scheduler. `groups`: the held ones, as RolloutCache restored them; none runs."""
        assert not len(self._held), "a state is loaded into a new scheduler only"
        if self.config.in_flight_groups == "auto":
            self.in_flight_groups = state.get("in_flight_groups", self.in_flight_groups)
        self._slots.load_state_dict(state)
        for group in groups:
            self.requeue(group, state["admitted_at"][str(group.group_id)])
        self.lengths.load_state_dict(state.get("lengths", {}))


class LengthEstimate:
    """Running means of rollout lengths, from which `rollout.in_flight_groups = "auto"` is computed.

    In tokens; 0 before the first group. A group is in progress while its longest sibling runs, so with all slots busy
    Little's law gives the groups in progress: slots / (group_size * mean length) groups start per decode step, and each
    stays for the length of its longest sibling. With fewer in flight, slots idle at the end of a phase; with more,
    groups only age. Up to one step of ready groups waits beside them.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.longest = 0.0
        self._num_groups = 0

    @property
    def spread(self) -> float:
        """Longest sibling by mean length, at least 1."""
        return max(1.0, self.longest / self.mean) if self.mean else 1.0

    def observe(self, lengths: list[int]) -> None:
        """Add the lengths of one finished group."""
        self._num_groups = min(self._num_groups + 1, _MEMORY)
        weight = 1 / self._num_groups
        self.mean += weight * (sum(lengths) / len(lengths) - self.mean)
        self.longest += weight * (max(lengths) - self.longest)

    def in_flight_groups(self, config: RolloutConfig, slots: int | None) -> int:
        """Return the groups to hold. `slots`: rollouts that can run at once (None: as many as a step trains)."""
        if slots is None:
            slots = config.groups_per_step * config.rollouts_per_group
        in_progress = math.ceil(slots / config.rollouts_per_group * self.spread)
        ready = 0 if config.supplement else config.groups_per_step
        return max(config.groups_per_step, min(in_progress + ready, config.most_in_flight))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "longest": self.longest, "num_groups": self._num_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; checkpoints older than this estimate have an empty state."""
        self.mean, self.longest = state.get("mean", 0.0), state.get("longest", 0.0)
        self._num_groups = state.get("num_groups", 0)

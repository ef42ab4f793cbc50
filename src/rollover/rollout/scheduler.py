"""The scheduler: what is admitted, started, interrupted, consumed and dropped. A pure state machine.

Owns the decisions; what they rest on is kept by held_groups.py (groups, deadlines, the order of consumption) and
slots.py (who runs, and the order of resumption). It is told of every transition (`on_*`, by Lifecycle) and answers
questions. Never changes a rollout (RolloutCache does), never waits, never reads a clock. What it keeps grows with the
groups held; the cost of an answer does not.

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
from rollover.types import Group, Rollout, RolloutState

_MEMORY = 64  # groups over which the averages run


class LengthEstimate:
    """Running means of a rollout's length, and of the longest of a group. In tokens; 0 before the first group."""

    def __init__(self) -> None:
        self.mean = 0.0
        self.longest = 0.0
        self._num_groups = 0

    @property
    def spread(self) -> float:
        """Longest sibling by mean length, at least 1."""
        return max(1.0, self.longest / self.mean) if self.mean else 1.0

    def observe(self, lengths: list[int]) -> None:
        """The lengths of one finished group."""
        self._num_groups = min(self._num_groups + 1, _MEMORY)
        weight = 1 / self._num_groups
        self.mean += weight * (sum(lengths) / len(lengths) - self.mean)
        self.longest += weight * (max(lengths) - self.longest)

    def in_flight_groups(self, config: RolloutConfig, slots: int | None) -> int:
        """Groups to hold from now on. `slots`: rollouts that can run at once (None: as many as a step trains)."""
        if slots is None:
            slots = config.groups_per_step * config.rollouts_per_group
        in_progress = math.ceil(slots / config.rollouts_per_group * self.spread)
        ready = 0 if config.supplement else config.groups_per_step
        return max(config.groups_per_step, min(in_progress + ready, config.most_in_flight))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "longest": self.longest, "num_groups": self._num_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """An empty state, of a checkpoint older than this estimate, begins anew."""
        self.mean, self.longest = state.get("mean", 0.0), state.get("longest", 0.0)
        self._num_groups = state.get("num_groups", 0)


_STARTS = (RolloutState.WAITING, RolloutState.RUNNING, RolloutState.PARKED)
_UNFINISHED = (*_STARTS, RolloutState.ACTING)


class Scheduler:
    """Decides over the held groups.

    `max_running`: at most so many rollouts run at once, the others wait for a slot; None means no limit.
    Raises ValueError for a config under which a step could become impossible.
    """

    def __init__(self, config: RolloutConfig, max_running: int | None = None) -> None:
        self.config = config
        self.max_running = max_running
        self.lengths = LengthEstimate()
        self.in_flight_groups = config.first_in_flight
        self.next_version = 0  # the trainer's at the step that is generated for
        self.lag = 0  # versions that a token sampled from now on is behind it at most
        self._held = HeldGroups(config)
        self._slots = Slots(config, self._held.groups)
        if self.in_flight_groups < config.groups_per_step or not config.holds_the_bound:
            raise ValueError(
                f"rollout.in_flight_groups = {config.in_flight_groups} is below rollout.groups_per_step, or more than"
                " rollout.max_staleness allows: a step could become impossible (load_config says what to change)"
            )
        if max_running is not None and max_running < 1:
            raise ValueError(f"max_running = {max_running} must be at least 1")

    # Questions

    def num_to_admit(self) -> int:
        """How many new tasks may be admitted now."""
        held = self._held
        places = self.in_flight_groups - len(held)
        if self.config.supplement and not held.is_enough(stream_ended=False):
            places = min(places + len(held.ready) + held.num_scoring, self.config.most_held - len(held))
        if self.lag:
            # A first token is `lag` versions old already at the next step (docs/staleness.md, generation goes on).
            most = self.config.most_in_bound(self.lag)
            if not self.config.masks:
                places = min(places, most - len(held))
            elif most <= 0:
                return 0
        return max(0, places)

    def to_start(self, version: int) -> list[Rollout]:
        """Who gets the free slots: the rollouts that start or resume now, in order.

        Parked ones by the order function, then waiting ones by group id. Rollouts that may not be interrupted again
        precede all others; under finish_first, next are those of groups that the step at `version` cannot do without.
        """
        slots = self._slots
        if slots.round_is_over and not self._held.num_scoring:
            slots.next_round()
        if not slots.queue:
            return []
        free = len(slots.queue) if self.max_running is None else self.max_running - len(slots.running)
        if free <= 0:
            return []
        return slots.take(free, self._held.urgencies(version) if self.config.finish_first else {})

    def to_consume(self, version: int, stream_ended: bool = False) -> list[int] | None:
        """Ids of the groups that the step at trainer version `version` takes, oldest first; None: not enough yet.

        With `interrupt = "never"` a step waits for every rollout in flight, with "token_budget" for everyone's budget.
        Once enough, it stays enough while running rollouts wind down, though older groups may then take precedence:
        ask again before consuming.
        At the end of the task stream a last, smaller step takes what is left ([] if nothing is).
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
        if self.config.finish_first and not held.leaves_a_feasible_rest(version, self.lag):
            return None
        return [i for _, i in held.next_taken()]

    def reserve(self, version: int, at_least: int) -> list[int]:
        """Sorted ids of READY groups that the step at `version` takes from now on, whatever else gets ready for it.

        They stay held, and leave with the others of that step. At least so many, or as many as its batch has places
        left; [] if there are not that many yet. No group that is due in this step may lose its place to them.
        """
        places = self.config.groups_per_step - len(self._held.reserved)
        chosen = self._held.next_reserved(version, in_bound=self.config.finish_first)
        if not chosen or len(chosen) < min(at_least, places):
            return []
        self._held.reserve(chosen)
        return sorted(chosen)

    def forget_reserved(self) -> None:
        """The step that groups were reserved for is not made: it takes them as it takes all others."""
        self._held.reserved.clear()

    def to_interrupt(self, version: int, stream_ended: bool = False) -> list[str]:
        """Ids of the running rollouts to interrupt now, in group order: all of them, once there is enough."""
        running = self._slots.running
        if not running or self.to_consume(version, stream_ended) is None:
            return []
        return [r.rollout_id for r in sorted(running, key=lambda r: (r.group_id, r.sibling))]

    def to_drop(self, version: int) -> list[int]:
        """Ids of the groups that can no longer be trained in bound, now that the trainer is at `version`."""
        return self._held.to_drop(version)

    # What was done

    def on_begin(self, next_version: int, oldest_version: int) -> None:
        """From now on generation is for the step at `next_version`, under policy versions from `oldest_version` on."""
        self.next_version, self.lag = next_version, next_version - oldest_version

    def on_admit(self, group: Group, version: int) -> None:
        self._held.add(group, version, len(group.rollouts))
        for rollout in group.rollouts:
            self._slots.enqueue(rollout)

    def on_start(self, rollout: Rollout, version: int) -> None:
        self._slots.on_start(rollout)
        if self.config.overlap:
            # Its segments come when it stops, perhaps under later weights than those of its first token.
            self.on_tokens(rollout, version - self.lag)

    def on_tokens(self, rollout: Rollout, oldest_version: int | None) -> None:
        """The rollout may have tokens of policy versions from this one on (None: none): its group may be due sooner."""
        if self._held.lower_deadline(rollout.group_id, oldest_version):
            self._slots.on_new_deadline(self._held.groups[rollout.group_id].group)

    def on_park(self, rollout: Rollout) -> None:
        """A running rollout was parked (it is WAITING again if it has no token), or acts; an acting one was parked."""
        self._slots.on_park(rollout)

    def on_finish(self, rollout: Rollout) -> bool:
        """The generation of a running or acting rollout stopped. Returns whether its whole group is finished now."""
        self._slots.on_finish(rollout)
        return self._held.finish(rollout)

    def on_open(self, rollout: Rollout, *, joins: bool) -> None:
        """A rollout of a held group that is not READY may start, and is WAITING. `joins`: the group had not had it."""
        if joins:
            self._held.join(rollout.group_id)
        self._slots.enqueue(rollout)

    def on_restart(self, leaving: Sequence[Rollout], unfinished: int, by: Rollout) -> None:
        """These rollouts of a group left it, so many of them unfinished, for one that may start. None of them runs."""
        self._held.join(by.group_id)
        self._held.leave(by.group_id, len(leaving), unfinished)
        for rollout in leaving:  # before the new one is queued: it has the id of the first of them
            self._slots.forget(rollout)
        self._slots.enqueue(by)

    def on_act_again(self, rollout: Rollout, *, finished: bool) -> None:
        """A rollout of a group that is not READY does not start, as its agent is at work. `finished`: it was."""
        if finished:
            self._held.unfinish(rollout.group_id)
        self._slots.forget(rollout)

    def on_rollout_left(self, rollout: Rollout) -> None:
        """An unfinished rollout left its group, which has others. It does not run."""
        self._held.leave(rollout.group_id, 1, 1)
        self._slots.forget(rollout)

    def on_ready(self, group: Group) -> None:
        """All rollouts of the group have their rewards."""
        self._held.set_ready(self._held.groups[group.group_id])
        self.lengths.observe([r.num_tokens for r in group.rollouts])

    def on_leave(self, group: Group) -> None:
        """The group was consumed or dropped. None of its rollouts runs."""
        self._slots.on_leave(self._held.remove(group.group_id))

    def hold_again(self, group: Group, admitted_at: int) -> None:
        """Hold a group that has a history: none of its rollouts runs."""
        unfinished = [r for r in group.rollouts if r.state in _UNFINISHED]
        held = self._held.add(group, admitted_at, len(unfinished))
        for rollout in unfinished:
            if rollout.state in _STARTS:
                self._slots.enqueue(rollout)
        if group.ready:
            self._held.set_ready(held)

    def on_new_version(self) -> None:
        """The trainer is at a new version: everyone has a token budget again, and "auto" sets the number of groups."""
        self._slots.next_round()
        if self.config.in_flight_groups == "auto":
            self.in_flight_groups = self.lengths.in_flight_groups(self.config, self.max_running)

    # Snapshots

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: ages, the order of parking, observed lengths."""
        return {
            "admitted_at": {str(i): held.admitted_at for i, held in self._held.groups.items()},
            **self._slots.state_dict(),
            "in_flight_groups": self.in_flight_groups,
            "lengths": self.lengths.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], groups: Iterable[Group]) -> None:
        """`groups`: the held ones, as RolloutCache restored them. Nothing runs; this scheduler holds nothing yet."""
        assert not len(self._held), "a state is loaded into a new scheduler"
        if self.config.in_flight_groups == "auto":
            self.in_flight_groups = state.get("in_flight_groups", self.in_flight_groups)
        self._slots.load_state_dict(state)
        for group in groups:
            self.hold_again(group, state["admitted_at"][str(group.group_id)])
        self.lengths.load_state_dict(state.get("lengths", {}))

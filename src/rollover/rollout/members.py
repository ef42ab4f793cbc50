"""Which groups are held, and which rollouts they have: those of an Episode come and go with the calls of its agent.

Owns the groups, the rollouts by id and the legal transitions between states. RolloutCache is built on it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rollover.types import Group, Rollout, RolloutState

_LEGAL = {
    RolloutState.WAITING: {RolloutState.RUNNING, RolloutState.ACTING, RolloutState.DROPPED},
    RolloutState.RUNNING: {RolloutState.WAITING, RolloutState.PARKED, RolloutState.ACTING, RolloutState.SCORING},
    RolloutState.ACTING: {RolloutState.WAITING, RolloutState.PARKED, RolloutState.SCORING, RolloutState.DROPPED},
    RolloutState.PARKED: {RolloutState.RUNNING, RolloutState.DROPPED},
    RolloutState.SCORING: {RolloutState.READY, RolloutState.DROPPED},
    RolloutState.READY: {RolloutState.CONSUMED, RolloutState.DROPPED},
    RolloutState.CONSUMED: set(),
    RolloutState.DROPPED: set(),
}


class Members:
    """`groups`: the held groups by id, in order of admission; read-only."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self.groups: Mapping[int, Group] = MappingProxyType(self._groups)
        self._rollouts: dict[str, Rollout] = {}

    def begin_acting(self, rollout_id: str) -> None:
        """WAITING, without a token, -> ACTING: the agent of its Episode is at work, before its first call."""
        rollout = self._rollouts[rollout_id]
        assert not rollout.segments, f"rollout {rollout_id} has tokens: its Episode has begun"
        move(rollout, RolloutState.ACTING)

    def open(self, rollout: Rollout) -> Rollout:
        """`rollout` joins its group, WAITING. Where there is one of this id, it must be without a token: it gets the
        prompt and the role, and is WAITING again. Returns the one that is held."""
        assert rollout.state is RolloutState.WAITING and rollout.prompt_ids
        held = self._rollouts.get(rollout.rollout_id)
        if held is None:
            self._join(rollout)
            return rollout
        assert not held.segments, f"rollout {rollout.rollout_id} is open already"
        held.prompt_ids, held.role = rollout.prompt_ids, rollout.role
        if held.state is not RolloutState.WAITING:
            move(held, RolloutState.WAITING)
        return held

    def replace(self, leaving: Sequence[Rollout], by: Rollout) -> None:
        """These rollouts of one group leave, DROPPED; `by` takes their place."""
        group = self._groups[by.group_id]
        for rollout in leaving:
            move(rollout, RolloutState.DROPPED)
            rollout.stop_reason = rollout.stop_reason if rollout.reward is not None else None
            group.rollouts.remove(rollout)
            del self._rollouts[rollout.rollout_id]
        self._join(by)

    def _join(self, rollout: Rollout) -> None:
        group = self._groups[rollout.group_id]
        rollout.greedy = rollout.greedy or any(r.greedy for r in group.rollouts if r.sibling == rollout.sibling)
        insort(group.rollouts, rollout, key=lambda r: (r.sibling, r.trajectory, r.context))
        self._rollouts[rollout.rollout_id] = rollout

    def _hold(self, group: Group) -> None:
        self._groups[group.group_id] = group
        self._rollouts.update((r.rollout_id, r) for r in group.rollouts)


def move(rollout: Rollout, state: RolloutState) -> None:
    """Into another state. AssertionError where that is no legal transition."""
    assert state in _LEGAL[rollout.state], (
        f"rollout {rollout.rollout_id}: {rollout.state.value} -> {state.value} is not a legal transition"
    )
    rollout.state = state

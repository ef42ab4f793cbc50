"""Which groups are held, and which rollouts they have: those of an Episode come and go with the calls of its agent.

Owns the groups, the rollouts by id and the legal transitions between states. RolloutCache is built on it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollover.trajectories import up_to
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
_HELD = {state for state, after in _LEGAL.items() if after}


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
        assert rollout.state is RolloutState.WAITING and rollout.prompt
        held = self._rollouts.get(rollout.rollout_id)
        if held is None:
            self._join(rollout)
            return rollout
        assert not held.segments, f"rollout {rollout.rollout_id} is open already"
        held.prompt, held.role, held.turn_key = rollout.prompt, rollout.role, rollout.turn_key
        if held.state is not RolloutState.WAITING:
            move(held, RolloutState.WAITING)
        return held

    def act_again(self, rollout_id: str) -> None:
        """The agent of its Episode was lost, and another one is at work: ACTING, whatever it did. Without a stop reason
        its turn has not ended. It does not run. (Not in `_LEGAL`: nothing else may do this.)"""
        rollout = self._rollouts[rollout_id]
        assert rollout.state in _HELD and rollout.state is not RolloutState.RUNNING, f"{rollout_id} runs, or is gone"
        if rollout.stop_reason is not None:  # that of its turn: the agent may have given it up
            rollout.stop_reason = up_to(rollout, rollout.num_tokens).stop_reason
        rollout.state, rollout.reward = RolloutState.ACTING, None

    def cut(self, rollout_id: str, num_tokens: int) -> Rollout:
        """What comes after so many tokens of an ACTING rollout leaves, and the rollout with it where those are none and
        its Episode has others. Returns the rollout that left, or the shorter one that is held in its place."""
        rollout = self._rollouts[rollout_id]
        group = self._groups[rollout.group_id]
        assert rollout.state is RolloutState.ACTING, f"rollout {rollout_id} is {rollout.state.value}"
        if not num_tokens and sum(r.sibling == rollout.sibling for r in group.rollouts) > 1:
            self._leave(rollout)
            return rollout
        shorter = up_to(rollout, num_tokens)
        group.rollouts[group.rollouts.index(rollout)] = self._rollouts[rollout_id] = shorter
        return shorter

    def keep(self, group_id: int, sibling: int, name: str, value: Any) -> None:
        """An Episode of the group keeps this over a kill."""
        self._groups[group_id].kept.setdefault(sibling, {})[name] = value

    def replace(self, leaving: Sequence[Rollout], by: Rollout) -> None:
        """These rollouts of one group leave, DROPPED; `by` takes their place."""
        for rollout in leaving:
            self._leave(rollout)
        self._join(by)

    def _leave(self, rollout: Rollout) -> None:
        move(rollout, RolloutState.DROPPED)
        rollout.stop_reason = rollout.stop_reason if rollout.reward is not None else None
        self._groups[rollout.group_id].rollouts.remove(rollout)
        del self._rollouts[rollout.rollout_id]

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

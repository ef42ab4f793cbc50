"""Times of rollouts in each state, and length bias: metrics that need the history of the rollouts.

Owns the history of every held rollout (seconds in each state, trainer versions of admission and READY) and the lengths
of all that left; both are in the checkpoint. A listener of Lifecycle, whose events have times. Pure: no torch, no event
loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollover.rollout.lifecycle import Event, EventKind
from rollover.track.statistics import censored_mean
from rollover.types import Group, Rollout, RolloutState

_ACTING = RolloutState.ACTING
STATES = tuple(s for s in RolloutState if s not in (RolloutState.CONSUMED, RolloutState.DROPPED))


@dataclass(slots=True)
class _Life:
    """History of one rollout: its state, the time of the last change, and the seconds in earlier states."""

    state: RolloutState
    since: float
    seconds: dict[str, float]

    def move(self, state: RolloutState, now: float) -> None:
        self.seconds[self.state.value] = self.seconds.get(self.state.value, 0.0) + now - self.since
        self.state, self.since = state, now


@dataclass(slots=True)
class _GroupLife:
    """History of a held or consumed group, with the trainer versions of its admission, READY and consumption."""

    group: Group
    admitted_at: int
    lives: dict[str, _Life]
    """By rollout id."""
    ready_at: int | None = None
    consumed_at: int | None = None

    @property
    def in_order(self) -> list[_Life]:
        """Histories in the order of the rollouts."""
        return [self.lives[rollout.rollout_id] for rollout in self.group.rollouts]

    @property
    def waited(self) -> int:
        """Policy versions between admission and the step that trained it."""
        assert self.consumed_at is not None
        return self.consumed_at - self.admitted_at


class LengthBias:
    """Lengths of all trained and of all dispatched rollouts (with a token), since step 1."""

    def __init__(self) -> None:
        self.trained_rollouts = 0
        self.trained_tokens = 0
        self.finished: Counter[int] = Counter()  # length -> rollouts whose generation stopped
        self.unfinished: Counter[int] = Counter()  # length -> rollouts that were dropped unfinished

    def add_trained(self, group: Group, times: int) -> None:
        self.trained_rollouts += times * len(group.rollouts)
        self.trained_tokens += times * sum(r.num_tokens for r in group.rollouts)

    def ratio(self, held: Iterable[int]) -> float:
        """Return mean length of trained / mean length of dispatched rollouts; NaN before the first was trained.

        `held`: current lengths of the held, unfinished rollouts. These lengths and those of dropped rollouts are lower
        bounds, so the denominator is the Kaplan-Meier mean. 1: no bias; below 1: training sees short rollouts first.
        """
        if not self.trained_tokens:
            return float("nan")
        censored = self.unfinished + Counter(length for length in held if length)
        return self.trained_tokens / self.trained_rollouts / censored_mean(self.finished, censored)


class Lifetimes:
    """The history of the held groups, and of those consumed since the last `step_metrics`."""

    def __init__(self) -> None:
        self.bias = LengthBias()
        self._held: dict[int, _GroupLife] = {}
        self._consumed: list[_GroupLife] = []

    def on_event(self, event: Event) -> None:
        group, kind, version, now = event.group, event.kind, event.trainer_version, event.seconds
        if kind in (EventKind.SCORE, EventKind.KEEP):
            return  # a rollout stays SCORING until its group is scored
        if kind is EventKind.ADMIT:
            self._hold(group, version, now)
            return
        if kind is EventKind.GIVE_BACK:
            self._give_back(group)
        held = self._held[group.group_id]
        if kind in (EventKind.OPEN, EventKind.RESTART, EventKind.CUT):
            self._on_members(held, now)
        for rollout in group.rollouts if event.rollout is None else (event.rollout,):
            if (life := held.lives.get(rollout.rollout_id)) is None:
                continue  # not in the group any more
            if kind is EventKind.AGAIN and life.state in (RolloutState.SCORING, RolloutState.READY):
                self.bias.finished[rollout.num_tokens] -= 1  # it continues
            life.move(rollout.state, now)
        if kind is EventKind.FINISH and event.rollout is not None:
            self.bias.finished[event.rollout.num_tokens] += 1
        elif kind is EventKind.READY:
            held.ready_at = version
        elif kind is EventKind.CONSUME:
            held.consumed_at = version
            self._consumed.append(self._held.pop(group.group_id))
            self.bias.add_trained(group, 1)
        elif kind is EventKind.DROP:
            del self._held[group.group_id]
            self.bias.unfinished.update(r.num_tokens for r in group.rollouts if _is_unfinished(r) and r.num_tokens)

    def _on_members(self, held: _GroupLife, now: float) -> None:
        members = {r.rollout_id: r for r in held.group.rollouts}
        held.lives = {i: held.lives.get(i) or _Life(r.state, now, {}) for i, r in members.items()}

    def _give_back(self, group: Group) -> None:
        held = next(g for g in self._consumed if g.group is group)
        self._consumed.remove(held)
        self._held[group.group_id], held.consumed_at = held, None
        self.bias.add_trained(group, -1)

    @property
    def ready_versions(self) -> dict[int, int]:
        """Group id -> trainer version when it became READY, of the groups consumed since the last `step_metrics`."""
        return {g.group.group_id: g.ready_at for g in self._consumed if g.ready_at is not None}

    def step_metrics(self) -> dict[str, float]:
        """Return the state/ and bias/ metrics of the groups consumed since the last call, {} without groups."""
        consumed, self._consumed = self._consumed, []
        if not consumed:
            return {}
        trained = [(r, g) for g in consumed for r in g.group.rollouts if not r.greedy]  # baselines are not trained
        lives = [g.lives[r.rollout_id] for r, g in trained]
        rollouts = [(r.num_tokens, g.waited) for r, g in trained]
        held = [r.num_tokens for g in self._held.values() for r in g.group.rollouts if _is_unfinished(r)]
        acted = any(_ACTING.value in life.seconds for life in lives)
        states = [s for s in STATES if acted or s is not _ACTING]
        return {
            **{f"state/{s.value}_s": float(np.mean([i.seconds.get(s.value, 0.0) for i in lives])) for s in states},
            "bias/trained_vs_dispatched_length": self.bias.ratio(held),
            **wait_by_quarter(*map(list, zip(*rollouts, strict=True))),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state; call `step_metrics` before."""
        return {
            "groups": {
                str(group_id): {
                    "admitted_at": held.admitted_at,
                    "ready_at": held.ready_at,
                    "lives": [[life.state.value, life.since, life.seconds] for life in held.in_order],
                }
                for group_id, held in self._held.items()
            },
            "trained": [self.bias.trained_rollouts, self.bias.trained_tokens],
            "finished": list(self.bias.finished.items()),
            "cut": list(self.bias.unfinished.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any], groups: Iterable[Group], version: int, now: float) -> None:
        """Restore the state. `groups`: the held ones, as RolloutCache restored them.

        A group that is missing in the state (an older checkpoint) begins now, at trainer `version`.
        """
        self.bias, self._held, self._consumed = LengthBias(), {}, []
        for group in groups:
            held = self._hold(group, version, now)
            saved = state.get("groups", {}).get(str(group.group_id))
            if saved is None:
                held.ready_at = version if group.ready else None
                self.bias.finished.update(r.num_tokens for r in group.rollouts if not _is_unfinished(r))
                continue
            held.admitted_at, held.ready_at = saved["admitted_at"], saved["ready_at"]
            for i, (state_then, since, seconds) in enumerate(saved["lives"]):
                rollout = group.rollouts[i]
                life = held.lives[rollout.rollout_id] = _Life(RolloutState(state_then), since, dict(seconds))
                if life.state is not rollout.state:  # running rollouts are parked by now
                    life.move(rollout.state, now)
        self.bias.trained_rollouts, self.bias.trained_tokens = state.get("trained", (0, 0))
        self.bias.finished.update(dict(state.get("finished", ())))
        self.bias.unfinished.update(dict(state.get("cut", ())))

    def _hold(self, group: Group, version: int, now: float) -> _GroupLife:
        held = _GroupLife(group, version, {r.rollout_id: _Life(r.state, now, {}) for r in group.rollouts})
        self._held[group.group_id] = held
        return held


def wait_by_quarter(lengths: list[int], waits: list[int]) -> dict[str, float]:
    """Return bias/wait_steps_q1 (shortest quarter of the rollouts) to q4: means of `waits`, NaN for an empty
    quarter."""
    by_length = np.asarray(waits, dtype=float)[np.argsort(lengths, kind="stable")]
    quarters = enumerate(np.array_split(by_length, 4), start=1)
    return {f"bias/wait_steps_q{i}": float(q.mean()) if len(q) else float("nan") for i, q in quarters}


def _is_unfinished(rollout: Rollout) -> bool:
    return rollout.stop_reason is None or rollout.state is _ACTING

"""What the recorded episodes of an earlier run say about lengths, turns, and how long environments worked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollover.track.trace import TraceEvent, acts
from rollover.trajectories import turns_of
from rollover.types import Group


class Played:
    """Counts the episodes of groups; those of several rollouts are planned as one, of all their turns."""

    def __init__(self) -> None:
        self._episodes = self._turns = self._told = 0

    def lengths(self, group: Group) -> list[int]:
        """Sampled tokens of each episode of the group, at least 1."""
        lengths: dict[int, int] = {}
        for rollout in group.rollouts:
            lengths[rollout.sibling] = lengths.get(rollout.sibling, 0) + rollout.num_sampled_tokens
            self._turns += len(turns_of(rollout))
            self._told += rollout.num_tokens - rollout.num_sampled_tokens
        self._episodes += len(lengths)
        return [max(1, length) for length in lengths.values()]

    def turns(self, events: Callable[[], Iterable[TraceEvent]]) -> dict[str, Any]:
        """Values of [plan], of the episodes so far and of the trace of their run; {} where they had one turn each."""
        turns = round(self._turns / max(1, self._episodes))
        if turns < 2:
            return {}
        between = self._turns - self._episodes
        values: dict[str, Any] = {"turns": turns, "tool_tokens": max(1, round(self._told / between))}
        worked = [act.seconds for act in acts(list(events())) if act.goes_on]
        return values | ({"tool_s": sum(worked) / len(worked)} if worked else {})

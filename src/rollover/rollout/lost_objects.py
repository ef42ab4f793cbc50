"""Rollouts whose environment has lost what it knew of them, with the process or as it failed: they begin again.

Also brings the states of objects to and from what groups keep over a kill (Group.kept). Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollover.envs.class_environment import ClassEnvironment
from rollover.rollout.episode_moves import keep, restart_episode
from rollover.rollout.lifecycle import Lifecycle
from rollover.types import Rollout, RolloutState

KEPT_AS = "environment"  # the name of such a state in Group.kept
_MAY_BE_LOST = (RolloutState.PARKED, RolloutState.ACTING, RolloutState.SCORING)


class LostObjects:
    """Of one driver. `environment`: the run's, if it has objects of a class. `forget` is told the ids of rollouts that
    begin again."""

    def __init__(
        self, lifecycle: Lifecycle, environment: ClassEnvironment | None, forget: Callable[[list[str]], None]
    ) -> None:
        self.lifecycle, self.environment, self._forget = lifecycle, environment, forget
        if environment is not None and lifecycle.cache.first_group_id >= 0:  # an evaluation keeps no state over a kill
            environment.states.on_kept = self._keep

    def go_on(self, under_way: Collection[str], leaving: Collection[int]) -> None:
        """The environment gets the states that are kept, and what it has lost begins again. `under_way`: ids of
        rollouts at which it is at work; `leaving`: of groups that leave anyway."""
        if self.environment is None:
            return
        for group in list(self.lifecycle.cache.groups.values()):
            if group.group_id in leaving:
                continue
            for sibling, kept in group.kept.items():
                if (state := kept.get(KEPT_AS)) is not None:
                    self.environment.states.recall((group.group_id, sibling), state)
            for rollout in [r for r in group.rollouts if r.state in _MAY_BE_LOST and r.rollout_id not in under_way]:
                if self.environment.has_lost(rollout):
                    self.begin_again(rollout)

    def begin_again(self, rollout: Rollout) -> None:
        """Its tokens are dropped (restarted), and one without a token comes in its place."""
        group, place = self.lifecycle.cache.groups[rollout.group_id], (rollout.group_id, rollout.sibling)
        self._forget([rollout.rollout_id])
        if self.environment is not None:
            self.environment.release([rollout])
            self.environment.states.num_restarted += rollout.group_id >= 0
        if group.kept.get(rollout.sibling, {}).get(KEPT_AS) is not None:
            self._keep(place, None)
        restart_episode(self.lifecycle, group, rollout.sibling)

    def _keep(self, place: tuple[int, int], state: Mapping[str, Any] | None) -> None:
        if place[0] in self.lifecycle.cache.groups:
            keep(self.lifecycle, *place, KEPT_AS, state)

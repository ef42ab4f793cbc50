"""Which trajectories are compared for a baseline: those of a Group by role, or by a custom function.

Checks roles against [workflow.roles], and that a custom grouping is a partition: a lost trajectory would not be
trained, a doubled one twice. Plain values, no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollover.algorithms.filters import Metric, value_of
from rollover.algorithms.precomputed import is_precomputed
from rollover.config import DistillConfig, RoleConfig, WorkflowConfig
from rollover.functions import CustomFunction, custom_function, described
from rollover.suggest import did_you_mean
from rollover.trajectories import Episode, Trajectory, TrajectoryGroup, by_role, episodes_of
from rollover.types import Group


@dataclass(frozen=True)
class Grouped:
    """`compared`: the TrajectoryGroups of a Group. `untrained`: its trajectories of untrained roles."""

    compared: list[TrajectoryGroup]
    untrained: list[Trajectory] = field(default_factory=list)


class Grouping:
    """Groups trajectories as [workflow] configures. `distill`: roles that a teacher trains need no score.

    ValueError if workflow.group_by names no function.
    """

    def __init__(self, workflow: WorkflowConfig, distill: DistillConfig | None = None) -> None:
        self.workflow, self.distill = workflow, distill or DistillConfig()
        self._own: CustomFunction | None = None
        if workflow.group_by:
            returns = "a list of TrajectoryGroups that have every trained trajectory exactly once"
            self._own = custom_function("workflow.group_by", workflow.group_by, returns)

    def __call__(self, group: Group) -> Grouped:
        """Group the trajectories. ValueError for an undeclared role, or a grouping that is no partition."""
        episodes = episodes_of(group)
        untrained = [t for e in episodes for t in e.trajectories if not self.role(t).trained and not t.greedy]
        if self._own is None:
            return Grouped([g for g in by_role(episodes) if self.role(g.trajectories[0]).trained], untrained)
        sampled = [e for e in episodes if not any(t.greedy for t in e.trajectories)]
        return Grouped(self._partition(self._own, sampled), untrained)

    def role(self, trajectory: Trajectory) -> RoleConfig:
        """Return the configuration of a trajectory's role."""
        roles = self.workflow.roles
        if not roles:
            return _ANY_ROLE
        if trajectory.role not in roles:
            raise ValueError(
                f"{trajectory}: workflow.roles has no {trajectory.role!r}, it has {', '.join(roles)}"
                f"{did_you_mean(trajectory.role, roles)}. Add [workflow.roles.{trajectory.role}] (trained = false"
                " leaves a role out of the loss)"
            )
        return roles[trajectory.role]

    def max_valid(self, group: Group) -> int:
        """Return the number of valid trajectories in the largest TrajectoryGroup.

        Valid: with a score to compare, a greedy one included, or with a teacher instead.
        """
        greedy = Counter(t.role for e in episodes_of(group) for t in e.trajectories if t.greedy and t.valid)
        compared = self(group).compared
        return max((self._num_valid(c) + sum(greedy[role] for role in c.roles) for c in compared), default=0)

    def has_signal(self, group: Group, default: str, metric: Metric = "score") -> bool | None:
        """Return whether a scored Group can have an advantage other than 0. `default`: algorithm.advantage.

        None: there is one TrajectoryGroup, compared by scores, which decide. `metric`: compared instead of scores
        (filters.metric).
        """
        compared = self(group).compared
        by_turns = self.workflow.credit == "turn_returns"
        gamma = self.workflow.turn_gamma if by_turns else None
        own = [self.uses_precomputed(c, self.workflow.advantage_of(c.trajectories[0].role, default)) for c in compared]
        if len(compared) == 1 and not by_turns and not own[0]:
            return None
        return any(
            _has_precomputed_signal(c) if o else _scores_differ(c, gamma, metric)
            for c, o in zip(compared, own, strict=True)
        )

    def uses_precomputed(self, compared: TrajectoryGroup, estimator: str) -> bool:
        """Return whether a TrajectoryGroup is trained with precomputed advantages."""
        if estimator == "precomputed":
            return True
        is_taught = self.distill.replaces_for(compared.trajectories[0].role)
        return self.workflow.own_advantages == "auto" and not is_taught and is_precomputed(compared)

    # Private

    def _num_valid(self, compared: TrajectoryGroup) -> int:
        return sum(t.valid or self.distill.replaces_for(t.role) for t in compared.trajectories)

    def _partition(self, function: CustomFunction, episodes: list[Episode]) -> list[TrajectoryGroup]:
        groups = function(episodes)
        if not isinstance(groups, list | tuple) or not all(isinstance(g, TrajectoryGroup) for g in groups):
            raise function.refused(described(groups))
        times: dict[str, int] = {}
        for trajectory in (t for g in groups for t in g.trajectories):
            for rollout in trajectory.rollouts:
                times[rollout.rollout_id] = times.get(rollout.rollout_id, 0) + 1
        for trajectory in (t for e in episodes for t in e.trajectories):
            expected = 1 if self.role(trajectory).trained else 0
            for rollout in trajectory.rollouts:
                found = times.pop(rollout.rollout_id, 0)
                if found != expected:
                    raise function.refused(_miscounted(trajectory, rollout.rollout_id, found, expected))
        if times:
            raise function.refused(f"the rollout {next(iter(times))}, which is not in these episodes")
        return [g for g in groups if g.trajectories]


def _miscounted(trajectory: Trajectory, rollout_id: str, found: int, expected: int) -> str:
    of = trajectory if len(trajectory.rollouts) == 1 else f"rollout {rollout_id} of {trajectory}"
    if not expected:
        return f"{of}, whose role is not trained (workflow.roles.{trajectory.role}): leave it out"
    return f"groups without {of}" if not found else f"{of} {found} times"


def _has_precomputed_signal(compared: TrajectoryGroup) -> bool:
    """Return whether a precomputed advantage is not 0."""
    return any(r.reward and _nonzero(r.reward.advantages) for t in compared.trajectories if t.valid for r in t.rollouts)


def _nonzero(value: Any) -> bool:
    return any(map(_nonzero, value)) if isinstance(value, tuple) else bool(value)


def _scores_differ(compared: TrajectoryGroup, gamma: float | None, metric: Metric) -> bool:
    """Return whether scores, or values of another `metric`, differ in float32, as advantages are computed.

    By turns with the discount `gamma`: or whether a turn has its own reward, or an earlier one a discounted score.
    """
    valid = [t for t in compared.trajectories if t.valid and t.reward]
    if gamma is not None and any(r.reward and any(r.reward.turns) for t in valid for r in t.rollouts):
        return True
    scores = {float(np.float32(value)) for t in valid if (value := value_of(t, metric)) is not None}
    discounted = gamma is not None and gamma < 1 and any(scores) and any(len(t.turns) > 1 for t in valid)
    return discounted or len(scores) > 1


_ANY_ROLE = RoleConfig()

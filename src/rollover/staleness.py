"""Staleness: the only file that computes it. Pure functions over versions and groups; never decides what runs.

Notation: v trainer version before a step, B groups per step, S max_staleness, N groups in flight (held at once).
The deadline of a group is its smallest policy version + S: it must be in a step whose v is at most the deadline.

The bound under `finish_first` (N <= (1 + S) * B). Let n(k) be the number of held groups with deadline <= v + k.
A step is taken only if what it leaves behind satisfies n(k) <= k * B for every k >= 0 (`is_feasible`).

1. Staleness never exceeds S. k = 0 says that no group whose deadline is v or earlier is left behind, so every group
   is consumed at or before its deadline.
2. A step always becomes possible once all held groups are READY. Claim: before a step n(k) <= (k + 1) * B for all
   k >= 0. For k >= S it holds because n(k) <= N <= (1 + S) * B. For k < S, a group counted in n(k) has a token of a
   version below v, so the step at v - 1 left it behind, and that step left at most (k + 1) * B groups with a deadline
   <= (v - 1) + (k + 1). (Before the first step there is no such group.) The step takes the B earliest deadlines, or all
   groups if fewer are held; of those counted in n(k) it leaves at most max(0, n(k) - B) <= k * B. Generation of a
   rollout is finite, so all held groups do become READY if nothing shorter suffices: no deadlock.
3. A READY choice stays good while generation winds down. More READY groups only make the earliest-deadline choice
   earlier; a first token under v gives the deadline v + S, and a step is taken only if it leaves at most S * B groups,
   so n(S) <= S * B after it. (A whole step of B groups always does: N - B <= S * B.)
4. Groups may be reserved for the step at v before it has enough (streaming micro-batches): r of them are reserved only
   if, n'(k) counting the others, n'(k) + r <= (k + 1) * B for every k >= 0. The step takes the r and the B - r earliest
   of the others, so it leaves n'(k) - (B - r) <= k * B, as in 2. Later tokens keep this true as they do in 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rollover.config.rollout import RolloutConfig
from rollover.types import Group

if TYPE_CHECKING:
    from torch import Tensor

# Below every policy version, those of tokens sampled by versions that were lost included, which may be negative.
EVERY_VERSION = -(1 << 31)

Versions = TypeVar("Versions", int, np.ndarray, "Tensor")


def staleness(policy_version: Versions, trainer_version: int) -> Versions:
    """Trainer version minus policy version, of one token or of an integer array or tensor of tokens (any shape)."""
    return trainer_version - policy_version


def group_staleness(group: Group, trainer_version: int) -> int | None:
    """The largest staleness among the sampled tokens of all siblings; None before the first token."""
    oldest = group.min_version
    return None if oldest is None else staleness(oldest, trainer_version)


def group_deadline(group: Group, max_staleness: int) -> int | None:
    """The last trainer version whose step may train this group; None (no deadline) before the first token."""
    oldest = group.min_version
    return None if oldest is None else oldest + max_staleness


def rolled_back(policy_version: int, trainer_version: int) -> int:
    """What a policy version is called after the trainer went back to `trainer_version`.

    A lost one is as many updates away from there as before, but on another branch: 2 * trainer_version minus it. At
    every later trainer version its staleness is the number of updates between the two policies.
    """
    return policy_version if policy_version <= trainer_version else 2 * trainer_version - policy_version


def beyond_bound(groups: Iterable[Group], config: RolloutConfig, trainer_version: int, bound: int) -> list[int]:
    """Ids of those groups, none of which runs, that must go so that all others are trained in bound from now on.

    `bound`: config.staleness_bound. With "drop" and "mask" steps see to a bound of max_staleness themselves. Otherwise
    the fewest go, the oldest first: of those left at most (k + 1) * groups_per_step get older than
    `bound` after trainer_version + k, for every k >= 0, and no more are held than (1 + bound) * groups_per_step.
    """
    if not config.finish_first and bound == config.max_staleness:
        if config.on_stale == "mask":
            return [g.group_id for g in groups if g.ready and expiry(g, config) < trainer_version]
        return [g.group_id for g in groups if (group_staleness(g, trainer_version) or 0) > bound]
    deadlines = {g.group_id: group_deadline(g, bound) for g in groups}
    due = sorted((math.inf if d is None else d, -group_id) for group_id, d in deadlines.items())
    num_beyond = 0
    for rank, (deadline, _) in enumerate(due, start=1):
        steps = min(1 + bound, max(0, deadline - trainer_version + 1))
        num_beyond = max(num_beyond, rank - int(steps) * config.groups_per_step)
    return sorted(-group_id for _, group_id in due[:num_beyond])


def is_feasible(due: Mapping[float, int], trainer_version: int, groups_per_step: int) -> bool:
    """Can these groups all be trained in bound by the steps after the one at `trainer_version`?

    `due`: deadline -> number of groups. The earliest-deadline-first condition: for every k >= 0 at most
    k * groups_per_step deadlines are at most trainer_version + k.
    """
    return not _tight_slacks(due, trainer_version, groups_per_step)


def urgencies(due: Mapping[float, int], trainer_version: int, groups_per_step: int) -> dict[float, int]:
    """Deadline -> urgency, for those deadlines of which some groups must be in the step at `trainer_version`.

    Smaller is more urgent: the smallest k, at or above the group's own slack, at which more than
    k * groups_per_step groups are due by trainer_version + k. Deadlines that are absent are not urgent.
    """
    tight = _tight_slacks(due, trainer_version, groups_per_step)
    urgency: dict[float, int] = {}
    for deadline in due:
        reached = [k for k in tight if k >= deadline - trainer_version]
        if reached:
            urgency[deadline] = min(reached)
    return urgency


def expiry(group: Group, config: RolloutConfig) -> float:
    """The last trainer version whose step may train any of the group's tokens; inf if it has none.

    The order of consumption. With on_stale = "mask" older tokens leave the loss, so the newest one counts, of those
    rollouts that are trained: no greedy baseline, none without a reward.
    """
    version = _newest_trained(group) if config.on_stale == "mask" else group.min_version
    return math.inf if version is None else version + config.max_staleness


def _newest_trained(group: Group) -> int | None:
    rewarded = (r for r in group.rollouts if r.reward is None or not r.reward.missing)
    return max((v for r in rewarded if not r.greedy for v in r.versions), default=None)


def oldest_in_loss(config: RolloutConfig, trainer_version: int) -> int:
    """Tokens of policy versions below this one are masked by the step at `trainer_version`: only with "mask"."""
    return trainer_version - config.max_staleness if config.on_stale == "mask" else EVERY_VERSION


def _tight_slacks(due: Mapping[float, int], trainer_version: int, groups_per_step: int) -> list[int]:
    """Every k at which more than k * groups_per_step deadlines are <= trainer_version + k (only k that occur)."""
    tight, num = [], 0
    for deadline in sorted(due):
        k = max(int(deadline) - trainer_version, 0)
        num += due[deadline]
        if num > k * groups_per_step and k not in tight:
            tight.append(k)
    return tight

"""Staleness: the age of a token, the bound on it, and whether held groups can be trained within it.

Every number that the bound rests on is computed here, over integers: versions, S = rollout.max_staleness, B =
rollout.groups_per_step. The rules are derived and proved in docs/staleness.md. Pure; never decides what runs.

    age             trainer version - policy version, when the batch is formed
    deadline        oldest policy version of a group + S: the last trainer version whose step may train it
    feasibility     at most k * B of the groups left behind by the step at v are due by v + k, for every k >= 0
    max_groups_in_bound   (1 + S) * B groups may be held, fewer while the engine's weights lag
    bound           S, or less where nothing rolls over
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rollover.types import Group

if TYPE_CHECKING:
    from torch import Tensor

# Below every policy version, also those of tokens of lost versions, which may be negative.
EVERY_VERSION = -(1 << 31)
NO_DEADLINE = math.inf

Versions = TypeVar("Versions", int, np.ndarray, "Tensor")


# Age


def staleness(policy_version: Versions, trainer_version: int) -> Versions:
    """Trainer version minus policy version, of one token or of an integer array or tensor of tokens (any shape)."""
    return trainer_version - policy_version


def group_staleness(group: Group, trainer_version: int) -> int | None:
    """Return the largest staleness among the sampled tokens of all siblings; None before the first token."""
    oldest = group.min_version
    return None if oldest is None else staleness(oldest, trainer_version)


def oldest_in_loss(trainer_version: int, max_staleness: int, *, masks: bool) -> int:
    """Return the policy version below which tokens are masked in the loss of the step at `trainer_version`.

    `masks`: rollout.on_stale = "mask". Otherwise every token of a trained group is in the loss.
    """
    return trainer_version - max_staleness if masks else EVERY_VERSION


def rolled_back(policy_version: int, trainer_version: int) -> int:
    """Return the new number of a policy version after the trainer went back to `trainer_version`.

    A lost version is as many updates away from there as before, but on another branch: 2 * trainer_version minus it. At
    every later trainer version its staleness is the number of updates between the two policies.
    """
    return policy_version if policy_version <= trainer_version else 2 * trainer_version - policy_version


# Bound


def staleness_bound(
    max_staleness: int, groups_per_step: int, most_held: int, publish_every: int, *, nothing_rolls_over: bool
) -> int:
    """Return the largest staleness of a token in the loss under a configuration. Never above `max_staleness`.

    If nothing rolls over, a group waits at most for those admitted before it, ceil(most_held / groups_per_step) - 1
    steps, and the weights that sampled it were up to publish_every - 1 steps old.
    """
    if not nothing_rolls_over:
        return max_staleness
    waits = -(-most_held // groups_per_step) - 1
    return min(max_staleness, waits + publish_every - 1)


def max_groups_in_bound(max_staleness: int, groups_per_step: int, lag: int = 0) -> int:
    """Return the limit of held groups so that each can be trained within the bound; <= 0: none may be admitted.

    `lag`: versions that the next sampled token is behind the trainer at the next step. A step at lag l may leave as
    many groups as may be held at lag l + 1.
    """
    return (1 + max_staleness - lag) * groups_per_step


# Deadline


def deadline(oldest_version: int | None, max_staleness: int) -> float:
    """Return the last trainer version whose step may train tokens of this version; NO_DEADLINE without tokens."""
    return NO_DEADLINE if oldest_version is None else oldest_version + max_staleness


def expiry(group: Group, max_staleness: int, *, masks: bool) -> float:
    """Return the last trainer version whose step may train any of the group's tokens; NO_DEADLINE without tokens.

    Groups are consumed in this order. With masks the newest token counts, of rollouts that are trained: not greedy, and
    with a reward.
    """
    return deadline(_newest_trained(group) if masks else group.min_version, max_staleness)


def expired(groups: Iterable[Group], trainer_version: int, max_staleness: int, *, masks: bool) -> list[int]:
    """Return the ids of groups that no step from `trainer_version` on may train.

    With masks only READY groups expire: the others still get tokens.
    """
    may_expire = (g for g in groups if g.ready or not masks)
    return [g.group_id for g in may_expire if expiry(g, max_staleness, masks=masks) < trainer_version]


# Feasibility


def is_feasible(due: Mapping[float, int], trainer_version: int, groups_per_step: int) -> bool:
    """Return whether the steps after `trainer_version` can train all these groups within the bound.

    `due`: deadline -> number of groups. The earliest-deadline-first condition: for every k >= 0 at most
    k * groups_per_step deadlines are at most trainer_version + k.
    """
    return not _tight_slacks(due, trainer_version, groups_per_step)


def urgencies(due: Mapping[float, int], trainer_version: int, groups_per_step: int) -> dict[float, int]:
    """Return deadline -> urgency, for deadlines of which some groups must be in the step at `trainer_version`.

    Smaller is more urgent: the smallest k, at or above the group's own slack, at which more than
    k * groups_per_step groups are due by trainer_version + k. Deadlines that are absent are not urgent.
    """
    tight = _tight_slacks(due, trainer_version, groups_per_step)
    urgency: dict[float, int] = {}
    for time in due:
        reached = [k for k in tight if k >= time - trainer_version]
        if reached:
            urgency[time] = min(reached)
    return urgency


def excess_groups(groups: Iterable[Group], trainer_version: int, bound: int, groups_per_step: int) -> list[int]:
    """Return the ids of the fewest groups to drop so that all others can be trained within the bound; oldest first.

    Of the others at most (k + 1) * groups_per_step are due by trainer_version + k, for every k >= 0, and no more than
    max_groups_in_bound are held. No group may be running.
    """
    due = sorted((deadline(g.min_version, bound), -g.group_id) for g in groups)
    num_beyond = 0
    for rank, (time, _) in enumerate(due, start=1):
        steps = min(1 + bound, max(0, time - trainer_version + 1))
        num_beyond = max(num_beyond, rank - int(steps) * groups_per_step)
    return sorted(-group_id for _, group_id in due[:num_beyond])


def _newest_trained(group: Group) -> int | None:
    rewarded = (r for r in group.rollouts if r.reward is None or not r.reward.missing)
    return max((v for r in rewarded if not r.greedy for v in r.versions), default=None)


def _tight_slacks(due: Mapping[float, int], trainer_version: int, groups_per_step: int) -> list[int]:
    """Return each slack k at which more than k * groups_per_step deadlines are <= trainer_version + k."""
    tight, num = [], 0
    for time in sorted(due):
        k = max(int(time) - trainer_version, 0)
        num += due[time]
        if num > k * groups_per_step and k not in tight:
            tight.append(k)
    return tight

"""Staleness: the age of a token, and whether held groups can be trained before they get too old.

Over integers: versions, S = rollout.max_staleness, B = rollout.groups_per_step. config/rollout.py has the bound and the
deadlines of a configuration; the rules are derived and proved in docs/staleness.md. Pure; never decides what runs.

    age             trainer version - policy version, when the batch is formed
    deadline        oldest policy version of a group + S: the last trainer version whose step may train it
    feasibility     at most k * B of the groups left behind by the step at v are due by v + k, for every k >= 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def rolled_back(policy_version: int, trainer_version: int) -> int:
    """Return the new number of a policy version after the trainer went back to `trainer_version`.

    A lost version is as many updates away from there as before, but on another branch: 2 * trainer_version minus it. At
    every later trainer version its staleness is the number of updates between the two policies.
    """
    return policy_version if policy_version <= trainer_version else 2 * trainer_version - policy_version


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


def _tight_slacks(due: Mapping[float, int], trainer_version: int, groups_per_step: int) -> list[int]:
    """Return each slack k at which more than k * groups_per_step deadlines are <= trainer_version + k."""
    tight, num = [], 0
    for time in sorted(due):
        k = max(int(time) - trainer_version, 0)
        num += due[time]
        if num > k * groups_per_step and k not in tight:
            tight.append(k)
    return tight

"""How sure the reward of a step is: an interval over its groups, from what was recorded of them. Pure.

Siblings answer one task and are not independent: a group counts by its mean, as a task of an evaluation does. In that
each trajectory counts once, however many contexts it has, as in reward/mean.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from rollover.plugins.dashboard.numbers import numbers
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.track.recorded import TRAINED
from rollover.track.statistics import Z_95

MOST_STEPS = 2000


def reward_intervals(index: RolloutIndex, untrained: Collection[str] = ()) -> dict[str, Any]:
    """Of each of "steps" the "low" and the "high" end: the mean of its trained groups' mean scores, +- z * s / sqrt(n)
    over n groups (95 %, normal, s with n - 1). A step of one group has none. Of more than MOST_STEPS steps some are
    told, evenly chosen. `untrained`: roles whose scores are no part of it."""
    entries = index.entries()
    trained = index.words.index(TRAINED) if TRAINED in index.words else -1
    entries = entries[(entries["outcome"] == trained) & ~np.isnan(entries["score"]) & (entries["context"] == 0)]
    left_out = [number for number, word in enumerate(index.words) if word in untrained]
    entries = entries[~np.isin(entries["role"], left_out)]
    pairs, of_entry = np.unique(entries[["step", "group_id"]], return_inverse=True)
    sums = np.bincount(of_entry, weights=entries["score"], minlength=len(pairs))
    means = sums / np.bincount(of_entry, minlength=len(pairs))
    steps, of_pair = np.unique(pairs["step"], return_inverse=True)
    count = np.bincount(of_pair, minlength=len(steps))
    mean = np.bincount(of_pair, weights=means, minlength=len(steps)) / np.maximum(count, 1)
    squares = np.bincount(of_pair, weights=(means - mean[of_pair]) ** 2, minlength=len(steps))
    several = count > 1
    half = Z_95 * np.sqrt(squares[several] / (count[several] - 1) / count[several])
    every = max(1, -(-len(half) // MOST_STEPS))
    steps, mean, half = steps[several][::every], mean[several][::every], half[::every]
    return {"steps": steps.tolist(), "low": numbers(mean - half), "high": numbers(mean + half)}

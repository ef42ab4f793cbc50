"""Statistics of the recorded rollouts over the steps: how sure the reward of each is, and how stale what it trained
was, of which a mean hides much. Pure.

Siblings answer one task and are not independent: a group counts by its mean, as a task of an evaluation does. In that
each trajectory counts once, however many contexts it has, as in reward/mean.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from rollover.plugins.dashboard.numbers import numbers
from rollover.plugins.dashboard.rollout_index import NO_VERSION, RolloutIndex, staleness
from rollover.track.recorded import TRAINED
from rollover.track.statistics import Z_95

MOST_STEPS = 2000
MOST_COLUMNS, MOST_LEVELS = 200, 12


def reward_intervals(index: RolloutIndex, untrained: Collection[str] = ()) -> dict[str, Any]:
    """Of each of "steps" the "low" and the "high" end: the mean of its trained groups' mean scores, +- z * s / sqrt(n)
    over n groups (95 %, normal, s with n - 1). A step of one group has none. Of more than MOST_STEPS steps some are
    told, evenly chosen. `untrained`: roles whose scores are no part of it."""
    entries = _trained(index)
    entries = entries[~np.isnan(entries["score"]) & (entries["context"] == 0)]
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


def staleness_map(index: RolloutIndex) -> dict[str, Any]:
    """Of the trained rollouts that were recorded: "counts" [level][column], where a column is the steps from "first" to
    "last", and a level the stalenesses from "low" to "high" (of the oldest token of a rollout, in policy versions).
    Where there are more steps than columns, or more stalenesses than levels, consecutive ones are one."""
    entries = _trained(index)
    entries = entries[entries["oldest"] != NO_VERSION]
    steps, ages = entries["step"].astype(np.int64), staleness(entries).astype(np.int64)
    if not len(steps):
        return {"first": [], "last": [], "low": [], "high": [], "counts": [], "read": index.share}
    begin, end = int(steps.min()), int(steps.max())
    width = -(-(end - begin + 1) // MOST_COLUMNS)
    of_level = -(-(int(ages.max()) + 1) // MOST_LEVELS)
    first = np.arange(begin, end + 1, width)
    low = np.arange(0, int(ages.max()) + 1, of_level)
    counts = np.zeros((len(low), len(first)), np.int64)
    np.add.at(counts, (ages // of_level, (steps - begin) // width), 1)
    return {
        "first": first.tolist(),
        "last": np.minimum(first + width - 1, end).tolist(),
        "low": low.tolist(),
        "high": (low + of_level - 1).tolist(),
        "counts": counts.tolist(),
        "read": index.share,
    }


def _trained(index: RolloutIndex) -> np.ndarray:
    entries = index.entries()
    return entries[entries["outcome"] == (index.words.index(TRAINED) if TRAINED in index.words else -1)]

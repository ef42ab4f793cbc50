"""How stale what was trained was, over the steps: how many rollouts of each staleness, which a mean hides. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollover.plugins.dashboard.rollout_index import NO_VERSION, RolloutIndex, staleness
from rollover.track.recorded import TRAINED

MOST_COLUMNS, MOST_LEVELS = 200, 12


def staleness_map(index: RolloutIndex, columns: int = MOST_COLUMNS) -> dict[str, Any]:
    """Of the trained rollouts that were recorded: "counts" [level][column], where a column is the steps from "first" to
    "last", and a level the stalenesses from "low" to "high" (of the oldest token of a rollout, in policy versions).
    Where there are more steps than columns, or more stalenesses than levels, consecutive ones are one."""
    entries = index.entries()
    trained = index.words.index(TRAINED) if TRAINED in index.words else -1
    entries = entries[(entries["outcome"] == trained) & (entries["oldest"] != NO_VERSION)]
    steps, ages = entries["step"].astype(np.int64), staleness(entries).astype(np.int64)
    if not len(steps):
        return {"first": [], "last": [], "low": [], "high": [], "counts": [], "read": index.share}
    begin, end = int(steps.min()), int(steps.max())
    width = -(-(end - begin + 1) // max(1, min(columns, MOST_COLUMNS)))
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

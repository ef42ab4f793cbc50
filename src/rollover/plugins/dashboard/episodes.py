"""One episode for the page: the contexts of its trajectories, each of which is a rollout with a page of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollover.plugins.dashboard.found import row_of
from rollover.plugins.dashboard.not_there import NotThere
from rollover.plugins.dashboard.rollout_index import RolloutIndex

MOST_CONTEXTS = 500


def episode(index: RolloutIndex, step: int, group: int, sibling: int) -> dict[str, Any]:
    """Episode `sibling` of the group that left with this step: "contexts" in the order of trajectories and contexts,
    each as in a list of rollouts, with its "role" and the rewards of its "turns"; "of": how many there are. KeyError
    where there is none."""
    entries = index.entries()
    of_episode = (entries["step"] == step) & (entries["group_id"] == group) & (entries["sibling"] == sibling)
    places = np.flatnonzero(of_episode)
    if not len(places):
        raise NotThere(f"no episode {group}-{sibling} left the run with step {step}")
    places = places[np.lexsort((entries["context"][places], entries["trajectory"][places]))]
    contexts, shown = [], entries[places[:MOST_CONTEXTS]]
    for entry, record in zip(shown, index.records_of(shown), strict=True):
        contexts.append(
            {
                **row_of(index, entry, record),
                "trajectory": int(entry["trajectory"]),
                "context": int(entry["context"]),
                "role": record.get("role") or "",
                "turns": record.get("turns"),
                "error": record.get("error"),
            }
        )
    return {"group": group, "sibling": sibling, "step": step, "of": len(places), "contexts": contexts}

"""How many groups to hold, from the lengths seen so far: `rollout.in_flight_groups = "auto"`. Pure.

A group is in progress while its longest sibling runs, so with all slots busy Little's law gives the number of groups in
progress: slots / (group_size * mean length) groups start per decode step, and each stays for its longest sibling's
length. Fewer in flight leave slots idle at the end of a phase, more only age. Groups that are ready wait beside them,
up to one step's worth.
"""

from __future__ import annotations

import math
from typing import Any

from rollover.config.rollout import RolloutConfig

_MEMORY = 64  # groups over which the averages run


class LengthEstimate:
    """Running means of a rollout's length, and of the longest of a group. In tokens; 0 before the first group."""

    def __init__(self) -> None:
        self.mean = 0.0
        self.longest = 0.0
        self._num_groups = 0

    @property
    def spread(self) -> float:
        """Longest sibling by mean length, at least 1."""
        return max(1.0, self.longest / self.mean) if self.mean else 1.0

    def observe(self, lengths: list[int]) -> None:
        """The lengths of one finished group."""
        self._num_groups = min(self._num_groups + 1, _MEMORY)
        weight = 1 / self._num_groups
        self.mean += weight * (sum(lengths) / len(lengths) - self.mean)
        self.longest += weight * (max(lengths) - self.longest)

    def in_flight_groups(self, config: RolloutConfig, slots: int | None) -> int:
        """Groups to hold from now on. `slots`: rollouts that can run at once (None: as many as a step trains)."""
        if slots is None:
            slots = config.groups_per_step * config.rollouts_per_group
        in_progress = math.ceil(slots / config.rollouts_per_group * self.spread)
        ready = 0 if config.supplement else config.groups_per_step
        return max(config.groups_per_step, min(in_progress + ready, config.most_in_flight))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "longest": self.longest, "num_groups": self._num_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """An empty state, of a checkpoint older than this estimate, begins anew."""
        self.mean, self.longest = state.get("mean", 0.0), state.get("longest", 0.0)
        self._num_groups = state.get("num_groups", 0)

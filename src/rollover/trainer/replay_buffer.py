"""The replay buffer: trained groups of high signal, to be trained again in place of groups without any.

Owns the kept groups with their scores, and the draws. Never changes a group, never builds a batch (batch.py does).
A draw is a function of the seed, the policy version and what is kept: no random state is carried.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollover.config import ReplayConfig
from rollover.rollout.cache import Arrays, groups_from_state, groups_to_state
from rollover.staleness import EVERY_VERSION, staleness
from rollover.types import Group


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A trained group. Tokens of versions below `oldest_in_loss` were and stay context only."""

    group: Group
    score: float
    oldest_in_loss: int = EVERY_VERSION

    @property
    def oldest_version(self) -> int:
        """Smallest policy version of a token in its loss."""
        versions = [v for r in self.group.rollouts if not r.greedy for v in r.versions]
        return min(v for v in versions if v >= self.oldest_in_loss)


def signal(advantages_N: Sequence[float], rewards_NR: np.ndarray) -> float:
    """Return the score of a group of N rollouts with R rewards: sum_i |A_i| * sum_r std_i(rewards_ir).

    Missing rewards (NaN) are left out of the sample standard deviation, which is 0 for fewer than two. The same product
    orders Axolotl's replay buffer.
    """
    spread = 0.0
    for rewards_N in np.asarray(rewards_NR, dtype=float).T:
        valid = rewards_N[~np.isnan(rewards_N)]
        # np.std of equal rewards may be a rounding error above 0, which would count as a signal.
        spread += float(np.std(valid, ddof=1)) if len(valid) > 1 and np.ptp(valid) > 0 else 0.0
    return float(np.abs(advantages_N).sum()) * spread


class ReplayBuffer:
    """At most `config.size` groups: those of the largest scores among the ones within the staleness bound.

    Counters, cumulative: `stale`, groups removed for their age; `evicted`, groups removed or refused because their
    score was the lowest.
    """

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.stale = 0
        self.evicted = 0
        self._heap: list[
            tuple[float, int, KeptGroup]
        ] = []  # the lowest score first; group ids decide between equal ones

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def kept(self) -> list[KeptGroup]:
        """Return the kept groups in group-id order."""
        return [kept for _, _, kept in sorted(self._heap, key=lambda item: item[1])]

    def add(self, kept: KeptGroup) -> None:
        """Keep a trained group if it has a signal. Beyond `config.size` the lowest score is evicted."""
        if not (kept.score > 0 and math.isfinite(kept.score)):
            return
        heapq.heappush(self._heap, (kept.score, kept.group.group_id, kept))
        if len(self._heap) > self.config.size:
            heapq.heappop(self._heap)
            self.evicted += 1

    def drop_stale(self, version: int) -> None:
        """Remove the groups that exceed the staleness bound at trainer `version`."""
        fresh = [i for i in self._heap if staleness(i[2].oldest_version, version) <= self.config.max_staleness]
        self.stale += len(self._heap) - len(fresh)
        self._heap = fresh
        heapq.heapify(self._heap)

    def draw(self, num: int, version: int) -> list[KeptGroup]:
        """Draw `num` groups for the step at `version`, or all if there are fewer.

        Drawn without replacement, with probabilities in proportion to the scores. They stay in the buffer.
        """
        left, drawn = self.kept, []
        rng = random.Random(f"{self.seed}/replay/{version}")
        while left and len(drawn) < num:
            (index,) = rng.choices(range(len(left)), [kept.score for kept in left])
            drawn.append(left.pop(index))
        return drawn

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        """Return (JSON values, arrays)."""
        kept = self.kept
        groups, arrays = groups_to_state([k.group for k in kept])
        meta = {
            "groups": groups,
            "scores": [k.score for k in kept],
            "oldest_in_loss": [k.oldest_in_loss for k in kept],
            "stale": self.stale,
            "evicted": self.evicted,
        }
        return meta, arrays

    def load_state_dict(self, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Restore a state. If `config.size` is smaller now, the lowest scores are evicted."""
        self._heap = []
        groups = groups_from_state(meta["groups"], arrays)
        self.stale, self.evicted = meta["stale"], meta["evicted"]
        for kept in map(KeptGroup, groups, meta["scores"], meta["oldest_in_loss"]):
            self.add(kept)

"""How long answers are: lengths by task and sibling, the same for every mode that is compared. Pure.

Shapes: N groups of a block, G siblings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from rollover.config import PlanConfig

_BLOCK = 1024
_NARROW = 0.3  # log standard deviation of each hump of a bimodal distribution


class Workload:
    """Answer lengths, drawn in blocks: those of a task depend on the seed and its index alone.

    `observed`: the lengths of whole groups of an earlier run; tasks then resemble these, drawn with replacement.
    """

    def __init__(self, plan: PlanConfig, group_size: int, longest: int, observed: Sequence[Sequence[int]] = ()) -> None:
        self.plan, self.group_size, self.longest = plan, group_size, longest
        self._observed = [np.asarray(group) for group in observed]
        self._blocks: dict[int, np.ndarray] = {}
        if not observed and plan.p99_tokens <= plan.median_tokens:
            raise ValueError(
                f"plan.p99_tokens = {plan.p99_tokens:g} must be above plan.median_tokens = {plan.median_tokens:g}"
            )

    def lengths(self, task: int) -> list[int]:
        """Tokens that each sibling would generate, at least 1; what exceeds the longest possible ends there."""
        block, row = divmod(task, _BLOCK)
        if block not in self._blocks:
            self._blocks = {block: self._draw(np.random.default_rng([self.plan.seed, block]))}
        return self._blocks[block][row].tolist()

    @property
    def mean(self) -> float:
        """Mean length, of the first block."""
        return float(self._draw(np.random.default_rng([self.plan.seed, 0])).mean())

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        shape = (_BLOCK, self.group_size)
        if self._observed:
            groups = rng.integers(len(self._observed), size=_BLOCK)
            lengths = np.stack([rng.choice(self._observed[g], size=self.group_size) for g in groups])
        else:
            shared = math.sqrt(self.plan.sibling_correlation)
            own = math.sqrt(1 - self.plan.sibling_correlation)
            normal_NG = shared * rng.standard_normal((_BLOCK, 1)) + own * rng.standard_normal(shape)
            lengths = self._from_normal(normal_NG, rng)
        return np.clip(np.rint(lengths), 1, self.longest).astype(np.int64)

    def _from_normal(self, normal_NG: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        plan = self.plan
        ratio = math.log(plan.p99_tokens / plan.median_tokens)
        if plan.lengths == "lognormal":
            return plan.median_tokens * np.exp(normal_NG * ratio / NormalDist().inv_cdf(0.99))
        if plan.lengths == "bimodal":
            long = normal_NG > NormalDist().inv_cdf(1 - plan.long_share)
            centre = np.where(long, plan.p99_tokens, plan.median_tokens)
            return centre * np.exp(_NARROW * rng.standard_normal(normal_NG.shape))
        # Pareto: the tail 1 - F(x) = (scale / x) ** alpha through both quantiles.
        alpha = math.log(50) / ratio
        tail_NG = np.vectorize(math.erfc)(normal_NG / math.sqrt(2)) / 2
        return plan.median_tokens * (0.5 / np.maximum(tail_NG, 1e-12)) ** (1 / alpha)

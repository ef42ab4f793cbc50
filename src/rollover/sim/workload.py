"""The simulated work: lengths of answers, turns of episodes, and their segments. Pure.

Lengths depend on task and sibling only, so all compared modes get the same ones.
Shapes: N groups of a block, G siblings.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import Generic, TypeVar

import numpy as np

from rollover.config import PlanConfig
from rollover.envs.protocol import written
from rollover.types import Rollout, SamplingParams, Segment, StopReason

_BLOCK = 1024
_NARROW = 0.3  # log standard deviation of both modes of a bimodal distribution


class Workload:
    """Answer lengths, drawn in blocks: the lengths of a task depend only on the seed and its index.

    `observed`: lengths of whole groups of an earlier run; tasks are then drawn from these with replacement.
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
        """Return the tokens that each sibling generates, from 1 to `longest`."""
        block, row = divmod(task, _BLOCK)
        if block not in self._blocks:
            self._blocks = {block: self._draw(np.random.default_rng([self.plan.seed, block]))}
        return self._blocks[block][row].tolist()

    @property
    def mean(self) -> float:
        """Mean length in the first block."""
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


T = TypeVar("T")


class Turns:
    """Turns of the episodes of a simulation: plan.turns each, fewer if an episode has fewer tokens.

    After each turn but the last the environment works for plan.tool_s and writes plan.tool_tokens.
    """

    def __init__(self, plan: PlanConfig) -> None:
        self.num, self._seconds = plan.turns, plan.tool_s
        self._written = (0,) * plan.tool_tokens

    def split(self, lengths: list[int]) -> tuple[list[int], list[list[int]]]:
        """Return the end of the first turn of each episode, and the ends of its later turns.

        In tokens after the prompt, those of environments included. `lengths`: sampled tokens of each episode.
        """
        if self.num == 1:
            return lengths, []
        ends = [self._ends(length) for length in lengths]
        return [episode[0] for episode in ends], [episode[1:] for episode in ends]

    def seconds(self, later: list[int]) -> float:
        """Return how long the environment works after a turn. `later`: ends of the turns after it."""
        return self._seconds if later else 0.0

    def answer(self, rollout: Rollout, later: list[int]) -> Segment | None:
        """Return the tokens that the environment writes, None at the end of the episode."""
        return written(rollout, self._written) if later else None

    @property
    def num_written(self) -> int:
        """Tokens that the environment writes after a turn."""
        return len(self._written)

    def _ends(self, length: int) -> list[int]:
        num = min(self.num, length)
        share, longer = divmod(length, num)
        ends, at = [], 0
        for i in range(num):
            at += share + (i < longer)
            ends.append(at)
            at += len(self._written)
        return ends


class EventQueue(Generic[T]):
    """Items that become due at their own times."""

    def __init__(self) -> None:
        self._items: list[tuple[float, int, T]] = []
        self._num = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first(self) -> float:
        """Time of the next item, infinite without one."""
        return self._items[0][0] if self._items else math.inf

    def add(self, time: float, item: T) -> None:
        heapq.heappush(self._items, (time, self._num, item))
        self._num += 1

    def due(self, now: float) -> list[T]:
        """Remove and return the items that are due."""
        items = []
        while self._items and self._items[0][0] <= now:
            items.append(heapq.heappop(self._items)[2])
        return items


def is_partial(rollout: Rollout) -> bool:
    """Return whether a turn has two or more segments: the rollout rolled over."""
    return len(rollout.segments) > 1 and sum(1 if s.trainable else -1 for s in rollout.segments) > 1


_SAMPLING = SamplingParams()
_PAUSED = StopReason.PAUSED  # a member of an Enum class is slow to look up


class Segments:
    """Factory of the segments that an engine would return. Equal segments share one object."""

    def __init__(self) -> None:
        self._ids, self._logprobs = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
        self._made: dict[tuple[int, int, StopReason], Segment] = {}
        # Rollouts that got new weights since their start: id -> tokens by version.
        self._tokens_by_version: dict[str, Counter[int]] = {}

    def on_new_weights(self, rollout: Rollout, num_tokens: int, version: int) -> None:
        """Record that a running rollout has `num_tokens` since its start, the last ones under `version`."""
        tokens = self._tokens_by_version.setdefault(rollout.rollout_id, Counter())
        tokens[version] = num_tokens - tokens.total()

    def on_stop(self, rollout: Rollout, num_tokens: int, version: int, reason: StopReason) -> list[Segment]:
        """Return one segment per version since its start, empty if it got no token under a version."""
        tokens = self._tokens_by_version.pop(rollout.rollout_id, None)
        if tokens is None:
            return [self._segment(num_tokens, version, reason)]
        tokens[version] = num_tokens - tokens.total()
        *before, last = tokens.items()
        return [*(self._segment(n, v, _PAUSED) for v, n in before), self._segment(last[1], last[0], reason)]

    def clear(self) -> None:
        """Drop the shared objects; those of earlier steps are rarely used again."""
        self._made.clear()

    def _segment(self, num_tokens: int, version: int, reason: StopReason) -> Segment:
        key = (num_tokens, version, reason)
        if key not in self._made:
            if num_tokens > len(self._ids):
                self._ids = np.zeros(2 * num_tokens, dtype=np.int32)
                self._logprobs = np.zeros(2 * num_tokens, dtype=np.float32)
            ids, logprobs = self._ids[:num_tokens], self._logprobs[:num_tokens]
            self._made[key] = Segment(ids, logprobs, version, _SAMPLING, reason)
        return self._made[key]

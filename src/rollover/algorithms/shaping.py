"""Shaping: from the scores of a step's trajectories to the trained rewards.

    reward = clip((score + terms - running mean) / running deviation)         (each if [rewards] configures it)

    overlong      DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), as in verl's DAPO manager
    repetition    for a rollout that was stopped for repeating itself
    NAME          a function of rewards.functions with shaping = true; it comes with the Reward

Estimators and the replay buffer read the shaped rewards. Scores stay as they are: pass rates, filters, re-rolls,
evaluations and every metric but `shaping/...` use the task's score alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from rollover.config import Config, RewardsConfig
from rollover.trajectories import Trajectory
from rollover.types import Reward, StopReason

SHAPED_SCORE = "shaped_score"
_SAVED = 2  # the states before and after the current step


class Moments(NamedTuple):
    """Number and mean of all rewards so far, and the sum of squared distances from the mean."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Moments:
        if not values:
            return cls()
        mean = math.fsum(values) / len(values)
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values))

    def merged_with(self, more: Moments) -> Moments:
        """Return the moments of both (Chan, Golub and LeVeque 1979)."""
        if not (total := self.count + more.count):
            return self
        apart = more.mean - self.mean
        return Moments(
            total,
            self.mean + apart * more.count / total,
            self.squares + more.squares + apart * apart * self.count * more.count / total,
        )

    @property
    def deviation(self) -> float:
        """Return the sample standard deviation; 1 until two rewards differ."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 and self.squares > 0 else 1.0


@dataclass(frozen=True)
class Shaped:
    """The trained rewards of a batch, by the sequence ids of their trajectories; empty: they are the scores.

    `terms`: added to their scores, by the same ids. `metrics`: under shaping/.
    """

    rewards: Mapping[str, Reward] = field(default_factory=dict)
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def apply(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with its trained reward."""
        reward = self.rewards.get(trajectory.sequence_id)
        return trajectory if reward is None else replace(trajectory, reward=reward)


class Shaping:
    """Shapes rewards as [rewards] configures. `max_new_tokens`: rollout.max_new_tokens, the end of an overlong rollout.

    Owns the running statistics of each role, by trainer version: a step that is trained again after a loss of weights
    starts from the statistics before it.
    """

    def __init__(self, rewards: RewardsConfig, max_new_tokens: int) -> None:
        self.config, self.max_new_tokens = rewards, max_new_tokens
        # trainer version -> role -> of the rewards of all steps before
        self._before: dict[int, dict[str, Moments]] = {}

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        version: int,
        uncounted: Collection[str] = (),
        compared_roles: Iterable[Collection[str]] = (),
    ) -> Shaped:
        """Return the rewards of the step at trainer `version`. Missing ones stay missing.

        `uncounted`: sequence ids that are not in the statistics (greedy baselines, replayed ones). `compared_roles`:
        sets of roles that are compared with each other, and so share their statistics.
        """
        valid = {t.sequence_id: t for t in trajectories if t.reward is not None and t.reward.score is not None}
        terms = {name: self.terms(trajectory) for name, trajectory in valid.items()}
        if not (any(terms.values()) or self.config.running_norm != "none" or self.config.clip_range):
            return Shaped()
        totals = {name: _score(t) + math.fsum(terms[name].values()) for name, t in valid.items()}
        counted = [name for name in valid if name not in uncounted]
        metrics = _metrics_of_terms([terms[name] for name in counted])
        if self.config.running_norm != "none":
            moments = self._updated_moments(version, {name: (valid[name].role, totals[name]) for name in counted})
            shared = {role: reduce(Moments.merged_with, [moments.get(r, Moments()) for r in sorted(roles)])
                      for roles in compared_roles for role in roles}  # fmt: skip
            of_role = {
                role: shared.get(role) or moments.get(role, Moments()) for role in {t.role for t in valid.values()}
            }
            whitens = self.config.running_norm == "whiten"
            for name, trajectory in valid.items():
                of = of_role[trajectory.role]
                totals[name] = (totals[name] - (of.mean if whitens else 0.0)) / of.deviation
            metrics |= _metrics_of_moments(of_role)
        if self.config.clip_range:
            low, high = self.config.clip_range
            clipped = {name: min(max(total, low), high) for name, total in totals.items()}
            metrics["shaping/clipped_share"] = _mean(clipped[name] != totals[name] for name in counted)
            totals = clipped
        trained = [totals[name] for name in counted]
        metrics["shaping/reward_mean"] = _mean(trained)
        metrics["shaping/reward_std"] = float(np.std(trained)) if trained else math.nan
        rewards = {name: _trained(t, totals[name], terms[name]) for name, t in valid.items()}
        return Shaped(rewards, terms, metrics)

    def terms(self, trajectory: Trajectory) -> dict[str, float]:
        """Return the terms added to a trajectory's score, by name: each configured term, also where it is 0.

        Of several rollouts the largest punishment counts.
        """
        terms: dict[str, float] = {}
        if buffer := self.config.overlong_buffer_tokens:
            longest = max(rollout.num_tokens for rollout in trajectory.rollouts)
            terms["overlong"] = overlong(longest, self.max_new_tokens, buffer, self.config.overlong_penalty)
        if self.config.repetition_penalty:
            repeats = any(rollout.stop_reason is StopReason.REPETITION for rollout in trajectory.rollouts)
            terms["repetition"] = -self.config.repetition_penalty if repeats else 0.0
        return terms | (trajectory.reward.shaping if trajectory.reward is not None else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the running statistics as JSON."""
        last = sorted(self._before)[-_SAVED:]
        return {"before": [[v, {role: list(m) for role, m in self._before[v].items()}] for v in last]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; {}: there was none."""
        self._before = {v: {role: Moments(*of) for role, of in roles.items()} for v, roles in state.get("before", [])}

    def _updated_moments(self, version: int, rewards: Mapping[str, tuple[str, float]]) -> dict[str, Moments]:
        """Add the (role, reward) pairs of the step at `version` to the statistics; return them."""
        known = [v for v in self._before if v <= version]
        moments = dict(self._before[max(known)]) if known else {}
        for role in {role for role, _ in rewards.values()}:
            of_step = Moments.from_values([reward for of, reward in rewards.values() if of == role])
            moments[role] = moments.get(role, Moments()).merged_with(of_step)
        self._before = {v: m for v, m in self._before.items() if v <= version} | {version + 1: moments}
        return moments


class ShapedScore:
    """filters.metric = "shaped_score": a trajectory's score plus the terms of [rewards] (verl's seq_reward).

    rewards.running_norm and rewards.clip_range are not applied: the norm depends on other groups.
    """

    def __init__(self, rewards: RewardsConfig, max_new_tokens: int) -> None:
        self._terms = Shaping(rewards, max_new_tokens).terms

    def __call__(self, trajectory: Trajectory) -> float:
        return _score(trajectory) + math.fsum(self._terms(trajectory).values())

    def __str__(self) -> str:
        return SHAPED_SCORE


def metric_of(config: Config) -> str | ShapedScore:
    """Return the metric that filters.metric names, for the functions of filters.py."""
    if config.filters.metric != SHAPED_SCORE:
        return config.filters.metric
    return ShapedScore(config.rewards, config.rollout.max_new_tokens)


def overlong(num_tokens: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """Return 0 up to `max_tokens - buffer` tokens, then linearly down to -`penalty` at `max_tokens` and beyond."""
    into = num_tokens - (max_tokens - buffer)
    return -penalty * min(into / buffer, 1.0) if into > 0 else 0.0


def _score(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None and trajectory.reward.score is not None
    return trajectory.reward.score


def _trained(trajectory: Trajectory, score: float, terms: Mapping[str, float]) -> Reward:
    assert trajectory.reward is not None
    return replace(trajectory.reward, score=score, extras={**trajectory.reward.extras, **terms})


def _metrics_of_moments(moments: Mapping[str, Moments]) -> dict[str, float]:
    """Return the metrics, by role if there are several."""
    if len(moments) < 2:
        return {f"shaping/running_{name}": value for of in moments.values() for name, value in _named(of)}
    return {f"roles/{role}/running_{name}": value for role, of in moments.items() for name, value in _named(of)}


def _named(of: Moments) -> tuple[tuple[str, float], ...]:
    return ("mean", of.mean), ("std", of.deviation)


def _metrics_of_terms(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each term, and the share of trajectories where it is not 0."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for each in terms for name in each):
        values = [each.get(name, 0.0) for each in terms]
        metrics[f"shaping/{name}/mean"] = _mean(values)
        metrics[f"shaping/{name}/share"] = _mean(value != 0 for value in values)
    return metrics


def _mean(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return math.fsum(found) / len(found) if found else math.nan

"""From the rewards of a batch to one advantage per rollout: by an estimator of advantage.py, or one of the user's own.

Owns what an estimator is given (`Scored`), which function a name stands for, and the check of what a function of the
user's own returned. The formulas are in advantage.py, and what each of them reads is declared in config/losses.py.

Shapes: N rollouts, R rewards per rollout. NaN: a missing reward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollover.algorithms import advantage
from rollover.config import AlgorithmConfig
from rollover.config.losses import ADVANTAGES
from rollover.functions import OwnFunction, described, own_function
from rollover.types import Rollout


@dataclass(frozen=True)
class Scored:
    """The rollouts of a batch as an estimator sees them, without the greedy baselines.

    rewards_N: scores. rewards_NR: the rewards that algorithm.reward_weights names (else the score), whose weights are
    weights_R. greedy_rewards_N: the score of the greedy rollout of the same group, NaN without one. lengths_N: sampled
    tokens, without those that are too old for the loss.
    """

    rewards_N: torch.Tensor
    group_N: torch.Tensor
    lengths_N: torch.Tensor
    rewards_NR: torch.Tensor
    weights_R: torch.Tensor
    greedy_rewards_N: torch.Tensor

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        lengths: Sequence[int],
        greedy: Mapping[int, float],
        algorithm: AlgorithmConfig,
        left_out: Collection[str],
    ) -> Scored:
        """`lengths`: as lengths_N. `greedy`: group id -> score of its greedy rollout. `left_out`: ids of rollouts whose
        rewards count as missing."""
        scores = [float("nan") if r.rollout_id in left_out else score_of(r) for r in rollouts]
        greedy_scores = [greedy.get(r.group_id, float("nan")) for r in rollouts]
        return cls(
            rewards_N=torch.tensor(scores, dtype=torch.float32),
            group_N=torch.tensor([r.group_id for r in rollouts]),
            lengths_N=torch.tensor(lengths),
            rewards_NR=torch.tensor(rewards_of(rollouts, algorithm, left_out), dtype=torch.float32),
            weights_R=torch.tensor(list(_weights(algorithm).values()), dtype=torch.float32),
            greedy_rewards_N=torch.tensor(greedy_scores, dtype=torch.float32),
        )


class Estimator:
    """Advantages as [algorithm] says: those of algorithm.advantage, as algorithm.after_scoring leaves them.

    The user's own functions are found here, once: ValueError before anything is generated where there is none.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._estimate = _built_in(algorithm) if algorithm.advantage in ADVANTAGES else _own(algorithm.advantage)
        self._after_scoring: OwnFunction | None = None
        if algorithm.after_scoring:
            returns = "None, or one finite advantage for each of the rollouts"
            self._after_scoring = own_function("algorithm.after_scoring", algorithm.after_scoring, returns)

    def __call__(self, rollouts: Sequence[Rollout], scored: Scored) -> torch.Tensor:
        """float32 [N], for the rollouts that `scored` was made of. With a critic (`AdvantageTraits.critic`) it is their
        rewards. FunctionError where a function of the user's own raises or returns anything else."""
        advantages_N = self._estimate(scored)
        if self._after_scoring is None:
            return advantages_N
        changed = self._after_scoring(list(rollouts), advantages_N)  # a copy, which it may sort
        return _one_each(advantages_N if changed is None else changed, len(rollouts), self._after_scoring)


def score_of(rollout: Rollout) -> float:
    """The score of a rollout; NaN if it is missing."""
    return float("nan") if rollout.reward is None or rollout.reward.score is None else rollout.reward.score


def rewards_of(rollouts: Sequence[Rollout], algorithm: AlgorithmConfig, left_out: Collection[str] = ()) -> np.ndarray:
    """float [N, R]: the rewards that algorithm.reward_weights names, else the score. NaN: missing, or of a rollout
    whose id is in `left_out`. ValueError where a reward function does not return one of them."""
    names = _weights(algorithm)
    rows = [[float("nan") if r.rollout_id in left_out else _reward(r, name) for name in names] for r in rollouts]
    return np.array(rows, dtype=float)


# Private


def _reward_itself(rewards_N: torch.Tensor) -> torch.Tensor:
    """What a critic turns into advantages per token; 0 where it is missing."""
    return torch.nan_to_num(rewards_N)


# Each name in the configuration is that of a function of advantage.py, unless a critic does the estimating.
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: _reward_itself if traits.critic else getattr(advantage, name) for name, traits in ADVANTAGES.items()
}


def _built_in(algorithm: AlgorithmConfig) -> Callable[[Scored], torch.Tensor]:
    function, traits = _FUNCTIONS[algorithm.advantage], algorithm.advantage_traits
    options = {name: getattr(algorithm, option) for name, option in traits.options.items()}
    return lambda scored: function(**{name: getattr(scored, name) for name in traits.reads}, **options)


def _own(spec: str) -> Callable[[Scored], torch.Tensor]:
    """The user's own function of rewards and groups."""
    function = own_function("algorithm.advantage", spec, "one finite advantage for each reward that is not NaN")

    def estimate(scored: Scored) -> torch.Tensor:
        missing_N = torch.isnan(scored.rewards_N)
        return _one_each(function(scored.rewards_N, scored.group_N), len(missing_N), function, missing_N)

    return estimate


def _one_each(value: object, num: int, function: OwnFunction, missing_N: torch.Tensor | None = None) -> torch.Tensor:
    """What the user's function returned, as advantages [N], 0 where `missing_N`. Raises its FunctionError if it is not
    one finite number for each of `num` rollouts."""
    try:
        advantages_N = torch.as_tensor(value, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError):
        raise function.refused(described(value)) from None
    if advantages_N.shape != (num,):
        raise function.refused(f"{described(value)} for {num} rollouts")
    if missing_N is not None:
        advantages_N = torch.where(missing_N, 0.0, advantages_N)
    bad = ~torch.isfinite(advantages_N)
    if bad.any():
        raise function.refused(f"{advantages_N[bad][0]:g} at {int(bad.sum())} of {num} rollouts")
    return advantages_N


def _weights(algorithm: AlgorithmConfig) -> dict[str, float]:
    return algorithm.reward_weights or {"score": 1.0}


def _reward(rollout: Rollout, name: str) -> float:
    """The score, or another entry of what the reward function returned."""
    if name == "score" or rollout.reward is None or rollout.reward.missing:
        return score_of(rollout)
    if name not in rollout.reward.extras:
        have = ", ".join(["score", *rollout.reward.extras])
        raise ValueError(
            f"algorithm.reward_weights names {name!r}, which the reward {rollout.task.reward!r} does not return:"
            f" it has {have}"
        )
    return rollout.reward.extras[name]

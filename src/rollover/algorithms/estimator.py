"""From the rewards of a batch to one advantage each: by an estimator of advantage.py, or one of the user's own.

Owns what an estimator is given (`Scored`), which function a name stands for, and the check of what a function of the
user's own returned. The formulas are in advantage.py, and what each of them reads is declared in config/traits.py.

Shapes: N trajectories (or turns of them: `Unit`), R rewards of each. NaN: a missing reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollover.algorithms import advantage
from rollover.config import AlgorithmConfig
from rollover.config.traits import ADVANTAGES
from rollover.functions import OwnFunction, described, own_function
from rollover.types import Reward, Rollout


@dataclass(frozen=True, slots=True)
class Unit:
    """What gets one advantage: a trajectory, or a turn of one. `reward` None counts as missing.

    `group`: units of equal ones are compared. `num_tokens`: sampled ones, without those that are too old for the loss.
    `greedy_score`: that of the greedy rollout of the same task, NaN without one. `named`: the reward function.
    """

    reward: Reward | None
    group: int
    num_tokens: int
    greedy_score: float = float("nan")
    named: str = ""


@dataclass(frozen=True)
class Scored:
    """The units of a batch as an estimator sees them, without the greedy baselines.

    rewards_N: scores. rewards_NR: the rewards that algorithm.reward_weights names (else the score), whose weights are
    weights_R. The others are as in Unit.
    """

    rewards_N: torch.Tensor
    group_N: torch.Tensor
    lengths_N: torch.Tensor
    rewards_NR: torch.Tensor
    weights_R: torch.Tensor
    greedy_rewards_N: torch.Tensor

    @classmethod
    def of(cls, units: Sequence[Unit], algorithm: AlgorithmConfig) -> Scored:
        """ValueError where a reward function does not return one that algorithm.reward_weights names."""
        rewards_NR = rewards_of([unit.reward for unit in units], [unit.named for unit in units], algorithm)
        return cls(
            rewards_N=torch.tensor([score_of(unit.reward) for unit in units], dtype=torch.float32),
            group_N=torch.tensor([unit.group for unit in units]),
            lengths_N=torch.tensor([unit.num_tokens for unit in units]),
            rewards_NR=torch.tensor(rewards_NR, dtype=torch.float32),
            weights_R=torch.tensor(list(_weights(algorithm).values()), dtype=torch.float32),
            greedy_rewards_N=torch.tensor([unit.greedy_score for unit in units], dtype=torch.float32),
        )


class Estimator:
    """Advantages by the estimator `name`, with the options of [algorithm].

    A function of the user's own is found here, once: ValueError before anything is generated where there is none.
    """

    def __init__(self, algorithm: AlgorithmConfig, name: str) -> None:
        self._estimate = _built_in(algorithm, name) if name in ADVANTAGES else _own(name)

    def __call__(self, scored: Scored) -> torch.Tensor:
        """float32 [N]. Where the step estimates advantages of tokens (`AdvantageTraits.over_tokens`) it is the rewards.
        FunctionError where a function of the user's own raises or returns anything else."""
        return self._estimate(scored)


class AfterScoring:
    """The user's own function `spec` of rollouts and their advantages. ValueError where there is none."""

    def __init__(self, spec: str) -> None:
        returns = "None, or one finite advantage for each of the rollouts"
        self._function = own_function("algorithm.after_scoring", spec, returns)

    def __call__(self, rollouts: Sequence[Rollout], advantages_N: torch.Tensor) -> torch.Tensor:
        """The advantages [N] as it leaves them. FunctionError where it raises or returns anything else."""
        changed = self._function(list(rollouts), advantages_N)  # a copy, which it may sort
        return _one_each(advantages_N if changed is None else changed, len(rollouts), self._function)


def score_of(reward: Reward | None) -> float:
    """The score; NaN if it is missing."""
    return float("nan") if reward is None or reward.score is None else reward.score


def rewards_of(rewards: Sequence[Reward | None], named: Sequence[str], algorithm: AlgorithmConfig) -> np.ndarray:
    """float [N, R]: the rewards that algorithm.reward_weights names, else the score. NaN: missing. `named`: the reward
    function of each, as ValueError tells it where it does not return one of them."""
    names = _weights(algorithm)
    rows = [[_reward(r, name, of) for name in names] for r, of in zip(rewards, named, strict=True)]
    return np.array(rows, dtype=float)


# Private

_SEVERAL = "functions/"  # what the spec of rewards.functions begins with; the names of its functions are in it

# Each name in the configuration is that of a function of advantage.py, unless the step does the estimating.
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(advantage, name)
    for name, traits in ADVANTAGES.items()
    if not (traits.precomputed or traits.over_tokens)
}


def _built_in(algorithm: AlgorithmConfig, name: str) -> Callable[[Scored], torch.Tensor]:
    traits = ADVANTAGES[name]
    if traits.over_tokens:
        return lambda scored: torch.nan_to_num(scored.rewards_N)
    function = _FUNCTIONS[name]
    options = {name: getattr(algorithm, option) for name, option in traits.options.items()}
    by_tokens = traits.counts and (algorithm.advantage_counts or traits.counts) == "tokens"
    reads = (*traits.reads, "lengths_N") if by_tokens else traits.reads
    return lambda scored: function(**{name: getattr(scored, name) for name in reads}, **options)


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


def _reward(reward: Reward | None, name: str, named: str) -> float:
    """The score, or another entry of what the reward function returned."""
    if name == "score" or reward is None or reward.missing:
        return score_of(reward)
    if name not in reward.extras:
        if named.startswith(_SEVERAL) and name.partition(".")[0] in named:
            return float("nan")  # of several functions one that does not apply to the task
        have = ", ".join(["score", *reward.extras])
        raise ValueError(
            f"algorithm.reward_weights names {name!r}, which the reward {named!r} does not return: it has {have}"
        )
    return reward.extras[name]

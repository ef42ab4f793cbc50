"""From finished groups to training rows: advantages over whole groups, per-token streams, global counts.

Numpy arrays of a Sample are [n] over the tokens after the prompt. Never touches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch

from rollover.algorithms import advantage
from rollover.algorithms.filters import Masked, RolloutFilter, mask_rollouts
from rollover.config import AlgorithmConfig
from rollover.functions import OwnFunction, described, own_function
from rollover.staleness import EVERY_VERSION
from rollover.types import Group, Rollout, Sample


@dataclass(frozen=True)
class Scored:
    """The rollouts of a batch as an advantage estimator sees them; NaN: missing reward. Greedy baselines are apart.

    rewards_N: scores. components_NR: the rewards that algorithm.reward_weights names, weighted by weights_R.
    greedy_N: the score of the group's greedy rollout, NaN without one. lengths_N: sampled tokens, but for those that
    are too old for the loss.
    """

    rewards_N: torch.Tensor
    group_N: torch.Tensor
    lengths_N: torch.Tensor
    components_NR: torch.Tensor
    weights_R: torch.Tensor
    greedy_N: torch.Tensor


# One advantage a rollout. Of "gae": the reward; the critic makes advantages per token of it.
Estimator = Callable[[Scored, AlgorithmConfig], torch.Tensor]
ADVANTAGES: dict[str, Estimator] = {
    "grpo": lambda s, c: advantage.grpo(s.rewards_N, s.group_N, std=c.advantage_std),
    "dr_grpo": lambda s, c: advantage.dr_grpo(s.rewards_N, s.group_N),
    "rloo": lambda s, c: advantage.rloo(s.rewards_N, s.group_N),
    "gdpo": lambda s, c: advantage.gdpo(s.components_NR, s.group_N, s.weights_R),
    "sum_then_normalize": lambda s, c: advantage.sum_then_normalize(
        s.components_NR, s.group_N, s.weights_R, std=c.advantage_std
    ),
    "remax": lambda s, c: advantage.remax(s.rewards_N, s.greedy_N),
    "reinforce_plus_plus": lambda s, c: advantage.reinforce_plus_plus(s.rewards_N, lengths_N=s.lengths_N),
    "reinforce_plus_plus_baseline": lambda s, c: advantage.reinforce_plus_plus_baseline(
        s.rewards_N, s.group_N, lengths_N=s.lengths_N
    ),
    "opo": lambda s, c: advantage.opo(s.rewards_N, s.lengths_N, s.group_N),
    "grpo_passk": lambda s, c: advantage.grpo_passk(s.rewards_N, s.group_N, k=c.passk),
    "max_rl": lambda s, c: advantage.max_rl(s.rewards_N, s.group_N),
    "gae": lambda s, c: torch.nan_to_num(s.rewards_N),
}


@dataclass(frozen=True)
class Batch:
    """The samples of one training step, in (group, sibling) order. `replayed`: ids of groups trained before. `masked`:
    rollouts that filters took out of the loss."""

    samples: list[Sample]
    replayed: frozenset[int] = frozenset()
    masked: Masked = field(default_factory=Masked)

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(s.mask.sum()) for s in self.samples)


class BatchBuilder:
    """Makes batches as [algorithm] says; `masks` take single rollouts out of the loss.

    The user's own functions are found here, once: ValueError before anything is generated where there is none.
    """

    def __init__(self, algorithm: AlgorithmConfig, masks: Sequence[RolloutFilter] = ()) -> None:
        self.algorithm, self.masks = algorithm, masks
        self._estimator = _estimator(algorithm.advantage)
        self._own: OwnFunction | None = None
        if algorithm.after_scoring:
            returns = "None, or one finite advantage for each of the rollouts"
            self._own = own_function("algorithm.after_scoring", algorithm.after_scoring, returns)

    def build(
        self,
        groups: list[Group],
        oldest_version: int = EVERY_VERSION,
        replayed: Mapping[int, int] = MappingProxyType({}),
    ) -> Batch:
        """One Sample per rollout, in group-id and sibling order; the baseline of a group is over all its valid
        siblings, but for masked ones whose rewards shall not count.

        Tokens sampled before policy version `oldest_version` are context only (staleness.oldest_in_loss). `replayed`:
        id of a group that was trained before -> its own such version, that of its first step.
        """
        algorithm = self.algorithm
        groups = sorted(groups, key=lambda g: g.group_id)
        rollouts = [r for g in groups for r in g.rollouts]
        sampled = [r for r in rollouts if not r.greedy]
        greedy = {r.group_id: _score(r) for r in rollouts if r.greedy}
        masked = mask_rollouts(groups, self.masks)
        oldest = {g.group_id: replayed.get(g.group_id, oldest_version) for g in groups}
        lengths = [_num_tokens_since(r, oldest[r.group_id]) for r in sampled]
        scored = _scored(sampled, lengths, greedy, algorithm, masked.out_of_baseline)
        advantages_N = self._after_scoring(sampled, self._estimator(scored, algorithm))
        context_only = masked.out_of_loss
        prompts = {g.group_id: _narrow(f"the prompt of group {g.group_id}", np.asarray(g.prompt_ids)) for g in groups}
        samples = [
            _sample(r, prompts[r.group_id], float(a), oldest[r.group_id], r.rollout_id not in context_only)
            for r, a in zip(sampled, advantages_N, strict=True)
            if r.num_tokens
        ]
        if algorithm.needs_critic:
            samples = [replace(s, advantages=_at_last(s.advantages, s.mask)) for s in samples]
        return Batch(samples, frozenset(replayed), masked)

    def components(self, group: Group) -> np.ndarray:
        """float [N, R]: the rewards that algorithm.reward_weights names (else the score) of the rollouts that are
        trained. NaN: missing, or masked and not to count."""
        rollouts = [r for r in group.rollouts if not r.greedy]
        return _components(rollouts, self.algorithm, mask_rollouts([group], self.masks).out_of_baseline)

    def _after_scoring(self, rollouts: list[Rollout], advantages_N: torch.Tensor) -> torch.Tensor:
        """What the user's own function leaves of the advantages."""
        if self._own is None:
            return advantages_N
        changed = self._own(list(rollouts), advantages_N)  # a list that it may sort
        return _one_each(advantages_N if changed is None else changed, len(rollouts), self._own)


def build_batch(
    groups: list[Group],
    algorithm: AlgorithmConfig,
    oldest_version: int = EVERY_VERSION,
    masks: Sequence[RolloutFilter] = (),
) -> Batch:
    """One batch of `BatchBuilder`, for a program that makes few."""
    return BatchBuilder(algorithm, masks).build(groups, oldest_version)


def _sample(rollout: Rollout, prompt_ids: np.ndarray, value: float, oldest_version: int, in_loss: bool) -> Sample:
    segments = rollout.segments
    lengths = [len(s) for s in segments]
    sampled = [s.trainable and s.policy_version >= oldest_version for s in segments]
    valid = rollout.reward is not None and not rollout.reward.missing
    # All sampled segments of a run share one temperature.
    temperature = max((s.sampling.temperature for s in segments if s.trainable), default=1.0)
    return Sample(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        prompt_ids=prompt_ids,
        token_ids=_narrow(f"rollout {rollout.rollout_id}", np.concatenate([s.token_ids for s in segments])),
        mask=np.repeat(sampled, lengths).astype(bool) & valid & in_loss,
        behavior_logprobs=np.concatenate([s.logprobs for s in segments]).astype(np.float32),
        versions=np.repeat([s.policy_version for s in segments], lengths).astype(np.int32),
        advantages=np.full(sum(lengths), value if valid else 0.0, dtype=np.float32),
        temperature=temperature,
    )


def _narrow(whose: str, token_ids: np.ndarray) -> np.ndarray:
    """As int32. ValueError where one is no such number: cut down it could be the id of another token."""
    narrow = token_ids.astype(np.int32)
    if not np.array_equal(narrow, token_ids):
        wrong = token_ids[narrow != token_ids][0]
        raise ValueError(f"{whose}: {wrong} is no token id: they are 32-bit integers")
    return narrow


def _num_tokens_since(rollout: Rollout, oldest_version: int) -> int:
    return sum(len(s) for s in rollout.segments if s.trainable and s.policy_version >= oldest_version)


def _scored(
    rollouts: list[Rollout],
    lengths: list[int],
    greedy: dict[int, float],
    algorithm: AlgorithmConfig,
    left_out: Collection[str],
) -> Scored:
    """`left_out`: ids of rollouts whose rewards count as missing."""
    weights = algorithm.reward_weights or {"score": 1.0}
    scores = [float("nan") if r.rollout_id in left_out else _score(r) for r in rollouts]
    return Scored(
        rewards_N=torch.tensor(scores, dtype=torch.float32),
        group_N=torch.tensor([r.group_id for r in rollouts]),
        lengths_N=torch.tensor(lengths),
        components_NR=torch.tensor(_components(rollouts, algorithm, left_out), dtype=torch.float32),
        weights_R=torch.tensor(list(weights.values()), dtype=torch.float32),
        greedy_N=torch.tensor([greedy.get(r.group_id, float("nan")) for r in rollouts], dtype=torch.float32),
    )


def _components(rollouts: list[Rollout], algorithm: AlgorithmConfig, left_out: Collection[str]) -> np.ndarray:
    """float [N, R]: the rewards that algorithm.reward_weights names, else the score. NaN: missing, or `left_out`."""
    names = algorithm.reward_weights or {"score": 1.0}
    rows = [[float("nan") if r.rollout_id in left_out else _component(r, name) for name in names] for r in rollouts]
    return np.array(rows, dtype=float)


def _score(rollout: Rollout) -> float:
    return float("nan") if rollout.reward is None or rollout.reward.score is None else rollout.reward.score


def _component(rollout: Rollout, name: str) -> float:
    """The score, or another entry of what the reward function returned."""
    if name == "score" or rollout.reward is None or rollout.reward.missing:
        return _score(rollout)
    if name not in rollout.reward.extras:
        have = ", ".join(["score", *rollout.reward.extras])
        raise ValueError(
            f"algorithm.reward_weights names {name!r}, which the reward {rollout.task.reward!r} does not return:"
            f" it has {have}"
        )
    return rollout.reward.extras[name]


def _estimator(spec: str) -> Estimator:
    """The named estimator, or the user's own function of rewards and groups."""
    if spec in ADVANTAGES:
        return ADVANTAGES[spec]
    function = own_function("algorithm.advantage", spec, "one finite advantage for each reward that is not NaN")

    def own(scored: Scored, _: AlgorithmConfig) -> torch.Tensor:
        missing_N = torch.isnan(scored.rewards_N)
        return _one_each(function(scored.rewards_N, scored.group_N), len(missing_N), function, missing_N)

    return own


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


def _at_last(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The reward of a rollout, at its last loss token."""
    out = np.zeros_like(values)
    places = np.flatnonzero(mask)
    if len(places):
        out[places[-1]] = values[places[-1]]
    return out

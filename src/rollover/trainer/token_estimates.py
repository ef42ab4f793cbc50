"""What a step finds out about its tokens before its first update: advantages, and log-probs of the policies compared.

B samples, T longest answer, M loss tokens of one. The formulas are in algorithms/. With a critic advantages are
critic.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch

from rollover.algorithms.advantage import reinforce_plus_plus_tokens
from rollover.algorithms.correction import importance_weights, interpolated_proximal
from rollover.algorithms.credit import RoleCredit
from rollover.algorithms.token_advantage import optimal_token_baseline
from rollover.config import AlgorithmConfig
from rollover.staleness import staleness
from rollover.trainer.backend import Stream, TrainerBackend
from rollover.trainer.packing import padded
from rollover.types import Sample

LOGPROB, ENTROPY, SQUARES = range(3)
"""The columns of `TrainerBackend.compute_statistics`."""
STATISTICS = "statistics"
"""The name of that stream, which is for a step itself: no backend is given it."""
_ALIGNED = {"optimal_token_baseline": "positions", "tir_optimal_token_baseline": "loss_tokens"}


Roles = Mapping[str, RoleCredit]
"""`Batch.roles`."""


def estimate_tokens(
    config: AlgorithmConfig, samples: Sequence[Sample], statistics: Stream, roles: Roles = MappingProxyType({})
) -> list[Sample]:
    """The samples with advantages in the place of their rewards, by algorithm.advantage. `statistics`: of their loss
    tokens, where that reads them (`AlgorithmConfig.needs_statistics`)."""
    rewards_BT, mask_BT = padded([s.advantages for s in samples]), padded([s.mask for s in samples], np.bool_)
    if config.advantage == "reinforce_plus_plus_tokens":

        def estimate(rows: list[int]) -> torch.Tensor:
            return reinforce_plus_plus_tokens(rewards_BT[rows], mask_BT[rows], gamma=config.gamma)[0]

    else:
        found_BT = _optimal_baseline(config, samples, statistics, rewards_BT, mask_BT)

        def estimate(rows: list[int]) -> torch.Tensor:
            return found_BT[rows]

    return by_role(samples, roles, estimate)


def by_role(samples: Sequence[Sample], roles: Roles, estimate: Callable[[list[int]], torch.Tensor]) -> list[Sample]:
    """The samples with the advantages that `estimate` gives, times the weight of their role.

    `estimate`: indices of the samples of those roles that are compared with each other -> their advantages [rows, T].
    """
    rows: dict[frozenset[str], list[int]] = {}
    for row, s in enumerate(samples):
        rows.setdefault(roles[s.role].compared_with if s.role in roles else frozenset(), []).append(row)
    out = list(samples)
    for compared in rows.values():
        for row, advantages_T in zip(compared, estimate(compared), strict=True):
            s = samples[row]
            weight = roles[s.role].weight if s.role in roles else 1.0
            out[row] = replace(s, advantages=advantages_T[: len(s.mask)].numpy() * np.float32(weight))
    return out


def sampling_logprobs(backend: TrainerBackend, minibatches: Sequence[list[Sample]]) -> Stream:
    """Log-probs of every loss token under the trainer's weights of the version that sampled it."""
    out = {s.rollout_id: np.zeros(int(s.mask.sum()), np.float32) for part in minibatches for s in part}
    for part in minibatches:
        versions = {int(v) for s in part for v in np.unique(s.versions[s.mask])}
        for version in sorted(versions):
            current = version == backend.policy_version
            found = backend.compute_logprobs(part, None if current else version)
            for s in part:
                if s.mask.any():
                    own = s.versions[s.mask] == version
                    out[s.rollout_id][own] = found[s.rollout_id][own]
    return out


def proximal_and_behavior(
    config: AlgorithmConfig, sample: Sample, start_M: np.ndarray, trainer_version: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [1, M] of the sample's loss tokens under algorithm.proximal, at the start of the step, and under what
    sampled them. `start_M`: those at the start of the step; with proximal = "snapshot" under the weights that sampled.
    """
    start_1M, behavior_1M = (torch.from_numpy(x)[None] for x in (start_M, sample.behavior_logprobs[sample.mask]))
    if config.proximal_policy == "interpolated":
        ages_1M = torch.from_numpy(staleness(sample.versions[sample.mask], trainer_version))[None]
        every_1M = torch.ones_like(start_1M, dtype=torch.bool)
        start_1M = interpolated_proximal(behavior_1M, start_1M, ages_1M, mask_BT=every_1M)
    return start_1M, behavior_1M


# Private


def _optimal_baseline(
    config: AlgorithmConfig,
    samples: Sequence[Sample],
    statistics: Stream,
    rewards_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> torch.Tensor:
    """Its baselines are over the rollouts of a group that have one role."""
    compared = {place: i for i, place in enumerate(dict.fromkeys((s.group_id, s.role) for s in samples))}

    def column(index: int) -> torch.Tensor:
        return torch.zeros(mask_BT.shape).masked_scatter(
            mask_BT,
            torch.from_numpy(np.concatenate([statistics[s.rollout_id][:, index] for s in samples if s.mask.any()])),
        )

    logprobs_BT, weights_BT = column(LOGPROB), None
    if config.weight != "none":
        weights_BT = importance_weights(
            logprobs_BT,
            padded([s.behavior_logprobs for s in samples]),
            mask_BT,
            mode=config.weight,
            cap=config.correction_cap,
            floor=config.correction_floor or None,
            versions_BT=padded([s.versions for s in samples], np.int64),
        )
    return optimal_token_baseline(
        rewards_BT,
        mask_BT,
        torch.tensor([compared[s.group_id, s.role] for s in samples]),
        logprobs_BT,
        column(SQUARES),
        weights_BT=weights_BT,
        align=_ALIGNED[config.advantage],  # pyright: ignore[reportArgumentType]
    )

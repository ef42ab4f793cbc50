"""What a step finds out about its tokens before its first update: advantages, and log-probs of the policies compared.

B samples, T longest answer, M loss tokens of one. The formulas are in algorithms/. With a critic advantages are
critic.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from rollover.algorithms.advantage import reinforce_plus_plus_tokens
from rollover.algorithms.correction import importance_weights, interpolated_proximal
from rollover.algorithms.credit import RoleCredit
from rollover.algorithms.token_advantage import optimal_token_baseline
from rollover.config import AlgorithmConfig
from rollover.staleness import staleness
from rollover.trainer.packing import padded
from rollover.types import Sample

STATISTICS = ("statistics_logprobs", "statistics_entropy", "statistics_squares")
"""Streams of a step's samples, the columns of `TrainerBackend.compute_statistics`; no backend is given them."""
_ALIGNED = {"optimal_token_baseline": "positions", "tir_optimal_token_baseline": "loss_tokens"}


Roles = Mapping[str, RoleCredit]
"""`Batch.roles`."""


def estimate_tokens(
    config: AlgorithmConfig, samples: Sequence[Sample], roles: Roles = MappingProxyType({})
) -> list[Sample]:
    """The samples with advantages in the place of their rewards, by algorithm.advantage. They have STATISTICS, where
    that reads them (`AlgorithmConfig.needs_statistics`)."""
    rewards_BT, mask_BT = padded([s.advantages for s in samples]), padded([s.mask for s in samples], np.bool_)
    if config.advantage == "reinforce_plus_plus_tokens":

        def estimate(rows: list[int]) -> torch.Tensor:
            return reinforce_plus_plus_tokens(rewards_BT[rows], mask_BT[rows], gamma=config.gamma)[0]

    else:
        found_BT = _optimal_baseline(config, samples, rewards_BT, mask_BT)

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
            out[row] = s.with_streams(advantages=advantages_T[: len(s.mask)].numpy() * np.float32(weight))
    return out


def compared_stream(config: AlgorithmConfig) -> str:
    """Which log-probs rejections and weights of a step compare with: those of the proximal policy, or, where the loss
    makes these of others, those at the start of the step."""
    return "proximal_logprobs" if config.proximal_policy in ("step_start", "snapshot") else "start_logprobs"


def proximal_and_behavior(
    config: AlgorithmConfig, sample: Sample, trainer_version: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [1, M] of the sample's loss tokens under algorithm.proximal, at the start of the step, and under what
    sampled them. The sample has the `compared_stream`."""
    names = compared_stream(config), "behavior_logprobs"
    start_1M, behavior_1M = (torch.from_numpy(sample.in_loss(name))[None] for name in names)
    if config.proximal_policy == "interpolated":
        ages_1M = torch.from_numpy(staleness(sample.in_loss("versions"), trainer_version))[None]
        every_1M = torch.ones_like(start_1M, dtype=torch.bool)
        start_1M = interpolated_proximal(behavior_1M, start_1M, ages_1M, mask_BT=every_1M)
    return start_1M, behavior_1M


# Private


def _optimal_baseline(
    config: AlgorithmConfig,
    samples: Sequence[Sample],
    rewards_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> torch.Tensor:
    """Its baselines are over the rollouts of a group that have one role."""
    compared = {place: i for i, place in enumerate(dict.fromkeys((s.group_id, s.role) for s in samples))}

    logprobs_BT, _, squares_BT = (
        padded([np.where(s.mask, s.streams[name], 0) for s in samples]) for name in STATISTICS
    )
    weights_BT = None
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
        squares_BT,
        weights_BT=weights_BT,
        align=_ALIGNED[config.advantage],  # pyright: ignore[reportArgumentType]
    )

"""Advantages per token that a step estimates before its first update, with a critic or without.

B samples, T longest answer, M loss tokens of one. The formulas are in algorithms/advantage.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch

from rollover.algorithms.advantage import gae, optimal_token_baseline, reinforce_plus_plus_tokens, whiten
from rollover.algorithms.correction import importance_weights
from rollover.algorithms.credit import RoleCredit
from rollover.config import AlgorithmConfig
from rollover.trainer.backend import Stream
from rollover.trainer.passes import padded
from rollover.trainer.streams import STATISTICS, with_stream
from rollover.types import Sample

_ALIGNED = {"optimal_token_baseline": "positions", "tir_optimal_token_baseline": "loss_tokens"}


Roles = Mapping[str, RoleCredit]
"""Role -> scaling of its advantages (`Credited.roles`)."""


def estimate_tokens(
    config: AlgorithmConfig, samples: Sequence[Sample], roles: Roles = MappingProxyType({})
) -> list[Sample]:
    """Return the samples with advantages instead of rewards per token, for the estimators without a critic.

    The samples have STATISTICS if algorithm.advantage reads them (`AlgorithmConfig.needs_statistics`).
    """
    rewards_BT, mask_BT = padded([s.advantages for s in samples]), padded([s.mask for s in samples], np.bool_)
    if config.advantage == "reinforce_plus_plus_tokens":

        def estimate(rows: list[int]) -> torch.Tensor:
            return reinforce_plus_plus_tokens(rewards_BT[rows], mask_BT[rows], gamma=config.gamma)[0]

    else:
        found_BT = _optimal_baseline(config, samples, rewards_BT, mask_BT)

        def estimate(rows: list[int]) -> torch.Tensor:
            return found_BT[rows]

    return by_role(samples, roles, estimate)


def with_bootstrap_token(samples: list[Sample]) -> list[Sample]:
    """Add one loss token to truncated samples, so that a critic's last value is that of the whole answer.

    The id of that token does not matter: a value is of the tokens before it.
    """
    return [_extended(s) if s.truncated and s.mask.any() else s for s in samples]


def estimate_with_critic(
    config: AlgorithmConfig, samples: list[Sample], values: Stream, roles: Roles = MappingProxyType({})
) -> list[Sample]:
    """Return the samples with GAE advantages instead of rewards per token, and streams "values" and "returns".

    Advantages are normalised over all loss tokens of a role (`roles`) in the batch, as PPO implementations do. `values`
    of a sample may have one number more than it has loss tokens: the value after its last token
    (`with_bootstrap_token`).
    """
    rewards_BT, mask_BT = padded([s.advantages for s in samples]), padded([s.mask for s in samples], np.bool_)
    of_tokens = {s.rollout_id: np.split(values[s.rollout_id], [s.mask.sum()]) for s in samples if s.mask.any()}
    before = {rollout_id: first for rollout_id, (first, _) in of_tokens.items()}
    flat_M = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *before.values()]))
    later = [of_tokens[s.rollout_id][1].sum() if s.rollout_id in of_tokens else 0.0 for s in samples]
    advantages_BT, returns_BT = gae(
        rewards_BT,
        torch.zeros_like(rewards_BT).masked_scatter(mask_BT, flat_M),
        mask_BT,
        gamma=config.gamma,
        lam=config.gae_lambda,
        beyond_B=torch.tensor(later, dtype=torch.float32),
    )
    out = by_role(samples, roles, lambda rows: whiten(advantages_BT[rows], mask_BT[rows]))
    rows = zip(samples, returns_BT.numpy(), strict=True)
    returns = {s.rollout_id: returns_T[: len(s.mask)][s.mask] for s, returns_T in rows}
    return with_stream(with_stream(out, "values", before), "returns", returns)


def _extended(s: Sample) -> Sample:
    def longer(values: np.ndarray) -> np.ndarray:
        return np.append(values, values[-1:])

    streams = {name: longer(values) for name, values in s.streams.items()}
    return replace(s, token_ids=longer(s.token_ids), mask=np.append(s.mask, True), streams=streams)


def by_role(samples: Sequence[Sample], roles: Roles, estimate: Callable[[list[int]], torch.Tensor]) -> list[Sample]:
    """Return the samples with the advantages of `estimate`, times the weight of their role.

    `estimate`: indices of the samples of roles that are compared with each other -> their advantages [rows, T].
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


# Private


def _optimal_baseline(
    config: AlgorithmConfig,
    samples: Sequence[Sample],
    rewards_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> torch.Tensor:
    """Return advantages over baselines [B, T], which are taken over the rollouts of one role of a group."""
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

"""Advantage estimators: rewards of rollouts -> one advantage per rollout.

Shapes: N rollouts. `group_N` holds integer group ids, in any order. NaN = missing reward: excluded from every
statistic, advantage 0. Everything in float32; pure functions.
"""

from __future__ import annotations

from typing import Literal

import torch


def _group_sums(values_N: torch.Tensor, index_N: torch.Tensor, num_groups: int) -> torch.Tensor:
    return torch.zeros(num_groups, dtype=values_N.dtype, device=values_N.device).index_add_(0, index_N, values_N)


def _centre(rewards_N: torch.Tensor, group_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(centred rewards, 0 where missing; valid mask; group index; valid rollouts per group)."""
    rewards_N = rewards_N.float()
    ids, index_N = torch.unique(group_N, return_inverse=True)
    valid_N = ~torch.isnan(rewards_N)
    # Rewards relative to the group's smallest: equal rewards give exactly 0, whatever rounding the mean has.
    low_G = torch.full((len(ids),), float("inf"), device=rewards_N.device)
    low_G.scatter_reduce_(0, index_N[valid_N], rewards_N[valid_N], "amin")
    filled_N = torch.where(valid_N, rewards_N - low_G[index_N], 0.0)
    count_G = _group_sums(valid_N.float(), index_N, len(ids))
    mean_G = _group_sums(filled_N, index_N, len(ids)) / count_G.clamp(min=1)
    centred_N = torch.where(valid_N, filled_N - mean_G[index_N], 0.0)
    return centred_N, valid_N, index_N, count_G


def grpo(
    rewards_N: torch.Tensor,
    group_N: torch.Tensor,
    *,
    std: Literal["sample", "population", "batch", "none"] = "sample",
    eps: float = 1e-4,
) -> torch.Tensor:
    """GRPO: A_i = (r_i - mean(group)) / (std(group) + eps). Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.

    `std`: "sample" divides by n - 1 (TRL, verl), "population" by n (rLLM), "batch" takes the sample standard deviation
    over all valid rollouts (TRL's scale_rewards="batch"), "none" does not divide. A group with one valid rollout has no
    baseline: advantage 0 (verl gives r).
    """
    centred_N, valid_N, index_N, count_G = _centre(rewards_N, group_N)
    if std == "none":
        return centred_N
    if std == "batch":
        values = rewards_N.float()[valid_N]
        scale_N = values.std() if len(values) > 1 else torch.zeros((), device=values.device)
    else:
        divisor_G = (count_G - (1 if std == "sample" else 0)).clamp(min=1)
        scale_N = torch.sqrt(_group_sums(centred_N**2, index_N, len(count_G)) / divisor_G)[index_N]
    return centred_N / (scale_N + eps)


def dr_grpo(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """Dr. GRPO: A_i = r_i - mean(group), no division. Liu et al. 2025 (arXiv 2503.20783), section 3.2."""
    return grpo(rewards_N, group_N, std="none")


def rloo(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """RLOO: A_i = r_i - mean of the others of the group = n / (n - 1) * (r_i - mean). Singleton group: 0.

    Ahmadian et al. 2024 (arXiv 2402.14740), eq. 8.
    """
    centred_N, _, index_N, count_G = _centre(rewards_N, group_N)
    return centred_N * (count_G / (count_G - 1).clamp(min=1))[index_N]

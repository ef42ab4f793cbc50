"""Advantage estimators: rewards of rollouts -> one advantage per rollout, or per token where a method needs it.

Shapes: N rollouts, R rewards per rollout, B rows, T tokens. `group_N` holds integer group ids, in any order.
NaN = missing reward: excluded from every statistic, advantage 0. The only valid rollout of a group has nothing to be
compared with: advantage 0 too, unless the method needs no group. `lengths_N`, loss tokens per rollout, makes a
statistic over the batch count every token once instead of every rollout once. Everything in float32, as a constant: no
gradient passes through.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from rollover.algorithms.elementwise import masked


def _same_shape(name: str, reference: torch.Tensor, **others: torch.Tensor | None) -> None:
    for other_name, other in others.items():
        if other is not None and other.shape != reference.shape:
            raise ValueError(
                f"{other_name} has shape {tuple(other.shape)}, {name} {tuple(reference.shape)}: make them the same"
            )


def _group_sums(values_N: torch.Tensor, index_N: torch.Tensor, num_groups: int) -> torch.Tensor:
    return torch.zeros(num_groups, dtype=values_N.dtype, device=values_N.device).index_add_(0, index_N, values_N)


def _centre(
    rewards_N: torch.Tensor, group_N: torch.Tensor, weights_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """(rewards minus the group's weighted mean, 0 where missing; valid mask; group index; valid rollouts per group)."""
    _same_shape("rewards_N", rewards_N, group_N=group_N)
    rewards_N = rewards_N.float()
    ids, index_N = torch.unique(group_N, return_inverse=True)
    valid_N = ~torch.isnan(rewards_N)
    # Rewards relative to the group's smallest: equal rewards give exactly 0, whatever rounding the mean has.
    low_G = torch.full((len(ids),), float("inf"), device=rewards_N.device)
    low_G.scatter_reduce_(0, index_N[valid_N], rewards_N[valid_N], "amin")
    filled_N = torch.where(valid_N, rewards_N - low_G[index_N], 0.0)
    share_N = valid_N.float() if weights_N is None else torch.where(valid_N, weights_N.float(), 0.0)
    mean_G = _group_sums(share_N * filled_N, index_N, len(ids)) / _group_sums(share_N, index_N, len(ids)).clamp(min=1)
    centred_N = torch.where(valid_N, filled_N - mean_G[index_N], 0.0)
    return centred_N, valid_N, index_N, _group_sums(valid_N.float(), index_N, len(ids))


def _has_baseline(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """Whether a rollout has a reward, and a sibling with one."""
    _, valid_N, index_N, count_G = _centre(rewards_N, group_N)
    return valid_N & (count_G[index_N] > 1)


def _normalize(
    values: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor | None, eps: float, *, centred: bool = False
) -> torch.Tensor:
    """(values - mean) / (sample standard deviation + eps) over the valid entries of the batch; 0 elsewhere.

    `centred`: their mean is 0 by construction, and what rounding has left of it is not subtracted: 0 stays 0.
    """
    if not valid.any():
        return torch.zeros_like(values, dtype=torch.float32)
    share = valid.float() if weights is None else torch.where(valid, weights.float(), 0.0)
    total = share.sum()
    # Relative to the smallest value: equal values give exactly 0, whatever rounding the mean has.
    low = 0.0 if centred else values[valid].float().min()
    filled = torch.where(valid, values.float() - low, 0.0)
    mean = 0.0 if centred else (share * filled).sum() / total.clamp(min=1)
    centred_values = torch.where(valid, filled - mean, 0.0)
    std = torch.sqrt((share * centred_values**2).sum() / (total - 1).clamp(min=1))
    return centred_values / (std + eps)


@torch.no_grad()
def grpo(
    rewards_N: torch.Tensor,
    group_N: torch.Tensor,
    *,
    std: Literal["sample", "population", "batch", "none"] = "sample",
    eps: float = 1e-4,
) -> torch.Tensor:
    """GRPO: A_i = (r_i - mean(group)) / (std(group) + eps). Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.

    `std`: "sample" divides by n - 1 (TRL, verl), "population" by n (rLLM), "batch" takes the sample standard deviation
    over all valid rollouts (TRL's scale_rewards="batch"), "none" does not divide. `eps`: TRL 1e-4, verl 1e-6. A group
    with one valid rollout has no baseline: advantage 0 (verl gives r).
    """
    if std not in ("sample", "population", "batch", "none"):
        raise ValueError(f'std = {std!r} is no standard deviation: use "sample", "population", "batch" or "none"')
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
    """Dr. GRPO: A_i = r_i - mean(group), no division. Liu et al. 2025 (arXiv 2503.20783), section 3.2.

    A group with one valid rollout has no baseline: advantage 0 (verl gives r).
    """
    return grpo(rewards_N, group_N, std="none")


@torch.no_grad()
def rloo(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """RLOO: A_i = r_i - mean of the others of the group = n / (n - 1) * (r_i - mean). Singleton group: 0.

    Ahmadian et al. 2024 (arXiv 2402.14740), eq. 8. Of a singleton group, verl's `rloo` gives r and its
    `rloo_vectorized` 0.
    """
    centred_N, _, index_N, count_G = _centre(rewards_N, group_N)
    return centred_N * (count_G / (count_G - 1).clamp(min=1))[index_N]


@torch.no_grad()
def opo(rewards_N: torch.Tensor, lengths_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """OPO: A_i = r_i - b, b = sum_j l_j r_j / sum_j l_j over the group: the mean reward of its tokens.

    Hao et al. 2025 (arXiv 2505.23585): the baseline of least variance, if a rollout's squared gradient grows with its
    length. `lengths_N`: loss tokens per rollout. Equal lengths give Dr. GRPO. A singleton group is its own baseline:
    advantage 0 (verl gives r).
    """
    _same_shape("rewards_N", rewards_N, lengths_N=lengths_N)
    return _centre(rewards_N, group_N, lengths_N)[0]


@torch.no_grad()
def max_rl(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """MaxRL: A_i = (r_i - mean(group)) / mean(group), 0 where the mean is 0. Tajwar et al. 2026 (arXiv 2602.02710).

    With rewards 0 and 1 the mean is the pass rate: dividing by it gives the gradient of (truncated) log-likelihood of
    passing instead of that of the pass rate, so that rare successes weigh more. A mean of negative rewards would turn
    the gradient around: those of a group with a reward below 0 are taken relative to its smallest one, so that rewards
    -1 and 1 give what 0 and 1 give. Singleton group: 0.
    """
    centred_N, valid_N, index_N, count_G = _centre(rewards_N, group_N)
    filled_N = torch.where(valid_N, rewards_N.float(), 0.0)
    low_G = torch.zeros(len(count_G), device=filled_N.device).scatter_reduce_(0, index_N, filled_N, "amin")
    sums_G = _group_sums(torch.where(valid_N, filled_N - low_G[index_N], 0.0), index_N, len(count_G))
    mean_N = (sums_G / count_G.clamp(min=1))[index_N]
    return torch.where(mean_N > 0, centred_N / mean_N, 0.0)


@torch.no_grad()
def remax(rewards_N: torch.Tensor, greedy_rewards_N: torch.Tensor) -> torch.Tensor:
    """ReMax: A_i = r_i - reward of the greedy rollout of the same task. Li et al. 2023 (arXiv 2310.10505).

    `greedy_rewards_N`: the greedy reward once per rollout. Where either reward is missing: 0. No groups are needed.
    """
    _same_shape("rewards_N", rewards_N, greedy_rewards_N=greedy_rewards_N)
    return torch.nan_to_num(rewards_N.float() - greedy_rewards_N.float(), nan=0.0)


@torch.no_grad()
def gpg(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """GPG: A_i = alpha * (r_i - mean(group)), alpha = rollouts / rollouts whose reward is not 0, over the batch.

    Chu et al. 2025 (arXiv 2504.02546) put the share of rollouts with an advantage into alpha, so that groups that agree
    do not make the step smaller; verl counts rewards that are not 0, and so does this. A missing reward is no rollout.
    A group with one valid rollout has no baseline: advantage 0 (verl gives alpha * r).
    """
    centred_N, valid_N, _, _ = _centre(rewards_N, group_N)
    rewarded = (valid_N & (rewards_N != 0)).sum().clamp(min=1)
    return centred_N * valid_N.sum() / rewarded


@torch.no_grad()
def grpo_passk(
    rewards_N: torch.Tensor,
    group_N: torch.Tensor,
    *,
    k: int,
    std: Literal["sample", "none"] = "none",
    eps: float = 1e-4,
) -> torch.Tensor:
    """Pass@k: A_i = mean over the subsets S of k siblings with i in S of max(S) - max(S without i).

    What i adds, on average, to the best of k. Tang et al. 2025 (arXiv 2503.19595) take the whole group as the only
    subset, k = n: the best rollout gets best - second best, all others 0; verl's `grpo_passk` is that, divided by the
    group's standard deviation (`std="sample"`, with eps 1e-6). The average over subsets for k < n is that of Walder and
    Karkhanis 2025 (arXiv 2505.15201), who scale it by k / n. A group with fewer than k valid rollouts is taken whole;
    with one: 0 (verl raises).
    """
    if k < 2:
        raise ValueError(f"k = {k}: the best of fewer than 2 leaves nothing to compare with; use rloo for k = 1")
    if std not in ("sample", "none"):
        raise ValueError(f'std = {std!r} is no standard deviation of grpo_passk: use "sample" or "none"')
    _, valid_N, index_N, count_G = _centre(rewards_N, group_N)
    rewards_N = rewards_N.float()
    advantages_N = torch.zeros_like(rewards_N)
    for group, n in enumerate(int(count) for count in count_G):
        if n < 2:
            continue
        members = torch.nonzero(valid_N & (index_N == group)).flatten()
        ranked, order = rewards_N[members].sort()
        # Of the subsets with i, comb(m, size - 2) in comb(n - 1, size - 1) have rank m (from 0) as the best besides i.
        size = min(k, n)
        share = [math.comb(m, size - 2) / math.comb(n - 1, size - 1) for m in range(n)]
        gains = (ranked[:, None] - ranked[None, :]).clamp(min=0)
        values = gains @ torch.tensor(share, device=ranked.device)
        advantages_N[members[order]] = values / (ranked.std() + eps) if std == "sample" else values
    return advantages_N


def _used_rewards(
    rewards_NR: torch.Tensor, group_N: torch.Tensor, weights_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards whose weight is not 0 and their weights: a reward of weight 0 is a metric, and may be missing."""
    if rewards_NR.ndim != 2:
        raise ValueError(f"rewards_NR has shape {tuple(rewards_NR.shape)}: give one column per reward, [N, R]")
    if weights_R is None:
        weights_R = torch.ones(rewards_NR.shape[1], device=rewards_NR.device)
    if weights_R.shape != rewards_NR.shape[1:]:
        raise ValueError(f"weights_R has shape {tuple(weights_R.shape)}: give one weight for each column of rewards_NR")
    if group_N.shape != rewards_NR.shape[:1]:
        raise ValueError(f"group_N has shape {tuple(group_N.shape)}: give one group id for each row of rewards_NR")
    used_R = weights_R != 0
    return rewards_NR.float()[:, used_R], weights_R.float()[used_R]


@torch.no_grad()
def sum_then_normalize(
    rewards_NR: torch.Tensor,
    group_N: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    *,
    std: Literal["sample", "population", "batch", "none"] = "sample",
    eps: float = 1e-4,
    missing: Literal["exclude", "zero"] = "exclude",
) -> torch.Tensor:
    """Several rewards as one: GRPO (`grpo`, with its `std` and `eps`) of r_i = sum_k w_k r_ik. Weights default to 1.

    `missing`: what a rollout counts as that lacks some of its rewards. "exclude": it is missing if a sibling has the
    reward that it lacks, since its sum cannot be compared with theirs; a reward that the whole group lacks does not
    apply to the task and adds 0 to all. "zero": the reward counts 0 (TRL). A rollout without any reward is missing.
    """
    if missing not in ("exclude", "zero"):
        raise ValueError(f'missing = {missing!r}: use "exclude" or "zero"')
    rewards_NR, weights_R = _used_rewards(rewards_NR, group_N, weights_R)
    valid_NR = ~torch.isnan(rewards_NR)
    sums_N = (torch.where(valid_NR, rewards_NR, 0.0) * weights_R).sum(-1)
    missing_N = ~valid_NR.any(-1)
    if missing == "exclude":
        ids, index_N = torch.unique(group_N, return_inverse=True)
        counts_GR = torch.zeros(len(ids), len(weights_R), device=sums_N.device)
        counts_GR.index_add_(0, index_N, valid_NR.float())
        missing_N |= (~valid_NR & (counts_GR[index_N] > 0)).any(-1)
    return grpo(sums_N.masked_fill(missing_N, float("nan")), group_N, std=std, eps=eps)


@torch.no_grad()
def gdpo(
    rewards_NR: torch.Tensor,
    group_N: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    *,
    std: Literal["sample", "population", "batch", "none"] = "sample",
    lengths_N: torch.Tensor | None = None,
    eps: float = 1e-4,
) -> torch.Tensor:
    """GDPO: each reward normalised in its group, weighted sum, normalised over the batch.

    a_i = sum_k w_k (r_ik - mean_k(group)) / (std_k(group) + eps); A_i = (a_i - mean(a)) / (std(a) + eps).
    Liu et al. 2026 (arXiv 2601.05242). `std`: that of the group, as in `grpo` ("none": verl's
    norm_adv_by_std_in_grpo = False); that of the batch is the sample's. Weights default to 1. The batch counts every
    rollout once (TRL), or with `lengths_N` every token (verl, with eps 1e-6 in the group, 1e-8 on the variance of the
    batch).
    A missing reward adds 0, its group's mean: unlike a sum of raw rewards, the others of the rollout stay comparable.
    A rollout none of whose rewards has a baseline (no reward, or no sibling with it) has advantage 0 and is no part of
    the batch's statistics; TRL counts it with a_i = 0 if it has a reward, verl with r.
    """
    _same_shape("group_N", group_N, lengths_N=lengths_N)
    rewards_NR, weights_R = _used_rewards(rewards_NR, group_N, weights_R)
    sums_N = torch.zeros(len(rewards_NR), device=rewards_NR.device)
    valid_N = torch.zeros(len(rewards_NR), dtype=torch.bool, device=rewards_NR.device)
    for rewards_N, weight in zip(rewards_NR.unbind(-1), weights_R, strict=True):
        sums_N += weight * grpo(rewards_N, group_N, std=std, eps=eps)
        valid_N |= _has_baseline(rewards_N, group_N)
    # Each reward's advantages add up to 0 in a group, so the mean over rollouts is 0 (that over tokens is not).
    return _normalize(sums_N, valid_N, lengths_N, eps, centred=lengths_N is None)


@torch.no_grad()
def reinforce_plus_plus(
    rewards_N: torch.Tensor, *, lengths_N: torch.Tensor | None = None, eps: float = 1e-4
) -> torch.Tensor:
    """REINFORCE++, one advantage per rollout: A_i = (r_i - mean(batch)) / (std(batch) + eps).

    Hu et al. 2025 (arXiv 2501.03262), for gamma = 1 and no KL in the reward: then all tokens of a rollout have the same
    return. Otherwise use `reinforce_plus_plus_tokens`. The paper's batch is one of tokens: give `lengths_N` for that
    (verl, with eps 1e-8 on the variance); without it every rollout counts once. Needs no groups. One valid rollout: 0.
    """
    _same_shape("rewards_N", rewards_N, lengths_N=lengths_N)
    return _normalize(rewards_N, ~torch.isnan(rewards_N), lengths_N, eps)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    rewards_N: torch.Tensor, group_N: torch.Tensor, *, lengths_N: torch.Tensor | None = None, eps: float = 1e-4
) -> torch.Tensor:
    """REINFORCE++ with baseline: a_i = r_i - mean(group); A_i = (a_i - mean(a)) / (std(a) + eps) over the batch.

    Hu et al. 2025 (arXiv 2501.03262), the variant for several rollouts a task. `lengths_N`: as in
    `reinforce_plus_plus`; with it the mean of a is not 0, and a group of equal rewards gets - mean(a) / (std(a) + eps).
    A singleton group has no baseline: advantage 0, and no part of the statistics (verl takes a_i = r).
    """
    _same_shape("rewards_N", rewards_N, lengths_N=lengths_N)
    values_N, valid_N = _centre(rewards_N, group_N)[0], _has_baseline(rewards_N, group_N)
    return _normalize(values_N, valid_N, lengths_N, eps, centred=lengths_N is None)


@torch.no_grad()
def reinforce_plus_plus_tokens(
    rewards_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float = 1.0, eps: float = 1e-4
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++, per token: (advantages_BT, returns_BT). G_t = r_t + gamma G_next; A_t = (G_t - mean) / (std + eps).

    Hu et al. 2025 (arXiv 2501.03262). `rewards_BT` holds the rollout's reward at its last loss token and, with KL in
    the reward, - beta * KL_t at every loss token. Mean and sample standard deviation are over the loss tokens of the
    batch (verl, with eps 1e-8 on the variance). Masked tokens and rows with a missing (NaN) reward: as in `gae`.
    """
    _same_shape("rewards_BT", rewards_BT, mask_BT=mask_BT)
    # The return is the generalised advantage without a critic: values 0, lam 1.
    _, returns_BT = gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)
    valid_BT = mask_BT.bool() & ~_rows_without_reward(rewards_BT, mask_BT)[:, None]
    return _normalize(returns_BT, valid_BT, None, eps), returns_BT


def _rows_without_reward(rewards_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return (torch.isnan(rewards_BT) & mask_BT.bool()).any(-1)


@torch.no_grad()
def gae(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    beyond_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: (advantages_BT, returns_BT), both 0 where masked.

    d_t = r_t + gamma V_next - V_t; A_t = d_t + gamma lam A_next; returns = A + V. Schulman et al. 2015 (arXiv
    1506.02438), eq. 16. Masked tokens (padding, the environment's) are no steps: "next" is the next unmasked token,
    without a discount for the gap, and what a masked position holds is not read, so an environment's reward belongs on
    the unmasked token before it. After the last unmasked token V = `beyond_B` [B]; None: 0, for truncated rollouts too.
    verl does the latter, then normalises the advantages: that is `whiten` here. A row with a NaN reward at an unmasked
    token has advantage 0, and its values as returns, so that a critic learns nothing from it.
    """
    _same_shape("rewards_BT", rewards_BT, values_BT=values_BT, mask_BT=mask_BT)
    mask_BT = mask_BT.bool()
    missing_B = _rows_without_reward(rewards_BT, mask_BT)
    rewards_BT = rewards_BT.float()
    values_BT = masked(values_BT, mask_BT)
    advantages_BT = torch.zeros_like(values_BT)
    next_advantage_B = values_BT.new_zeros(len(values_BT))
    next_value_B = next_advantage_B if beyond_B is None else beyond_B.float()
    for t in reversed(range(mask_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = torch.where(mask_BT[:, t], delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_BT[:, t], values_BT[:, t], next_value_B)
        advantages_BT[:, t] = next_advantage_B
    advantages_BT = torch.where(mask_BT & ~missing_B[:, None], advantages_BT, 0.0)
    return advantages_BT, advantages_BT + values_BT


@torch.no_grad()
def whiten(advantages_BT: torch.Tensor, mask_BT: torch.Tensor, *, eps: float = 1e-4) -> torch.Tensor:
    """(A - mean) / (std + eps) over the unmasked tokens of the batch, sample standard deviation; 0 where masked.

    What PPO does with the advantages of `gae`. verl adds 1e-8 to the variance instead. To leave rollouts out, of a
    missing reward say, mask them.
    """
    _same_shape("advantages_BT", advantages_BT, mask_BT=mask_BT)
    return _normalize(advantages_BT, mask_BT.bool(), None, eps)

"""Advantage estimators: rewards of rollouts -> one advantage per rollout, or per token where a method needs it.

Shapes: N rollouts, R rewards per rollout, B rows, T tokens. `group_N` holds integer group ids, in any order.
NaN = missing reward: excluded from every statistic, advantage 0. The only valid rollout of a group has nothing to be
compared with: advantage 0 too, unless the method needs no group. `lengths_N`, loss tokens per rollout, makes a
statistic over the batch count every token once instead of every rollout once. Everything in float32, as a constant: no
gradient passes through. `Estimator` is the estimator that the configuration names; config/traits.py has its name, and
what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rollover.algorithms.token_batch import masked
from rollover.config import AlgorithmConfig
from rollover.config.traits import ADVANTAGES
from rollover.functions import CustomFunction, custom_function, described
from rollover.types import Reward


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
    """Return whether a rollout has a reward, and a sibling with one."""
    _, valid_N, index_N, count_G = _centre(rewards_N, group_N)
    return valid_N & (count_G[index_N] > 1)


def _normalize(
    values: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor | None, eps: float, *, centred: bool = False
) -> torch.Tensor:
    """Return (values - mean) / (sample standard deviation + eps) over the valid entries of the batch; 0 elsewhere.

    `centred`: the mean is 0 by construction, and its rounding error is not subtracted: 0 stays 0.
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
    """Return the rewards whose weight is not 0, and the weights: a reward of weight 0 is a metric only."""
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
    """Return (A - mean) / (std + eps) over the unmasked tokens of the batch, sample standard deviation; 0 where masked.

    What PPO does with the advantages of `gae`. verl adds 1e-8 to the variance instead. To leave rollouts out, of a
    missing reward say, mask them.
    """
    _same_shape("advantages_BT", advantages_BT, mask_BT=mask_BT)
    return _normalize(advantages_BT, mask_BT.bool(), None, eps)


@torch.no_grad()
def optimal_token_baseline(
    rewards_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    group_B: torch.Tensor,
    logprobs_BT: torch.Tensor,
    squares_BT: torch.Tensor,
    *,
    weights_BT: torch.Tensor | None = None,
    align: Literal["positions", "loss_tokens"] = "positions",
) -> torch.Tensor:
    """A_t = G_t - b_t, b_t = sum_i W_it G_it / sum_i W_it over the rows of the group that have a t-th token -> [B, T].

    Li et al. 2026 (arXiv 2602.07078). G is the sum of the rewards from a token on. W_t = sum over the tokens up to t of
    rho^2 (1 - 2 pi + sum_v pi_v^2), the squared norm of the log-prob's gradient in the logits: the baseline of least
    variance for the gradient at t weighs a row by how much it has moved the policy until there. `logprobs_BT`: log pi
    of the tokens at the start of the step; `squares_BT`: sum over the vocabulary of pi_v^2; `weights_BT`: importance
    weights rho of the tokens (None: 1).

    `align`: what makes two tokens the t-th of their rows. "positions": their place in the answer, those of an
    environment counted (verl's optimal_token_baseline); "loss_tokens": their number among the loss tokens (its
    tir_optimal_token_baseline), which is the same for answers without gaps. Beyond the last token of all others a row
    has nothing to be compared with: b = 0 there, as in verl's handle_zero_tail. A group of one row has no baseline at
    all: 0 (verl gives G). A row with a NaN reward at a loss token is no row.
    """
    if align not in ("positions", "loss_tokens"):
        raise ValueError(f'align = {align!r}: use "positions" or "loss_tokens"')
    mask_BT = mask_BT.bool()
    mask_BT = mask_BT & ~(torch.isnan(rewards_BT) & mask_BT).any(-1, keepdim=True)
    # Order of a row's tokens for the comparison, masked ones last. Everything below is in this order.
    order_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand_as(mask_BT)
    if align == "loss_tokens":
        order_BT = (~mask_BT).int().argsort(dim=-1, stable=True)
    mask_BT = mask_BT.gather(-1, order_BT)

    def ordered(stream_BT: torch.Tensor) -> torch.Tensor:
        return masked(stream_BT.gather(-1, order_BT), mask_BT)

    returns_BT = masked(ordered(rewards_BT).flip(-1).cumsum(-1).flip(-1), mask_BT)
    norms_BT = masked(1 - 2 * ordered(logprobs_BT).exp() + ordered(squares_BT), mask_BT)
    if weights_BT is not None:
        norms_BT = norms_BT * ordered(weights_BT).square()
    moved_BT = masked(norms_BT.cumsum(-1), mask_BT)
    advantages_BT = torch.zeros_like(returns_BT)
    for group in torch.unique(group_B):
        rows_N = torch.nonzero((group_B == group) & mask_BT.any(-1)).flatten()
        if len(rows_N) > 1:
            baseline_NT = _baselines(returns_BT[rows_N], moved_BT[rows_N], mask_BT[rows_N])
            advantages_BT[rows_N] = masked(returns_BT[rows_N] - baseline_NT, mask_BT[rows_N])
    return torch.zeros_like(advantages_BT).scatter(-1, order_BT, advantages_BT)


def _baselines(returns_NT: torch.Tensor, weights_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """Return the baselines of a group's rows [N, T]: 0 beyond the last token of all others."""
    baseline_T = (returns_NT * weights_NT).sum(0) / (weights_NT.sum(0) + 1e-8)
    places_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    last_N = (mask_NT * places_T).amax(-1)
    longest, second = last_N.topk(2).values
    alone_NT = (last_N == longest)[:, None] & (places_T > second)
    return torch.where(alone_NT, 0.0, baseline_T.expand_as(returns_NT))


@dataclass(frozen=True, slots=True)
class ScoredUnit:
    """A trajectory, or one of its turns, which gets one advantage. `reward` None counts as missing.

    `group`: units of equal ones are compared. `num_tokens`: sampled tokens that are not too old for the loss.
    `greedy_score`: score of the greedy rollout of the same task, NaN without one. `named`: the reward function.
    """

    reward: Reward | None
    group: int
    num_tokens: int
    greedy_score: float = float("nan")
    named: str = ""


@dataclass(frozen=True)
class ScoredBatch:
    """The units of a batch as an estimator reads them, without the greedy baselines.

    rewards_N: scores. rewards_NR: the rewards that algorithm.reward_weights names (else the score), with the weights
    weights_R. The others are as in ScoredUnit.
    """

    rewards_N: torch.Tensor
    group_N: torch.Tensor
    lengths_N: torch.Tensor
    rewards_NR: torch.Tensor
    weights_R: torch.Tensor
    greedy_rewards_N: torch.Tensor

    @classmethod
    def from_units(cls, units: Sequence[ScoredUnit], algorithm: AlgorithmConfig) -> ScoredBatch:
        """Make the tensors. ValueError if a reward function lacks a reward of algorithm.reward_weights."""
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

    A custom function is looked up here: ValueError before anything is generated if it does not exist.
    """

    def __init__(self, algorithm: AlgorithmConfig, name: str) -> None:
        self._estimate = _built_in(algorithm, name) if name in ADVANTAGES else _custom(name)

    def __call__(self, scored: ScoredBatch) -> torch.Tensor:
        """Return advantages, float32 [N]; the rewards, if the step estimates per token (`AdvantageTraits.over_tokens`).

        FunctionError if a custom function raises or returns anything else.
        """
        return self._estimate(scored)


def score_of(reward: Reward | None) -> float:
    """Return the score; NaN if it is missing."""
    return float("nan") if reward is None or reward.score is None else reward.score


def rewards_of(rewards: Sequence[Reward | None], named: Sequence[str], algorithm: AlgorithmConfig) -> np.ndarray:
    """Return float [N, R]: the rewards that algorithm.reward_weights names, else the score. NaN: missing.

    `named`: the reward function of each, named by the ValueError where it lacks one of them.
    """
    names = _weights(algorithm)
    rows = [[_reward(r, name, of) for name in names] for r, of in zip(rewards, named, strict=True)]
    return np.array(rows, dtype=float)


# Private

_SEVERAL = "functions/"  # prefix of the spec of rewards.functions, which contains the names of its functions

# Each name in the configuration is that of a function of this file, unless the step does the estimating.
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: globals()[name] for name, traits in ADVANTAGES.items() if not (traits.precomputed or traits.over_tokens)
}


def _built_in(algorithm: AlgorithmConfig, name: str) -> Callable[[ScoredBatch], torch.Tensor]:
    traits = ADVANTAGES[name]
    if traits.over_tokens:
        return lambda scored: torch.nan_to_num(scored.rewards_N)
    function = _FUNCTIONS[name]
    options = {name: getattr(algorithm, option) for name, option in traits.options.items()}
    by_tokens = traits.counts and (algorithm.advantage_counts or traits.counts) == "tokens"
    reads = (*traits.reads, "lengths_N") if by_tokens else traits.reads
    return lambda scored: function(**{name: getattr(scored, name) for name in reads}, **options)


def _custom(spec: str) -> Callable[[ScoredBatch], torch.Tensor]:
    """Wrap a custom function of rewards and groups."""
    function = custom_function("algorithm.advantage", spec, "one finite advantage for each reward that is not NaN")

    def estimate(scored: ScoredBatch) -> torch.Tensor:
        missing_N = torch.isnan(scored.rewards_N)
        return checked_advantages(function(scored.rewards_N, scored.group_N), len(missing_N), function, missing_N)

    return estimate


def checked_advantages(
    value: object, num: int, function: CustomFunction, missing_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what a custom function returned as advantages [N], 0 where `missing_N`.

    Raises its FunctionError unless there is one finite number for each of `num` rollouts.
    """
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
    """Return the score, or another entry of what the reward function returned."""
    if name == "score" or reward is None or reward.missing:
        return score_of(reward)
    if name not in reward.extras:
        if named.startswith(_SEVERAL) and name.partition(".")[0] in named:
            return float("nan")  # one of several functions, which does not apply to the task
        have = ", ".join(["score", *reward.extras])
        raise ValueError(
            f"algorithm.reward_weights names {name!r}, which the reward {named!r} does not return: it has {have}"
        )
    return reward.extras[name]

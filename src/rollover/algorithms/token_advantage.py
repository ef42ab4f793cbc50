"""Optimal token baselines: advantages per token from rewards, and from how much each token would move the policy.

Shapes: B rows, T positions of an answer. As in advantage.py: float32, constants, a missing reward is NaN.
"""

from __future__ import annotations

from typing import Literal

import torch

from rollover.algorithms.elementwise import masked


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
    # Each row's order in which tokens are compared, what is masked behind them. All is in this order from here on.
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
    """Those of the rows of a group, [N, T]: 0 for a row beyond the last token of all others."""
    baseline_T = (returns_NT * weights_NT).sum(0) / (weights_NT.sum(0) + 1e-8)
    places_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    last_N = (mask_NT * places_T).amax(-1)
    longest, second = last_N.topk(2).values
    alone_NT = (last_N == longest)[:, None] & (places_T > second)
    return torch.where(alone_NT, 0.0, baseline_T.expand_as(returns_NT))

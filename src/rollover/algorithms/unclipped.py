"""Policy losses without a clip: the plain gradient, weights that fall smoothly, and penalties in place of a bound.

As the losses of loss.py, which finds them here by their names.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from rollover.algorithms.elementwise import bounded, masked
from rollover.algorithms.token_batch import LossAndClipped, TokenBatch, ratio_at


def reinforce(t: TokenBatch) -> LossAndClipped:
    """-logprob * A (Williams 1992). verl: gpg."""
    return -t.logprobs_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)


def nll(t: TokenBatch) -> LossAndClipped:
    """-logprob: the negative log-likelihood of examples (`rollover sft`). Advantages have no part in it.

    With the aggregation token-mean it is the loss that transformers computes of labels, and TRL's SFTTrainer.
    """
    return -t.logprobs_BT, torch.zeros_like(t.mask_BT)


def importance_sampling(t: TokenBatch) -> LossAndClipped:
    """-r A, r = current / old, without any bound: the surrogate of Kakade and Langford 2002 and of TRPO.

    Schulman et al. 2015 (arXiv 1502.05477), eq. 14. Its gradient is that of `reinforce` with the weight r: unbiased on
    the tokens of the old policy, with a variance that only the correction's cap bounds. verl's kl_cov without its
    penalty; the loss "importance_sampling" of Tinker.
    """
    return -t.ratio_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)


def dro(t: TokenBatch, *, beta: float = 1.0) -> LossAndClipped:
    """-(A logprob - beta / 2 (log r)^2): a quadratic penalty on the log-ratio in place of weight and clip.

    Direct Reward Optimisation, Richemond et al. 2024 (arXiv 2405.19107), with an advantage in the place of reward minus
    value; as verl's, which has no default for beta. The penalty pulls a token of advantage 0 back, too. Its exponents
    are log-ratios themselves: nothing is bounded.
    """
    if not beta > 0:
        raise ValueError(f"beta = {beta}: the weight of the penalty must be above 0")
    loss_BT = -(t.logprobs_BT * t.advantages_BT - 0.5 * beta * t.log_ratio_BT.square())
    return loss_BT, torch.zeros_like(t.mask_BT)


def sapo(
    t: TokenBatch,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: Literal["token", "sequence"] = "token",
) -> LossAndClipped:
    """-A * 4 / tau * sigmoid(tau (r - 1)): a smooth gate instead of a clip. Aggregate: seq-mean-token-mean.

    Gao et al. 2025 (arXiv 2511.20347). tau is tau_positive where A > 0, else tau_negative. At r = 1 the gradient is
    REINFORCE's. `level` "sequence": the ratio of `gspo` in the place of the token's. Nothing counts as clipped.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError("tau_positive and tau_negative must be above 0 (the paper: 1.0 and 1.05)")
    tau_BT = torch.where(t.advantages_BT > 0, tau_positive, tau_negative)
    gate_BT = torch.sigmoid(tau_BT * (ratio_at(t, level) - 1)) * 4 / tau_BT
    return -gate_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)


# What TRL and the authors' code take for a weight of 0 of a token or a sequence.
_LOG_OF_NOTHING = math.log(1e-8)


def vespo(
    t: TokenBatch,
    *,
    behavior_logprobs_BT: torch.Tensor,
    weight_cap: float | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> LossAndClipped:
    """-sg[phi(w)] A logprob, phi(w) = exp(lambda (1 - w)) w^k: a soft weight of the sequence, 1 where w = 1.

    arXiv 2602.10693, as TRL's. w is the product over the row's tokens of current / behavior: that of current / old
    times min(old / behavior, weight_cap), each log bounded to [log 1e-8, 20] (old / behavior) or +-20, and their sum
    again. k, lambda: the positive ones where A >= 0. phi rises as w^k from 0 to its peak at w = k / lambda and falls
    exponentially beyond: what is far from the behavior policy on either side fades out. Aggregate: token-mean.
    """
    if min(k_positive, lambda_positive, k_negative, lambda_negative) <= 0:
        raise ValueError("k_positive, lambda_positive, k_negative and lambda_negative must be above 0 (2, 3, 3 and 2)")
    with torch.no_grad():
        correction_BT = masked(bounded(t.old_logprobs_BT - behavior_logprobs_BT.float()), t.mask_BT)
        if weight_cap is not None:
            correction_BT = correction_BT.clamp(max=math.log(weight_cap))
        log_w_BT = bounded(t.log_ratio_BT) + correction_BT.clamp(min=_LOG_OF_NOTHING)
        log_w_B1 = masked(log_w_BT, t.mask_BT).sum(-1, keepdim=True).clamp(_LOG_OF_NOTHING, 20.0)
        rises_BT = t.advantages_BT >= 0
        k_BT = torch.where(rises_BT, k_positive, k_negative)
        lambda_BT = torch.where(rises_BT, lambda_positive, lambda_negative)
        weight_BT = torch.exp(lambda_BT + k_BT * log_w_B1 - lambda_BT * log_w_B1.exp())
    return -weight_BT * t.advantages_BT * t.logprobs_BT, torch.zeros_like(t.mask_BT)

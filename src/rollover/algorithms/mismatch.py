"""How far the policy that sampled was from the proximal one: sums of micro-batches, and the diagnostics they give.

Shapes: B rows, T tokens. Log-probs [B, T], mask [B, T] (bool or 0/1), as in correction.py, whose ratios and weights
these are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from rollover.algorithms.correction import (
    MODES,
    CorrectionMode,
    floor_of,
    importance_weights,
    log_ratios,
    row_mean,
)
from rollover.algorithms.elementwise import MAX_LOG_RATIO, bounded, bounded_exp, masked


@torch.no_grad()
def mismatch_metrics(
    proximal_logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    mode: CorrectionMode | Literal["none"],
    cap: float,
    floor: float | None = None,
    versions_BT: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """How far the sampling policy was from the proximal one: sums and counts ("max/..." combine by maximum).

    sum/kl and sum/k3: the k1 and k3 estimates of KL(behavior || proximal), summed over tokens. */importance: the mode's
    ratio before its bounds (with "none" the token's, which is then not applied). sum/capped, sum/below: tokens whose
    ratio passes the cap, or is below the floor (1 / cap where the mode has none); 0 with "none". sum/bounded: tokens
    whose log-ratio was bounded to +-20. sum/weight(_squared): the weights as applied. sum/token_ratio(_squared) is over
    tokens, sum/sequence_ratio(_squared) and */..ppl.. are over sequences. `mismatch_summary` makes means of them.
    No tokens are selected by the mask: to learn how many there are, the program would have to wait for the GPU.
    """
    mask_BT = mask_BT.bool()
    level = "token" if mode == "none" else MODES.get(mode, ("token", ""))[0]
    # A mode that does not exist is an error here as it is in importance_weights.
    floor = floor_of("token_mask" if mode == "none" else mode, cap, floor)
    args = (proximal_logprobs_BT, behavior_logprobs_BT, mask_BT)
    log_ratio_BT = masked(log_ratios(*args, level, versions_BT), mask_BT)
    ratio_BT = masked(bounded_exp(log_ratio_BT), mask_BT)
    if mode == "none":
        weights_BT = mask_BT.float()
    else:
        weights_BT = importance_weights(*args, mode=mode, cap=cap, floor=floor, versions_BT=versions_BT)
    d_BT = log_ratios(*args, "token")
    bounded_BT = bounded(d_BT)
    token_ratio_BT = masked(bounded_BT.exp(), mask_BT)
    corrected = float(mode != "none")
    below_BT = mask_BT & (ratio_BT < (1 / cap if floor is None else floor))
    return {
        "count/tokens": mask_BT.sum().float(),
        "sum/logprob_abs": d_BT.abs().sum(),
        "max/logprob_abs": d_BT.abs().max(),
        "sum/kl": -d_BT.sum(),
        "sum/k3": (torch.expm1(bounded_BT) - bounded_BT).sum(),
        "sum/importance": ratio_BT.sum(),
        "max/importance": ratio_BT.max(),
        "sum/capped": (ratio_BT > cap).sum() * corrected,
        "sum/below": below_BT.sum() * corrected,
        "sum/bounded": (log_ratio_BT.abs() > MAX_LOG_RATIO).sum().float(),
        "sum/weight": weights_BT.sum(),
        "sum/weight_squared": weights_BT.square().sum(),
        "sum/token_ratio": token_ratio_BT.sum(),
        "sum/token_ratio_squared": token_ratio_BT.square().sum(),
    } | _sequence_metrics(*args)


def _sequence_metrics(
    proximal_logprobs_BT: torch.Tensor, behavior_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The part of mismatch_metrics that is over the S sequences. log ppl = -mean log-prob of the loss tokens."""
    some_B = mask_BT.any(-1)
    proximal_B = -row_mean(proximal_logprobs_BT, mask_BT)
    behavior_B = -row_mean(behavior_logprobs_BT, mask_BT)
    difference_B = proximal_B - behavior_B
    ratio_B = bounded_exp(log_ratios(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, "sequence")[:, 0])

    def total(values_B: torch.Tensor) -> torch.Tensor:
        return masked(values_B, some_B).sum()

    def largest(values_B: torch.Tensor) -> torch.Tensor:
        return torch.where(some_B, values_B, -float("inf")).max()

    return {
        "count/sequences": some_B.sum().float(),
        "sum/sequence_ratio": total(ratio_B),
        "sum/sequence_ratio_squared": total(ratio_B.square()),
        "sum/proximal_log_ppl": total(proximal_B),
        "sum/behavior_log_ppl": total(behavior_B),
        "sum/proximal_ppl": total(bounded_exp(proximal_B)),
        "sum/behavior_ppl": total(bounded_exp(behavior_B)),
        "sum/ppl_ratio": total(bounded_exp(difference_B)),
        "sum/log_ppl_abs_difference": total(difference_B.abs()),
        "max/log_ppl_difference": largest(difference_B),
        "max/log_ppl_difference_negative": largest(-difference_B),
    }


def mismatch_summary(totals: Mapping[str, float]) -> dict[str, float]:
    """Diagnostics from the added-up `mismatch_metrics` of any number of micro-batches; {} without a token.

    Means over tokens or sequences; chi2 = mean(ratio^2) - 1, the chi-square divergence of proximal from behavior;
    effective sample sizes as in `effective_sample_size`: of the weights as applied, and of the ratios before bounds.
    """
    if not totals.get("count/tokens"):
        return {}
    tokens, sequences = float(totals["count/tokens"]), float(totals["count/sequences"])

    def ess(name: str, count: float) -> float:
        squares = float(totals[f"sum/{name}_squared"]) * count
        return float(totals[f"sum/{name}"]) ** 2 / squares if squares else 0.0

    over_tokens = ("logprob_abs", "kl", "k3", "importance", "capped", "below", "bounded", "weight")
    over_sequences = (
        "proximal_log_ppl", "behavior_log_ppl", "proximal_ppl", "behavior_ppl", "ppl_ratio", "log_ppl_abs_difference"
    )  # fmt: skip
    means = {name: float(totals[f"sum/{name}"]) / tokens for name in over_tokens}
    means |= {name: float(totals[f"sum/{name}"]) / sequences for name in over_sequences}
    return means | {
        "chi2_token": float(totals["sum/token_ratio_squared"]) / tokens - 1,
        "chi2_sequence": float(totals["sum/sequence_ratio_squared"]) / sequences - 1,
        "log_ppl_difference": means["proximal_log_ppl"] - means["behavior_log_ppl"],
        "log_ppl_difference_max": float(totals["max/log_ppl_difference"]),
        "log_ppl_difference_min": -float(totals["max/log_ppl_difference_negative"]),
        "ess_weight": ess("weight", tokens),
        "ess_token_ratio": ess("token_ratio", tokens),
        "ess_sequence_ratio": ess("sequence_ratio", sequences),
    }

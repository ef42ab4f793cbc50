"""Off-policy correction: importance weights between the policy that sampled a token and the proximal one.

Shapes: B rows, T tokens. Weights are constants (detached); masked positions and masked-out entries are exactly 0.
"""

from __future__ import annotations

from typing import Literal

import torch

from rollover.algorithms.loss import MAX_LOG_RATIO

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def _ratios(
    proximal_logprobs_BT: torch.Tensor, behavior_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, level: str
) -> torch.Tensor:
    """proximal / behavior [B, T] before any cap, per token or per sequence (the same value on all its positions)."""
    log_ratio_BT = torch.where(mask_BT, proximal_logprobs_BT.float() - behavior_logprobs_BT.float(), 0.0)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    return torch.exp(log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


@torch.no_grad()
def importance_weights(
    proximal_logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    mode: CorrectionMode,
    cap: float,
    floor: float | None = None,
) -> torch.Tensor:
    """w = proximal / behavior per token, or per sequence (product over its tokens), bounded by `cap` -> [B, T].

    "truncate" clamps w to at most cap (and at least floor): truncated importance sampling (Ionides 2008; decoupled PPO,
    Hilton et al. 2022, arXiv 2110.00641). "mask" sets w above cap (or below floor) to exactly 0. Log-ratios are bounded
    to +-20 before exp.
    """
    mask_BT = mask_BT.bool()
    level, _, action = mode.partition("_")
    if level not in ("token", "sequence"):
        raise ValueError(f"mode = {mode!r} is not a correction")
    weights_BT = _ratios(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level)
    if action == "truncate":
        weights_BT = weights_BT.clamp(min=floor, max=cap)
    elif action == "mask":
        outside_BT = weights_BT > cap
        if floor is not None:
            outside_BT |= weights_BT < floor
        weights_BT = weights_BT.masked_fill(outside_BT, 0.0)
    else:
        raise ValueError(f"mode = {mode!r} is not a correction")
    return torch.where(mask_BT, weights_BT, 0.0)


@torch.no_grad()
def mismatch_metrics(
    proximal_logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    mode: CorrectionMode | Literal["none"],
    cap: float,
) -> dict[str, torch.Tensor]:
    """How far the sampling policy was from the proximal one: sums and counts ("max/..." combine by maximum).

    sum/kl is the k1 estimate of KL(behavior || proximal): log behavior - log proximal, summed over tokens.
    */importance are of the weights before the cap (of a sequence mode: the sequence's; with "none" the token's ratio,
    which is then not applied). sum/capped counts the tokens whose weight passes the cap: none without a correction.
    """
    mask_BT = mask_BT.bool()
    if not mask_BT.any():
        return {}
    difference = (proximal_logprobs_BT.float() - behavior_logprobs_BT.float())[mask_BT]
    level = mode.partition("_")[0]
    ratios = _ratios(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level)[mask_BT]
    return {
        "sum/logprob_abs": difference.abs().sum(),
        "max/logprob_abs": difference.abs().max(),
        "sum/kl": -difference.sum(),
        "sum/importance": ratios.sum(),
        "max/importance": ratios.max(),
        "sum/capped": (ratios > (float("inf") if mode == "none" else cap)).sum().float(),
    }

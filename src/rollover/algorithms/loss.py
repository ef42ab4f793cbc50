"""Policy losses: current and old (proximal) log-probs, advantages -> loss per token.

Shapes: B rows, T tokens. Differentiable in `logprobs_BT` alone; float32; pure functions. Masked positions are 0.
"""

from __future__ import annotations

from typing import Literal

import torch

LossKind = Literal["clip", "reinforce"]

# A log-ratio beyond this is numerically meaningless: exp(20) = 5e8.
MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    kind: LossKind,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss per token [B, T] and metrics as sums and counts, which add up over micro-batches ("max/..." by maximum).

    "clip": -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old). Schulman et al. 2017
    (arXiv 1707.06347), eq. 7; separate bounds as in DAPO (arXiv 2503.14476), eq. 10; `dual_clip` c bounds the loss of a
    negative advantage by -c A (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    "reinforce": -logprob * A (Williams 1992). `advantages_BT` may be [B] or [B, T].
    """
    logprobs_BT = logprobs_BT.float()
    mask_BT = mask_BT.bool()
    if advantages_BT.ndim == 1:
        advantages_BT = advantages_BT[:, None].expand_as(logprobs_BT)
    advantages_BT = advantages_BT.float()
    log_ratio_BT = (logprobs_BT - old_logprobs_BT.detach().float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BT = torch.exp(torch.where(mask_BT, log_ratio_BT, 0.0))
    with torch.no_grad():
        zero = torch.zeros((), device=logprobs_BT.device)
        metrics = {
            "count/tokens": mask_BT.sum().float(),
            "sum/ratio": torch.where(mask_BT, ratio_BT, 0.0).sum(),
            "max/ratio": ratio_BT[mask_BT].max() if mask_BT.any() else zero,
            "sum/clipped": zero,
        }
    if kind == "reinforce":
        loss_BT = -logprobs_BT * advantages_BT
    elif kind == "clip":
        clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
        loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
        if dual_clip is not None:
            bounded_BT = torch.minimum(loss_BT, -dual_clip * advantages_BT)
            loss_BT = torch.where(advantages_BT < 0, bounded_BT, loss_BT)
        with torch.no_grad():
            outside_BT = ((ratio_BT < 1 - clip_low) & (advantages_BT < 0)) | (
                (ratio_BT > 1 + clip_high) & (advantages_BT > 0)
            )
            metrics["sum/clipped"] = (outside_BT & mask_BT).sum().float()
    else:
        raise ValueError(f'kind = {kind!r} is not a policy loss: use "clip" or "reinforce"')
    return torch.where(mask_BT, loss_BT, 0.0), metrics

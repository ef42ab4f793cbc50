"""What a policy loss reads, and returns.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollover.algorithms.elementwise import bounded_exp


@dataclass(frozen=True)
class Tokens:
    """What a policy loss reads, all [B, T] and 0 at masked positions; only `logprobs_BT` carries a gradient."""

    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor

    @property
    def log_ratio_BT(self) -> torch.Tensor:
        return self.logprobs_BT - self.old_logprobs_BT

    @property
    def ratio_BT(self) -> torch.Tensor:
        return bounded_exp(self.log_ratio_BT)


# (loss per token, tokens whose gradient the kind's clip or mask changed or removed)
LossAndClipped = tuple[torch.Tensor, torch.Tensor]


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over each row's tokens [B, 1]; values are 0 where masked. A row without tokens: 0."""
    return values_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)

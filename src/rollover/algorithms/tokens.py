"""What a policy loss reads, and returns.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


def ratio_at(t: Tokens, level: Literal["token", "sequence"]) -> torch.Tensor:
    """The ratio of the token [B, T], or that of the sequence, exp(mean over the row's tokens of log r).

    The latter at each of its tokens, which passes the gradient of its own log-prob: GSPO-token of arXiv 2507.18071.
    """
    if level == "token":
        return t.ratio_BT
    if level != "sequence":
        raise ValueError(f'level = {level!r}: use "token" or "sequence"')
    sequence_B1 = masked_mean(t.log_ratio_BT, t.mask_BT).detach()
    return bounded_exp(t.logprobs_BT - t.logprobs_BT.detach() + sequence_B1)

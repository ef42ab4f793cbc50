"""What losses, corrections and KL estimates share: bounded log-ratios, and values that are 0 where masked. Pure."""

from __future__ import annotations

import torch

# A log-ratio beyond this is numerically meaningless: exp(20) = 5e8.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """The log-ratio, at most 20 away from 0; no gradient passes beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the bounded log-ratio: always finite, and never 0."""
    return torch.exp(bounded(log_ratio))


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values in float32 where `mask` (bool) holds, and 0 elsewhere, whatever stands there (NaN, too)."""
    return torch.where(mask, values.float(), 0.0)

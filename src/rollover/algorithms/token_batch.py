"""The tensors of one micro-batch, which policy losses, corrections and the KL read; bounded log-ratios and masking.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

# A log-ratio beyond this is numerically meaningless: exp(20) = 5e8.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio, at most 20 away from 0; no gradient passes beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the bounded log-ratio: always finite, and never 0."""
    return torch.exp(bounded(log_ratio))


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the values in float32 where `mask` (bool) holds, and 0 elsewhere, whatever stands there (NaN, too)."""
    return torch.where(mask, values.float(), 0.0)


# (loss per token, tokens whose gradient the kind's clip or mask changed or removed)
LossAndClipped = tuple[torch.Tensor, torch.Tensor]
_WITH_GRADIENT = ("logprobs", "entropy")


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """A number per token in each of `streams`, by name, [B, T] and 0 where `mask_BT` is False; only "logprobs" and
    "entropy" carry a gradient. `batch.stream("x")` reads "x", and the properties those that every batch has.

    `group_B`: group ids, on the CPU, where counts are looked up by them. `sequences`: the sequence of each row.
    """

    mask_BT: torch.Tensor
    streams: Mapping[str, torch.Tensor]
    group_B: torch.Tensor
    sequences: list[str]

    @classmethod
    def of(cls, mask_BT: torch.Tensor, **streams: torch.Tensor) -> TokenBatch:
        """Make a batch of tensors [B, T], with 0 at masked positions. Every row is its own group and sequence.

        ValueError for a tensor whose shape differs from that of the first one.
        """
        first, shape = next((f"{name}_BT", values.shape) for name, values in streams.items())
        for name, values in {**streams, "mask": mask_BT}.items():
            if values.shape != shape:
                raise ValueError(f"{name}_BT is {list(values.shape)}: give it the shape of {first}, {list(shape)}")
        mask_BT, rows = mask_BT.bool(), range(shape[0])
        of_tokens = {
            name: masked(values if name in _WITH_GRADIENT else values.detach(), mask_BT)
            for name, values in streams.items()
        }
        return TokenBatch(
            mask_BT=mask_BT, streams=of_tokens, group_B=torch.arange(len(rows)), sequences=[str(row) for row in rows]
        )

    def with_streams(self, **streams: torch.Tensor) -> Self:
        """Return a copy with these streams added or replaced."""
        return replace(self, streams={**self.streams, **streams})

    def stream(self, name: str) -> torch.Tensor:
        """Return a stream [B, T]. ValueError, which lists the existing streams, for an unknown name."""
        if name not in self.streams:
            raise ValueError(f"the batch has no stream {name!r}, but {', '.join(sorted(self.streams))}")
        return self.streams[name]

    @property
    def logprobs_BT(self) -> torch.Tensor:
        """Log-probs under the current weights."""
        return self.stream("logprobs")

    @property
    def entropy_BT(self) -> torch.Tensor:
        """Entropy of the distribution at each token, under the current weights (nats)."""
        return self.stream("entropy")

    @property
    def old_logprobs_BT(self) -> torch.Tensor:
        """Log-probs under the proximal policy (algorithm.proximal), the denominator of the ratio."""
        return self.stream("old_logprobs")

    @property
    def behavior_logprobs_BT(self) -> torch.Tensor:
        """Log-probs under the policy that sampled the token."""
        return self.stream("behavior_logprobs")

    @property
    def advantages_BT(self) -> torch.Tensor:
        return self.stream("advantages")

    @property
    def versions_BT(self) -> torch.Tensor:
        """The policy version that sampled the token, int64."""
        return self.stream("versions")

    @property
    def log_ratio_BT(self) -> torch.Tensor:
        return self.logprobs_BT - self.old_logprobs_BT

    @property
    def ratio_BT(self) -> torch.Tensor:
        return bounded_exp(self.log_ratio_BT)


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over each row's tokens [B, 1]; values are 0 where masked. A row without tokens: 0."""
    return values_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)


def ratio_at(t: TokenBatch, level: Literal["token", "sequence"]) -> torch.Tensor:
    """Return the ratio of the token [B, T], or that of the sequence, exp(mean over the row's tokens of log r).

    The latter at each of its tokens, which passes the gradient of its own log-prob: GSPO-token of arXiv 2507.18071.
    """
    if level == "token":
        return t.ratio_BT
    if level != "sequence":
        raise ValueError(f'level = {level!r}: use "token" or "sequence"')
    sequence_B1 = masked_mean(t.log_ratio_BT, t.mask_BT).detach()
    return bounded_exp(t.logprobs_BT - t.logprobs_BT.detach() + sequence_B1)

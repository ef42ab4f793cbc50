"""[distill]: what a teacher makes of sampled tokens, as advantages per token. Pure; M loss tokens of a sample.

    d_t = clip(log teacher(a_t | c', a_<t) - log policy(a_t | c, a_<t), +-clip)
    D_t = d_t + discount * D_next        over the loss tokens, the last one first
    A_t = coef * D_t, plus the advantage of algorithm.advantage with mix = "add"

The policy is the one at the start of the step, whatever algorithm.proximal is: E[-d_t] over its tokens is
KL(policy || teacher), and with discount = 0 the gradient of the loss is that KL's at each prefix (Agarwal et al. 2023,
arXiv 2306.13649, with their reverse KL). Tokens of older versions have the importance weight that they have in every
loss. c' is the policy's prompt c, or a privileged one (OPSD: arXiv 2601.18734, SDFT: 2601.19897).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from rollover.config import DistillConfig
from rollover.trainer.reward_kl import bounded_ratio
from rollover.types import Sample


@dataclass
class Divergence:
    """Sums over the loss tokens that a teacher scored: of log policy/teacher, each weighed by policy/behavior up to 2,
    so that it is the policy's of stale tokens, too; and how many of them were clipped."""

    kl: float = 0.0
    clipped: int = 0
    tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """Under their names in docs/metrics.md."""
        tokens = max(1, self.tokens)
        return {"distill/kl": self.kl / tokens, "distill/clipped_share": self.clipped / tokens}


def teachers(config: DistillConfig, samples: Collection[Sample]) -> list[Sample]:
    """The same tokens, of the roles that are taught, as the teacher reads them: after its own prompt, where it has
    one."""
    taught = [s for s in samples if config.teaches(s.role)]
    return [s if s.teacher_prompt_ids is None else replace(s, prompt_ids=s.teacher_prompt_ids) for s in taught]


def later_sums(values_M: np.ndarray, discount: float) -> np.ndarray:
    """sum over s >= t of discount^(s - t) * values_s, float64 [M]. Steps are loss tokens: what an environment wrote
    between two of them is no step."""
    values_M = values_M.astype(np.float64)
    if discount == 0:
        return values_M
    if discount == 1:
        return np.cumsum(values_M[::-1])[::-1]
    out, following = np.empty_like(values_M), 0.0
    for t in reversed(range(len(values_M))):
        out[t] = following = values_M[t] + discount * following
    return out


def distilled(config: DistillConfig, samples: Collection[Sample], policy: str, sums: Divergence) -> list[Sample]:
    """The samples with the advantages above at their loss tokens; those of roles that are not taught stay as they are.
    They have the streams "teacher_logprobs" and `policy`.

    `sums` is added to. ValueError where a log-prob is none: it would be in every weight afterwards.
    """
    out = []
    for s in samples:
        if not s.mask.any() or not config.teaches(s.role):
            out.append(s)
            continue
        ratio_M = s.in_loss("teacher_logprobs").astype(np.float64) - s.in_loss(policy)
        if not np.isfinite(ratio_M).all():
            raise ValueError(
                f"rollout {s.rollout_id}: a log-prob of the teacher or of the policy is not finite. Try model.dtype ="
                ' "float32"'
            )
        clipped_M = np.clip(ratio_M, -config.clip, config.clip) if config.clip else ratio_M
        sums.kl -= float((bounded_ratio(s.in_loss(policy), s) * ratio_M).sum())
        sums.clipped += int((clipped_M != ratio_M).sum())
        sums.tokens += len(ratio_M)
        advantages = s.advantages.copy() if config.mix == "add" else np.zeros_like(s.advantages)
        advantages[s.mask] += (config.coef * later_sums(clipped_M, config.discount)).astype(np.float32)
        out.append(s.with_streams(advantages=advantages))
    return out

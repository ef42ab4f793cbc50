"""From finished groups to training rows: advantages over whole groups, per-token streams, global counts.

Numpy arrays of a Sample are [n] over the tokens after the prompt. Never touches the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollover.algorithms import advantage
from rollover.config import AlgorithmConfig
from rollover.types import Group, Rollout, Sample

ADVANTAGES = {
    "grpo": lambda rewards, groups, cfg: advantage.grpo(rewards, groups, std=cfg.advantage_std),
    "dr_grpo": lambda rewards, groups, cfg: advantage.dr_grpo(rewards, groups),
    "rloo": lambda rewards, groups, cfg: advantage.rloo(rewards, groups),
}


@dataclass(frozen=True)
class Batch:
    """The samples of one training step, in (group, sibling) order."""

    samples: list[Sample]

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(s.mask.sum()) for s in self.samples)


def _sample(rollout: Rollout, value: float, oldest_version: int) -> Sample:
    segments = rollout.segments
    lengths = [len(s) for s in segments]
    in_loss = [s.trainable and s.sampling.temperature > 0 and s.policy_version >= oldest_version for s in segments]
    valid = rollout.reward is not None and not rollout.reward.missing
    # All sampled segments of a run share one temperature; greedy ones (0) are masked, any divisor will do for them.
    temperature = max((s.sampling.temperature for s in segments if s.trainable), default=1.0) or 1.0
    return Sample(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        prompt_ids=np.asarray(rollout.prompt_ids, dtype=np.int32),
        token_ids=np.concatenate([s.token_ids for s in segments]).astype(np.int32),
        mask=np.repeat(in_loss, lengths).astype(bool) & valid,
        behavior_logprobs=np.concatenate([s.logprobs for s in segments]).astype(np.float32),
        versions=np.repeat([s.policy_version for s in segments], lengths).astype(np.int32),
        advantages=np.full(sum(lengths), value if valid else 0.0, dtype=np.float32),
        temperature=temperature,
    )


def build_batch(groups: list[Group], algorithm: AlgorithmConfig, oldest_version: int = 0) -> Batch:
    """One Sample per rollout, in group-id and sibling order; the baseline of a group is over all its valid siblings.

    Tokens sampled before policy version `oldest_version` are context only (staleness.oldest_in_loss).
    """
    rollouts = [r for g in sorted(groups, key=lambda g: g.group_id) for r in g.rollouts]
    scores = [r.reward.score if r.reward is not None and not r.reward.missing else float("nan") for r in rollouts]
    advantages_N = ADVANTAGES[algorithm.advantage](
        torch.tensor(scores, dtype=torch.float32), torch.tensor([r.group_id for r in rollouts]), algorithm
    )
    return Batch(
        [_sample(r, float(a), oldest_version) for r, a in zip(rollouts, advantages_N, strict=True) if r.num_tokens]
    )

"""What a step finds out about its tokens before its first update: advantages, and log-probs of those that sampled.

B samples, T longest answer. The formulas are in algorithms/. With a critic advantages are critic.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rollover.algorithms.advantage import reinforce_plus_plus_tokens
from rollover.algorithms.correction import importance_weights
from rollover.algorithms.token_advantage import optimal_token_baseline
from rollover.config import AlgorithmConfig
from rollover.trainer.backend import Stream, TrainerBackend
from rollover.types import Sample

LOGPROB, ENTROPY, SQUARES = range(3)
"""The columns of `TrainerBackend.compute_statistics`."""
STATISTICS = "statistics"
"""The name of that stream, which is for a step itself: no backend is given it."""
_ALIGNED = {"optimal_token_baseline": "positions", "tir_optimal_token_baseline": "loss_tokens"}


def estimate_tokens(config: AlgorithmConfig, samples: Sequence[Sample], statistics: Stream) -> list[Sample]:
    """The samples with advantages in the place of their rewards, by algorithm.advantage. `statistics`: of their loss
    tokens, where that reads them (`AlgorithmConfig.needs_statistics`)."""
    rewards_BT = _padded([s.advantages for s in samples])
    mask_BT = _padded([s.mask for s in samples]).bool()
    if config.advantage == "reinforce_plus_plus_tokens":
        advantages_BT, _ = reinforce_plus_plus_tokens(rewards_BT, mask_BT, gamma=config.gamma)
    else:
        advantages_BT = _optimal_baseline(config, samples, statistics, rewards_BT, mask_BT)
    return [
        replace(s, advantages=row[: len(s.mask)].numpy().copy()) for s, row in zip(samples, advantages_BT, strict=True)
    ]


def sampling_logprobs(backend: TrainerBackend, minibatches: Sequence[list[Sample]]) -> Stream:
    """Log-probs of every loss token under the trainer's weights of the version that sampled it."""
    out = {s.rollout_id: np.zeros(int(s.mask.sum()), np.float32) for part in minibatches for s in part}
    for part in minibatches:
        versions = {int(v) for s in part for v in np.unique(s.versions[s.mask])}
        for version in sorted(versions):
            current = version == backend.policy_version
            found = backend.compute_logprobs(part, None if current else version)
            for s in part:
                if s.mask.any():
                    own = s.versions[s.mask] == version
                    out[s.rollout_id][own] = found[s.rollout_id][own]
    return out


# Private


def _optimal_baseline(
    config: AlgorithmConfig,
    samples: Sequence[Sample],
    statistics: Stream,
    rewards_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> torch.Tensor:
    """Its baselines are over the rollouts of a group that have one role."""
    compared = {place: i for i, place in enumerate(dict.fromkeys((s.group_id, s.role) for s in samples))}

    def column(index: int) -> torch.Tensor:
        return torch.zeros(mask_BT.shape).masked_scatter(
            mask_BT,
            torch.from_numpy(np.concatenate([statistics[s.rollout_id][:, index] for s in samples if s.mask.any()])),
        )

    logprobs_BT, weights_BT = column(LOGPROB), None
    if config.weight != "none":
        weights_BT = importance_weights(
            logprobs_BT,
            _padded([s.behavior_logprobs for s in samples]),
            mask_BT,
            mode=config.weight,
            cap=config.correction_cap,
            floor=config.correction_floor or None,
            versions_BT=_padded([s.versions for s in samples]).long(),
        )
    return optimal_token_baseline(
        rewards_BT,
        mask_BT,
        torch.tensor([compared[s.group_id, s.role] for s in samples]),
        logprobs_BT,
        column(SQUARES),
        weights_BT=weights_BT,
        align=_ALIGNED[config.advantage],  # pyright: ignore[reportArgumentType]
    )


def _padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """[B, T] float32: each row from the left, 0 behind it."""
    out = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)

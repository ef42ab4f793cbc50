"""Weights and rejections of tokens that depend on the other tokens of their step.

The importance weight of a single token is computed by the objective (objective.py, algorithms/correction.py). Here:

    weight = 1 / mean importance weight of the step (algorithm.correction_normalize)
             x whether the token is of the top_entropy_share of its minibatch by entropy

algorithm.rejection: tokens too far from the policy that sampled them leave the step, as if they were context. Their
masks are rewritten before anything is counted, as verl rewrites its response mask: what is rejected is in no
denominator, no KL or entropy term and in no ratio of a sequence.

All at the weights of the step's start, so that it does not depend on how rows are packed. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rollover.algorithms.correction import importance_weights, interpolated_proximal, rejection_mask
from rollover.algorithms.loss import high_entropy_mask
from rollover.config import AlgorithmConfig
from rollover.staleness import staleness
from rollover.trainer.backend import Stream
from rollover.trainer.streams import STATISTICS
from rollover.types import Sample

ENTROPY = STATISTICS[1]
_BY_SEQUENCE = ("sequence_truncate", "sequence_mask")


def compared_stream(config: AlgorithmConfig) -> str:
    """Which log-probs rejections and weights of a step compare with: those of the proximal policy, or, where the loss
    makes these of others, those at the start of the step."""
    return "proximal_logprobs" if config.proximal_policy in ("step_start", "snapshot") else "start_logprobs"


def proximal_and_behavior(
    config: AlgorithmConfig, sample: Sample, trainer_version: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [1, M] of the sample's loss tokens under algorithm.proximal, at the start of the step, and under what
    sampled them. The sample has the `compared_stream`."""
    names = compared_stream(config), "behavior_logprobs"
    start_1M, behavior_1M = (torch.from_numpy(sample.in_loss(name))[None] for name in names)
    if config.proximal_policy == "interpolated":
        ages_1M = torch.from_numpy(staleness(sample.in_loss("versions"), trainer_version))[None]
        every_1M = torch.ones_like(start_1M, dtype=torch.bool)
        start_1M = interpolated_proximal(behavior_1M, start_1M, ages_1M, mask_BT=every_1M)
    return start_1M, behavior_1M


def mean_weight(config: AlgorithmConfig, samples: Sequence[Sample], trainer_version: int) -> float:
    """The mean of the importance weights, bounded as they are applied: over the loss tokens, or over the sequences
    where each has one weight (verl's rollout_is_batch_normalize). 1 where no weight is above 0. The samples have the
    `compared_stream`."""
    total, count = 0.0, 0
    for s in samples:
        if not s.mask.any():
            continue
        start_1M, behavior_1M = proximal_and_behavior(config, s, trainer_version)
        weights_1M = importance_weights(
            start_1M,
            behavior_1M,
            torch.ones_like(start_1M, dtype=torch.bool),
            mode=config.weight,  # pyright: ignore[reportArgumentType]
            cap=config.correction_cap,
            floor=config.correction_floor or None,
            versions_BT=torch.from_numpy(s.in_loss("versions").astype(np.int64))[None],
        )
        counted = weights_1M[:, :1] if config.weight in _BY_SEQUENCE else weights_1M
        total += float(counted.double().sum())
        count += counted.numel()
    return total / count if total > 1e-8 * count else 1.0


def of_high_entropy(samples: Sequence[Sample], share: float) -> Stream:
    """1 for the loss tokens of a minibatch that are among the `share` of highest entropy, else 0."""
    samples = [s for s in samples if s.mask.any()]
    if not samples:
        return {}
    entropy_1M = torch.from_numpy(np.concatenate([s.in_loss(ENTROPY) for s in samples]))[None]
    kept_M = high_entropy_mask(entropy_1M, torch.ones_like(entropy_1M, dtype=torch.bool), share=share)[0]
    parts = np.split(kept_M.numpy().astype(np.float32), np.cumsum([s.num_loss_tokens for s in samples])[:-1])
    return {s.rollout_id: part for s, part in zip(samples, parts, strict=True)}


def weighed(
    config: AlgorithmConfig, minibatches: Sequence[list[Sample]], trainer_version: int
) -> tuple[list[list[Sample]], float]:
    """(the minibatches of a step with the stream "weights", the mean of their importance weights). Where all weights
    are 1, there is no such stream. The samples have the `compared_stream` with algorithm.correction_normalize, and
    STATISTICS with algorithm.top_entropy_share."""
    share, mean = config.top_entropy_share, 1.0
    if config.correction_normalize:
        mean = mean_weight(config, [s for part in minibatches for s in part], trainer_version)
    elif share == 1:
        return list(minibatches), mean
    out: list[list[Sample]] = []
    for part in minibatches:
        kept = of_high_entropy(part, share) if share < 1 else {}
        ones = ((s, np.ones(s.num_loss_tokens, np.float32)) for s in part)
        out.append([s.with_loss_stream("weights", kept.get(s.rollout_id, one) / np.float32(mean)) for s, one in ones])
    return out, mean


def without_rejected(config: AlgorithmConfig, sample: Sample, trainer_version: int) -> Sample:
    """The sample with those tokens in its loss that algorithm.rejection keeps. It has the `compared_stream`."""
    start_1M, behavior_1M = proximal_and_behavior(config, sample, trainer_version)
    every_1M = torch.ones_like(start_1M, dtype=torch.bool)
    kept_1M = every_1M
    for name, bound in config.rejection.items():
        level, _, kind = name.rpartition("_")
        low, high = bound if isinstance(bound, list | tuple) else (None, bound)
        kept_1M = kept_1M & rejection_mask(
            start_1M,
            behavior_1M,
            every_1M,
            kind=kind,  # pyright: ignore[reportArgumentType]
            level=level,  # pyright: ignore[reportArgumentType]
            high=high,
            low=low,
        )
    mask = sample.mask.copy()
    mask[sample.mask] = kept_1M[0].numpy()
    return replace(sample, mask=mask)


def why_none_is_left(config: AlgorithmConfig, num_tokens: int) -> str:
    """Why all tokens of a step were rejected, and what to change."""
    bounds = " and ".join(f"{name} = {json.dumps(bound)}" for name, bound in config.rejection.items())
    return (
        f"algorithm.rejection leaves out all its {num_tokens} tokens, as none is within {bounds}. Widen it, or lower"
        " rollout.max_staleness"
    )

"""What multiplies the policy loss of a token and depends on the other tokens of its step: a stream of weights.

    weight = 1 / mean importance weight of the step (algorithm.correction_normalize)
             x whether the token is of the top_entropy_share of its minibatch by entropy

Both at the weights of the step's start, so that they do not depend on how rows are packed. Pure; streams [loss tokens].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollover.algorithms.correction import importance_weights
from rollover.algorithms.loss import high_entropy_mask
from rollover.config import AlgorithmConfig
from rollover.trainer.backend import Stream
from rollover.trainer.token_estimates import ENTROPY, proximal_and_behavior
from rollover.types import Sample

_BY_SEQUENCE = ("sequence_truncate", "sequence_mask")


def mean_weight(config: AlgorithmConfig, samples: Sequence[Sample], start: Stream, trainer_version: int) -> float:
    """The mean of the importance weights, bounded as they are applied: over the loss tokens, or over the sequences
    where each has one weight (verl's rollout_is_batch_normalize). 1 where no weight is above 0.

    `start`: `start_M` of `proximal_and_behavior`, of each sample.
    """
    total, count = 0.0, 0
    for s in samples:
        if not s.mask.any():
            continue
        start_1M, behavior_1M = proximal_and_behavior(config, s, start[s.rollout_id], trainer_version)
        weights_1M = importance_weights(
            start_1M,
            behavior_1M,
            torch.ones_like(start_1M, dtype=torch.bool),
            mode=config.weight,  # pyright: ignore[reportArgumentType]
            cap=config.correction_cap,
            floor=config.correction_floor or None,
            versions_BT=torch.from_numpy(s.versions[s.mask].astype(np.int64))[None],
        )
        counted = weights_1M[:, :1] if config.weight in _BY_SEQUENCE else weights_1M
        total += float(counted.double().sum())
        count += counted.numel()
    return total / count if total > 1e-8 * count else 1.0


def of_high_entropy(samples: Sequence[Sample], entropies: Stream, share: float) -> Stream:
    """1 for the tokens of a minibatch that are among the `share` of highest entropy, else 0."""
    samples = [s for s in samples if s.mask.any()]
    if not samples:
        return {}
    entropy_1M = torch.from_numpy(np.concatenate([entropies[s.rollout_id] for s in samples]))[None]
    kept_M = high_entropy_mask(entropy_1M, torch.ones_like(entropy_1M, dtype=torch.bool), share=share)[0]
    parts = np.split(kept_M.numpy().astype(np.float32), np.cumsum([int(s.mask.sum()) for s in samples])[:-1])
    return {s.rollout_id: part for s, part in zip(samples, parts, strict=True)}


@dataclass(frozen=True)
class Weights:
    """`streams`: the weights of a step's loss tokens under "weights", or nothing where all are 1. `mean`: of the
    importance weights, 1 where nothing is divided by it."""

    streams: dict[str, Stream]
    mean: float


def weights_of_step(
    config: AlgorithmConfig,
    minibatches: Sequence[Sequence[Sample]],
    start: Stream | None,
    statistics: Stream | None,
    trainer_version: int,
) -> Weights:
    """`start`: as of `mean_weight`, needed with algorithm.correction_normalize; `statistics`: of the loss tokens, with
    algorithm.top_entropy_share."""
    mean, entropies = 1.0, None
    if config.correction_normalize:
        assert start is not None
        mean = mean_weight(config, [s for part in minibatches for s in part], start, trainer_version)
    if config.top_entropy_share < 1:
        assert statistics is not None
        entropies = {rollout_id: values[:, ENTROPY] for rollout_id, values in statistics.items()}
    if not config.correction_normalize and entropies is None:
        return Weights({}, mean)
    return Weights({"weights": token_weights(minibatches, entropies, config.top_entropy_share, mean)}, mean)


def token_weights(
    minibatches: Sequence[Sequence[Sample]], entropies: Stream | None, share: float, mean: float
) -> Stream:
    """The weights of a step's loss tokens. `entropies` None: all of them count."""
    out: Stream = {}
    for part in minibatches:
        kept = None if entropies is None else of_high_entropy(part, entropies, share)
        for s in part:
            if num := int(s.mask.sum()):
                own = np.ones(num, np.float32) if kept is None else kept[s.rollout_id]
                out[s.rollout_id] = own / np.float32(mean)
    return out

"""Weights and rejections of tokens that depend on the other tokens of their step.

    weight = 1 / mean importance weight of the step (algorithm.correction_normalize)
             x whether the token is of the top_entropy_share of its minibatch by entropy

algorithm.rejection: tokens too far from the policy that sampled them leave the step, as if they were context. Their
masks are rewritten before anything is counted, as verl rewrites its response mask: what is rejected is in no
denominator, no KL or entropy term and in no ratio of a sequence.

All at the weights of the step's start, so that it does not depend on how rows are packed. Pure; [n] as in Sample,
streams [loss tokens].
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollover.algorithms.correction import importance_weights, rejection_mask
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


def rejections(
    config: AlgorithmConfig, samples: Collection[Sample], start: Stream, trainer_version: int
) -> dict[str, np.ndarray]:
    """rollout_id -> which of its loss tokens are kept, bool [loss tokens]. `start`: as of
    `proximal_and_behavior`, of each sample."""
    nothing = np.zeros(0, dtype=np.float32)
    return {s.rollout_id: kept_tokens(config, s, start.get(s.rollout_id, nothing), trainer_version) for s in samples}


def kept_tokens(config: AlgorithmConfig, sample: Sample, start_M: np.ndarray, trainer_version: int) -> np.ndarray:
    """Which of the sample's loss tokens algorithm.rejection keeps, bool [loss tokens].

    `start_M`: as of `proximal_and_behavior`.
    """
    start_1M, behavior_1M = proximal_and_behavior(config, sample, start_M, trainer_version)
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
    return kept_1M[0].numpy()


def rewritten(sample: Sample, kept: Mapping[str, np.ndarray]) -> Sample:
    """The sample without its rejected tokens in the loss."""
    mask = sample.mask.copy()
    mask[sample.mask] = kept[sample.rollout_id]
    return replace(sample, mask=mask)


def restricted(stream: Stream, kept: Mapping[str, np.ndarray]) -> Stream:
    """The stream of the loss tokens that are left."""
    return {rollout_id: values[kept[rollout_id]] for rollout_id, values in stream.items()}


def why_none_is_left(config: AlgorithmConfig, num_tokens: int) -> str:
    """Why all tokens of a step were rejected, and what to change."""
    bounds = " and ".join(f"{name} = {json.dumps(bound)}" for name, bound in config.rejection.items())
    return (
        f"algorithm.rejection leaves out all its {num_tokens} tokens, as none is within {bounds}. Widen it, or lower"
        " rollout.max_staleness"
    )

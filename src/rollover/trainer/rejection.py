"""algorithm.rejection: tokens too far from the policy that sampled them leave the step, as if they were context.

The masks are rewritten before anything is counted, as verl rewrites its response mask: what is rejected is in no
denominator, no KL or entropy term and in no ratio of a sequence. Pure; [n] as in Sample, streams [loss tokens].
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch

from rollover.algorithms.correction import rejection_mask
from rollover.config import AlgorithmConfig
from rollover.trainer.backend import Stream
from rollover.trainer.token_estimates import proximal_and_behavior
from rollover.types import Sample


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

"""algorithm.rejection: tokens too far from the policy that sampled them leave the step, as if they were context.

The masks are rewritten before anything is counted, as verl rewrites its response mask: what is rejected is in no
denominator, no KL or entropy term and in no ratio of a sequence. Pure; [n] as in Sample, streams [loss tokens].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from rollover.config import AlgorithmConfig
from rollover.trainer.critic import Stream
from rollover.trainer.objective import Objective
from rollover.types import Sample


def rejections(
    objective: Objective, samples: Collection[Sample], start: Stream, trainer_version: int
) -> dict[str, np.ndarray]:
    """rollout_id -> which of its loss tokens are kept, bool [loss tokens]. `start`: as for `Objective.kept`."""
    nothing = np.zeros(0, dtype=np.float32)
    return {s.rollout_id: objective.kept(s, start.get(s.rollout_id, nothing), trainer_version) for s in samples}


def rewritten(sample: Sample, kept: Mapping[str, np.ndarray]) -> Sample:
    """The sample without its rejected tokens in the loss."""
    mask = sample.mask.copy()
    mask[sample.mask] = kept[sample.rollout_id]
    return replace(sample, mask=mask)


def restricted(stream: Stream, kept: Mapping[str, np.ndarray]) -> Stream:
    """The stream of the loss tokens that are left."""
    return {rollout_id: values[kept[rollout_id]] for rollout_id, values in stream.items()}


def why_none_is_left(config: AlgorithmConfig, num_tokens: int) -> str:
    """Of a step all of whose tokens were rejected: the cause, and what to change."""
    return (
        f'algorithm.rejection = "{config.rejection}" leaves out all its {num_tokens} tokens, as none has a divergence'
        f" of at most algorithm.rejection_high = {config.rejection_high:g}. Raise it, or lower rollout.max_staleness"
    )

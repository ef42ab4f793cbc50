"""What a training step made of each token, gathered while it goes on (track.token_stats).

    samples as they came and were used ──┐
    first pass of each minibatch ────────┴──▶ TokenWatch ──▶ TokenStats by rollout ──▶ records (track/token_stats.py)

Nothing is computed for it: the numbers are those of the passes that the step makes anyway. Of several epochs the first
pass is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rollover.algorithms.token_batch import MAX_LOG_RATIO
from rollover.config import Config
from rollover.track.token_stats import TokenStats
from rollover.trainer.backend import Stream
from rollover.trainer.objective import TOLD_ENTROPY, TOLD_LOGPROB, TOLD_WEIGHT
from rollover.trainer.tally import Tally
from rollover.trainer.token_weights import compared_stream
from rollover.types import Sample


class TokenWatch:
    """Of the step that is being made. With `Config.tells_tokens` off it keeps nothing, and `stats` is empty."""

    def __init__(self, config: Config) -> None:
        self.on, self._compared = config.tells_tokens, compared_stream(config.algorithm)
        self.forget()

    def forget(self) -> None:
        """What was gathered is of a step that is not trained now, or was told."""
        self._passes: list[Tally] = []

    def passed(self, sums: Tally, *, first: bool) -> None:
        """A pass over a minibatch was made. `first`: its first one in this step."""
        if self.on and first:
            self._passes.append(sums)  # what is on a device stays there until the step is made
        else:
            sums.forget_tokens()

    def stats(self, came: Sequence[Sample], used: Iterable[Sample]) -> dict[str, TokenStats]:
        """By rollout, of those of which a token came to the loss. `came`: the samples of the batch; `used`: as the loss
        had them, without what was rejected."""
        if not self.on:
            return {}
        told = {key: values for sums in self._passes for key, values in sums.take_tokens().items()}
        by_id = {s.rollout_id: s for s in used}
        found = {s.rollout_id: self._of(s, by_id[s.rollout_id], told) for s in came if s.mask.any()}
        self.forget()
        return found

    def _of(self, came: Sample, used: Sample, told: Stream) -> TokenStats:
        mask, behavior_M = came.mask, came.behavior_logprobs[came.mask]
        in_loss_M = used.mask[mask]
        logprobs_M, weights_M, entropies_M = np.full((3, len(behavior_M)), np.nan, np.float32)
        weights_M[~in_loss_M] = 0.0
        if (looked_at := used.streams.get(self._compared)) is not None:  # by algorithm.rejection
            logprobs_M[~in_loss_M] = looked_at[mask][~in_loss_M]
        if (told_MK := told.get(came.rollout_id)) is not None:
            logprobs_M[in_loss_M] = told_MK[:, TOLD_LOGPROB]
            weights_M[in_loss_M] = told_MK[:, TOLD_WEIGHT]
            entropies_M[in_loss_M] = told_MK[:, TOLD_ENTROPY]
        importance_M = np.exp(np.clip(logprobs_M - behavior_M, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        return TokenStats(mask, ~in_loss_M, used.advantages[mask], importance_M, weights_M, entropies_M)

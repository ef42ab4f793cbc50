"""The segments of a simulated run: tokens have a number and a version, but no ids."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollover.types import Rollout, SamplingParams, Segment, StopReason

_SAMPLING = SamplingParams()
_PAUSED = StopReason.PAUSED  # a member of an Enum class is slow to look up


class Segments:
    """Makes what extensions return. Only the length counts, so all segments of one length are one object."""

    def __init__(self) -> None:
        self._ids, self._logprobs = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
        self._made: dict[tuple[int, int, StopReason], Segment] = {}
        self._cuts: dict[str, Counter[int]] = {}
        """Tokens by version, by the id of each rollout that met new weights since it was started."""

    def cut(self, rollout: Rollout, num_tokens: int, version: int) -> None:
        """A running rollout meets new weights. It got `num_tokens` since it was started, the last under `version`."""
        cuts = self._cuts.setdefault(rollout.rollout_id, Counter())
        cuts[version] = num_tokens - cuts.total()

    def of(self, rollout: Rollout, num_tokens: int, version: int, reason: StopReason) -> list[Segment]:
        """One for each version that it met since it was started, empty where it got no token under it."""
        cuts = self._cuts.pop(rollout.rollout_id, None)
        if cuts is None:
            return [self._segment(num_tokens, version, reason)]
        cuts[version] = num_tokens - cuts.total()
        *before, last = cuts.items()
        return [*(self._segment(n, v, _PAUSED) for v, n in before), self._segment(last[1], last[0], reason)]

    def forget(self) -> None:
        """Make new objects from now on: those of earlier steps are rarely asked for again."""
        self._made.clear()

    def _segment(self, num_tokens: int, version: int, reason: StopReason) -> Segment:
        key = (num_tokens, version, reason)
        if key not in self._made:
            if num_tokens > len(self._ids):
                self._ids = np.zeros(2 * num_tokens, dtype=np.int32)
                self._logprobs = np.zeros(2 * num_tokens, dtype=np.float32)
            ids, logprobs = self._ids[:num_tokens], self._logprobs[:num_tokens]
            self._made[key] = Segment(ids, logprobs, version, _SAMPLING, reason)
        return self._made[key]

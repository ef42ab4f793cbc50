"""The tokens that a journal tells of rollouts while they run, in pieces, until they are parked or finished.

Owns those pieces. What a running rollout is given of them, and when, is replay.py's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rollover.types import Rollout, Segment


class RunningTokens:
    """The tokens that each running rollout got since it was started."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Segment]] = {}

    def add(self, rollout_id: str, pieces: Iterable[Segment], *, anew: bool) -> None:
        """More of them. `anew`: in place of those that were there, as the engine failed and was asked again."""
        if anew:
            self._pieces.pop(rollout_id, None)
        self._pieces.setdefault(rollout_id, []).extend(pieces)

    def num_told(self, rollout: Rollout) -> int:
        """Tokens of the rollout, with those that are not appended to it yet."""
        return rollout.num_tokens + sum(map(len, self._pieces.get(rollout.rollout_id, ())))

    def take(self, rollout: Rollout, num_tokens: int) -> list[Segment]:
        """What is to be appended, up to `num_tokens` of the rollout: one segment for each version in a row."""
        left = num_tokens - rollout.num_tokens
        joined: list[list[Segment]] = []
        for piece in self._pieces.pop(rollout.rollout_id, ()):
            piece = _first(piece, left)
            left -= len(piece)
            if not len(piece):
                break
            if joined and _same_origin(joined[-1][-1], piece):
                joined[-1].append(piece)
            else:
                joined.append([piece])
        return [_one(pieces) for pieces in joined]


def _first(segment: Segment, num: int) -> Segment:
    """Its first `num` tokens, or all it has."""
    if num >= len(segment):
        return segment
    return replace(segment, token_ids=segment.token_ids[:num], logprobs=segment.logprobs[:num])


def _same_origin(a: Segment, b: Segment) -> bool:
    return (a.policy_version, a.sampling, a.trainable) == (b.policy_version, b.sampling, b.trainable)


def _one(pieces: Sequence[Segment]) -> Segment:
    """Consecutive pieces of one origin as one segment."""
    ids, logprobs = (np.concatenate([getattr(p, name) for p in pieces]) for name in ("token_ids", "logprobs"))
    media = tuple(media for piece in pieces for media in piece.media)
    return replace(pieces[-1], token_ids=ids, logprobs=logprobs, start=pieces[0].start, media=media)

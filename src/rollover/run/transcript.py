"""An episode to be read: what the policy was shown, what it said in each turn, what came back, the scores. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from rollover.envs.chat import Decode
from rollover.trajectories import Episode, Trajectory
from rollover.types import Media, Rollout

_WIDTH = 12  # of what stands before a text


def transcript(episode: Episode, decode: Decode) -> str:
    """Its trajectories one below the other, each with its role and score, its contexts and their turns."""
    return "\n".join(line for of in episode.trajectories for line in _trajectory(of, decode))


# Private


def _trajectory(trajectory: Trajectory, decode: Decode) -> Iterator[str]:
    reward = trajectory.reward
    assert reward is not None
    yield f"{trajectory.role}: " + (f"no score: {reward.error}" if reward.score is None else f"score {reward.score:g}")
    for rollout in trajectory.rollouts:
        yield _said("prompt", _with_images(rollout.prompt.ids, rollout.prompt.media, decode))
        yield from _turns(rollout, decode)


def _with_images(ids: Sequence[int], media: Sequence[Media], decode: Decode, start: int = 0) -> str:
    """The text of ids that begin with token `start`, with "[image: name]" for the placeholders of each image."""
    parts, end = [], 0
    for image in media:
        first = image.offset - start
        parts += [decode(ids[end:first]), f"[image: {image.source.rpartition('/')[2]}]"]
        end = first + image.count
    return "".join([*parts, decode(ids[end:])])


def _turns(rollout: Rollout, decode: Decode) -> Iterator[str]:
    number, start = 0, len(rollout.prompt)
    for is_policy, of in groupby(rollout.segments, lambda segment: segment.trainable):
        segments = list(of)
        ids = [int(token) for segment in segments for token in segment.token_ids]
        number += is_policy
        if ids or is_policy:
            text = _with_images(ids, [m for segment in segments for m in segment.media], decode, start)
            yield _said(f"turn {number}" if is_policy else "answer", text)
        start += len(ids)


def _said(who: str, text: str) -> str:
    return f"  {who:<{_WIDTH - 2}}" + textwrap.indent(text.strip(), " " * _WIDTH).lstrip()

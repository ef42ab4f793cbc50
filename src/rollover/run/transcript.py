"""An episode to be read: what the policy was shown, what it said in each turn, what came back, the scores. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby

from rollover.envs.answer_text import Decode
from rollover.trajectories import Episode, Trajectory
from rollover.types import Prompt, Rollout

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
        yield _said("prompt", _prompt(rollout.prompt, decode))
        yield from _turns(rollout, decode)


def _prompt(prompt: Prompt, decode: Decode) -> str:
    """Its text, with "[image: name]" for the placeholders of each image."""
    parts, end = [], 0
    for media in prompt.media:
        parts += [decode(prompt.ids[end : media.offset]), f"[image: {media.source.rpartition('/')[2]}]"]
        end = media.offset + media.count
    return "".join([*parts, decode(prompt.ids[end:])])


def _turns(rollout: Rollout, decode: Decode) -> Iterator[str]:
    number = 0
    for is_policy, segments in groupby(rollout.segments, lambda segment: segment.trainable):
        ids = [int(token) for segment in segments for token in segment.token_ids]
        number += is_policy
        if ids or is_policy:
            yield _said(f"turn {number}" if is_policy else "answer", decode(ids))


def _said(who: str, text: str) -> str:
    return f"  {who:<{_WIDTH - 2}}" + textwrap.indent(text.strip(), " " * _WIDTH).lstrip()

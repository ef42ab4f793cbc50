"""An episode to be read: what the policy was shown, what it said in each turn, what came back, the scores. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rollover.trajectories import Episode, Trajectory
from rollover.types import Rollout

_WIDTH = 12  # of what stands before a text


def transcript(episode: Episode, tokenizer: Any) -> str:
    """Its trajectories one below the other, each with its role and score, its contexts and their turns."""
    return "\n".join(line for of in episode.trajectories for line in _trajectory(of, tokenizer))


# Private


def _trajectory(trajectory: Trajectory, tokenizer: Any) -> Iterator[str]:
    reward = trajectory.reward
    assert reward is not None
    yield f"{trajectory.role}: " + (f"no score: {reward.error}" if reward.score is None else f"score {reward.score:g}")
    for rollout in trajectory.rollouts:
        yield _said("prompt", tokenizer.decode(rollout.prompt_ids, skip_special_tokens=True))
        yield from _turns(rollout, tokenizer)


def _turns(rollout: Rollout, tokenizer: Any) -> Iterator[str]:
    number = 0
    for is_policy, segments in groupby(rollout.segments, lambda segment: segment.trainable):
        ids = [int(token) for segment in segments for token in segment.token_ids]
        number += is_policy
        if ids or is_policy:
            yield _said(f"turn {number}" if is_policy else "answer", tokenizer.decode(ids, skip_special_tokens=True))


def _said(who: str, text: str) -> str:
    return f"  {who:<{_WIDTH - 2}}" + textwrap.indent(text.strip(), " " * _WIDTH).lstrip()

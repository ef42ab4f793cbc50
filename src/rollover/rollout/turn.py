"""What follows a turn of the policy: what its environment is shown, and what of its answer is appended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollover.envs.protocol import written
from rollover.types import Rollout, Segment, StopReason


def is_asked(rollout: Rollout, segments: Sequence[Segment], max_new_tokens: int) -> bool:
    """Whether an environment is asked when `segments`, of an extension, come next.

    An interrupted generation has no turn of the environment after it, nor one that used up the rollout's budget, nor a
    rollout without a token.
    """
    num_tokens = rollout.num_tokens + sum(map(len, segments))
    return segments[-1].stop_reason is not StopReason.PAUSED and 0 < num_tokens < max_new_tokens


def to_append(rollout: Rollout, answer: Segment | None, max_new_tokens: int) -> list[Segment]:
    """What is appended to a rollout whose environment gave `answer`; nothing where it is done."""
    if answer is None:
        return []
    if len(answer) + (answer.stop_reason is StopReason.PAUSED) > max_new_tokens - rollout.num_tokens:
        return [ending(rollout, StopReason.LENGTH)]  # it does not fit, or leaves the policy no token
    return [answer]


def ending(rollout: Rollout, reason: StopReason) -> Segment:
    """An answer without a token, after which the rollout is done for that reason."""
    return replace(written(rollout, ()), stop_reason=reason)

"""One turn of a rollout: what the engine returns, and what the environment writes after it."""

from __future__ import annotations

from dataclasses import replace

from rollover.engine.protocol import ExtendRequest
from rollover.envs.protocol import Environment, why_not_written, written
from rollover.rollout.asker import Asker
from rollover.types import Rollout, RolloutState, Segment, StopReason


async def play_turn(asker: Asker, environment: Environment, rollout: Rollout, request: ExtendRequest) -> list[Segment]:
    """The next segments of a running rollout, for which `request` asks.

    An interrupted generation has no turn of the environment after it. ValueError where the environment fails, or
    answers with what cannot come next.
    """
    segments = await asker.extend(request)
    if segments[-1].stop_reason is StopReason.PAUSED:
        return segments
    so_far = Rollout(
        rollout.group_id,
        rollout.sibling,
        rollout.task,
        [*rollout.segments, *segments],
        RolloutState.RUNNING,
        segments[-1].stop_reason,
        greedy=rollout.greedy,
    )
    try:
        answer = await environment.next(so_far)
    except Exception as error:
        raise ValueError(_of(rollout, f"failed ({type(error).__name__}: {error})")) from error
    if answer is None:
        return segments
    if (why := why_not_written(answer)) is not None:
        raise ValueError(_of(rollout, f"gave a wrong answer: {why}"))
    left = request.max_new_tokens - sum(map(len, segments)) - len(answer)
    if left < 0 or (left == 0 and answer.stop_reason is StopReason.PAUSED):
        # No room for another token of the policy: the rollout ends with its own last one, for want of length.
        return [*segments, replace(written(so_far, ()), stop_reason=StopReason.LENGTH)]
    return [*segments, answer]


def _of(rollout: Rollout, what: str) -> str:
    return (
        f"the environment {what} at rollout {rollout.rollout_id} of task {rollout.task.task_id}. Mend it, and go on"
        " with --resume"
    )

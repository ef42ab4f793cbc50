"""One turn of a rollout: what the engine returns, and what the environment writes after it."""

from __future__ import annotations

from dataclasses import replace

from rollover.engine.protocol import ExtendRequest
from rollover.envs.protocol import Environment, WrongTurn, written
from rollover.rollout.asker import Asker
from rollover.types import Rollout, RolloutState, Segment, StopReason


class EnvironmentFailed(ValueError):
    """The environment raised at a rollout. `segments`: the tokens of the turn before, to go on from."""

    def __init__(self, why: str, segments: list[Segment]) -> None:
        super().__init__(why)
        self.segments = [*segments[:-1], replace(segments[-1], stop_reason=StopReason.PAUSED)]


async def play_turn(asker: Asker, environment: Environment, rollout: Rollout, request: ExtendRequest) -> list[Segment]:
    """The next segments of a running rollout, for which `request` asks.

    An interrupted generation has no turn of the environment after it, nor one that used up the rollout's budget.
    EnvironmentFailed where it raises; WrongTurn, which ends the run, as it is.
    """
    segments = await asker.extend(request)
    room = request.max_new_tokens - sum(map(len, segments))
    if segments[-1].stop_reason is StopReason.PAUSED or not room:
        return segments
    so_far = replace(
        rollout,
        segments=[*rollout.segments, *segments],
        state=RolloutState.RUNNING,
        stop_reason=segments[-1].stop_reason,
    )
    try:
        answer = await environment.next(so_far)
    except WrongTurn:
        raise
    except Exception as error:  # boundary: it fails its rollout, not the run
        why = f"the environment failed at rollout {rollout.rollout_id} ({type(error).__name__}: {error})"
        raise EnvironmentFailed(why, segments) from error
    if answer is None:
        return segments
    if len(answer) + (answer.stop_reason is StopReason.PAUSED) > room:
        # It does not fit, or leaves the policy no token: the rollout ends with the policy's last one.
        return [*segments, replace(written(so_far, ()), stop_reason=StopReason.LENGTH)]
    return [*segments, answer]

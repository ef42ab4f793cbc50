"""The environments by name, and the one that a run's rollouts meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollover.config import Config
from rollover.envs.protocol import Environment, why_no_rewards
from rollover.envs.single_turn import Scorer, SingleTurn
from rollover.functions import explained, own_function
from rollover.types import Reward, Rollout, Segment, Task

_CONTRACT = sorted(name for name in vars(Environment) if not name.startswith("_"))


@dataclass(frozen=True)
class EnvironmentSetup:
    """What an environment is made from."""

    config: Config
    tokenizer: Any
    """Of the model that is trained."""
    score: Scorer
    """Asks the reward function of the rollouts' task, with the text of all their tokens: see Environment.score."""
    scores_singly: Callable[[Task], bool]
    """See Environment.scores_singly."""


ENVIRONMENTS: dict[str, Callable[[EnvironmentSetup], Environment]] = {
    "single_turn": lambda setup: SingleTurn(setup.score, setup.scores_singly),
}


def build_environment(setup: EnvironmentSetup) -> Environment:
    """The environment that rollout.environment names. ValueError if a function of one's own gives none."""
    name = setup.config.rollout.environment
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name](setup)
    make = own_function("rollout.environment", name, f"an environment with {', '.join(_CONTRACT)} (envs/protocol.py)")
    environment = make(setup)
    if missing := [part for part in _CONTRACT if not hasattr(environment, part)]:
        raise make.refused(f"a {type(environment).__name__} without {', '.join(missing)}")
    return OwnEnvironment(environment)


class OwnEnvironment:
    """One of the user's own. Where it fails at scoring the rewards are missing, and a wrong answer ends the run; what
    becomes of a turn at which it fails is the driver's business."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    async def next(self, rollout: Rollout) -> Segment | None:
        try:
            return await self.environment.next(rollout)
        except (SystemExit, asyncio.CancelledError) as error:  # boundary: it is an error like any other
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by the driver, not in the environment
            raise RuntimeError(explained(error)) from error

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        try:
            rewards = await self.environment.score(list(rollouts))
        except (Exception, SystemExit) as error:  # boundary: the user's environment
            return [Reward(None, error=f"rollout.environment failed: {explained(error)}")] * len(rollouts)
        if (why := why_no_rewards(rewards, len(rollouts))) is not None:
            raise ValueError(
                f"rollout.environment gave wrong rewards for group {rollouts[0].group_id}: {why}. Mend it, and go on"
                " with --resume"
            )
        return rewards

    def scores_singly(self, task: Task, /) -> bool:
        try:
            return bool(self.environment.scores_singly(task))
        except (Exception, SystemExit) as error:  # boundary: the user's environment
            raise ValueError(f"rollout.environment failed at scores_singly: {explained(error)}") from error

"""Builds the environment of a run: the user's class (workflow.environment), or what rollout.environment names, a
built-in environment or a function that returns one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollover.config.rollout import ENVIRONMENTS
from rollover.envs.class_environment import ClassEnvironment
from rollover.envs.protocol import (
    Environment,
    EnvironmentSetup,
    InvalidTurn,
    Keep,
    RunEnvironment,
    Scorer,
    keeps_nothing,
    rewards_error,
    turn_error,
)
from rollover.functions import explained, make_named, outcome_of
from rollover.tasks.prompts import Encode, encoder
from rollover.types import Prompt, Reward, Rollout, Segment, Task


def build_environment(setup: EnvironmentSetup, keep: Keep = keeps_nothing) -> RunEnvironment:
    """Build the environment that workflow.environment or rollout.environment names. ValueError for an invalid one."""
    if setup.config.workflow.environment:
        return ClassEnvironment(setup, keep)
    name = setup.config.rollout.environment
    made = make_named("rollout.environment", name, ENVIRONMENTS, setup, Environment, "an environment")
    if name in ENVIRONMENTS:
        return made
    return CustomEnvironment(made, setup.vocab_size, encoder(setup.tokenizer, setup.processor))


def single_turn(setup: EnvironmentSetup) -> RunEnvironment:
    """Build the environment that never answers: a rollout is scored as soon as its generation stops."""
    return SingleTurn(setup.score, setup.scores_singly, encoder(setup.tokenizer, setup.processor))


class SingleTurn(RunEnvironment):
    """Environment without turns: a rollout is scored when its generation stops. `scorer` scores rollouts of one group,
    one Reward each, in order; `scores_singly`: see Environment."""

    has_turns = False

    def __init__(
        self,
        scorer: Scorer,
        scores_singly: Callable[[Task], bool] = lambda task: False,
        encode: Callable[[Task], Prompt] | None = None,
    ) -> None:
        super().__init__(encode)
        self._scorer, self._scores_singly = scorer, scores_singly

    async def next(self, rollout: Rollout) -> None:
        """Return None: the rollout is done."""

    def score(self, rollouts: list[Rollout], /) -> Awaitable[list[Reward]]:
        return self._scorer(rollouts)

    def scores_singly(self, task: Task, /) -> bool:
        return self._scores_singly(task)


class CustomEnvironment(RunEnvironment):
    """The user's environment. An error in `score` makes the rewards missing, an invalid result ends the run; the driver
    handles errors in `next`. `vocab_size`: see EnvironmentSetup."""

    def __init__(self, environment: Environment, vocab_size: int, encode: Encode | None = None) -> None:
        super().__init__(encode)
        self.environment, self.vocab_size = environment, vocab_size

    async def next(self, rollout: Rollout) -> Segment | None:
        """See Environment. InvalidTurn for an invalid result."""
        before = replace(rollout)
        answer, failure = await outcome_of(self.environment.next, rollout)
        if failure is not None:
            raise failure if isinstance(failure, Exception) else RuntimeError(explained(failure)) from failure
        if answer is not None and (why := turn_error(answer, before, self.vocab_size)) is not None:
            raise InvalidTurn(
                f"rollout.environment gave a wrong answer at rollout {rollout.rollout_id}: {why}. Fix it, and resume"
                " with --resume"
            )
        return answer

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        rewards, failure = await outcome_of(self.environment.score, list(rollouts))
        if failure is not None:
            return [Reward(None, error=f"rollout.environment failed: {explained(failure)}")] * len(rollouts)
        if (why := rewards_error(rewards, len(rollouts))) is not None:
            raise ValueError(
                f"rollout.environment gave wrong rewards for group {rollouts[0].group_id}: {why}. Fix it, and resume"
                " with --resume"
            )
        return rewards

    def scores_singly(self, task: Task, /) -> bool:
        try:
            return bool(self.environment.scores_singly(task))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # boundary: the user's environment
            raise ValueError(f"rollout.environment failed at scores_singly: {explained(error)}") from error

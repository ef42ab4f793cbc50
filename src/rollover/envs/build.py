"""The environment of a run: a class of the user's own (workflow.environment), or what rollout.environment names, a
built-in one or a function of the user's own that makes one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollover.config.rollout import ENVIRONMENTS
from rollover.envs.class_environment import ClassEnvironment
from rollover.envs.protocol import (
    Environment,
    Keep,
    RunEnvironment,
    Scorer,
    WrongTurn,
    keeps_nothing,
    why_no_rewards,
    why_not_written,
)
from rollover.envs.protocol import EnvironmentSetup as EnvironmentSetup
from rollover.functions import explained, make_named, outcome_of
from rollover.tasks.prompts import Encode, encoder
from rollover.types import Prompt, Reward, Rollout, Segment, Task


def build_environment(setup: EnvironmentSetup, keep: Keep = keeps_nothing) -> RunEnvironment:
    """The environment that workflow.environment or rollout.environment names. ValueError if it can be none."""
    if setup.config.workflow.environment:
        return ClassEnvironment(setup, keep)
    name = setup.config.rollout.environment
    made = make_named("rollout.environment", name, ENVIRONMENTS, setup, Environment, "an environment")
    if name in ENVIRONMENTS:
        return made
    return OwnEnvironment(made, setup.vocab_size, encoder(setup.tokenizer, setup.processor))


def single_turn(setup: EnvironmentSetup) -> RunEnvironment:
    """The environment that never answers: what the policy wrote is scored as soon as it stops."""
    return SingleTurn(setup.score, setup.scores_singly, encoder(setup.tokenizer, setup.processor))


class SingleTurn(RunEnvironment):
    """A rollout is done when its generation stops, and is scored once. `scorer` scores rollouts of one group, one
    Reward each, in order; `scores_singly`: see Environment."""

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
        """Done."""

    def score(self, rollouts: list[Rollout], /) -> Awaitable[list[Reward]]:
        return self._scorer(rollouts)

    def scores_singly(self, task: Task, /) -> bool:
        return self._scores_singly(task)


class OwnEnvironment(RunEnvironment):
    """One of the user's own. Where it fails at scoring the rewards are missing, and a wrong answer ends the run; what
    becomes of a turn at which it fails is the driver's business. `vocab_size`: see EnvironmentSetup."""

    def __init__(self, environment: Environment, vocab_size: int, encode: Encode | None = None) -> None:
        super().__init__(encode)
        self.environment, self.vocab_size = environment, vocab_size

    async def next(self, rollout: Rollout) -> Segment | None:
        """WrongTurn where it answers with what cannot come next."""
        before = replace(rollout)
        answer, failure = await outcome_of(self.environment.next, rollout)
        if failure is not None:
            raise failure if isinstance(failure, Exception) else RuntimeError(explained(failure)) from failure
        if answer is not None and (why := why_not_written(answer, before, self.vocab_size)) is not None:
            raise WrongTurn(
                f"rollout.environment gave a wrong answer at rollout {rollout.rollout_id}: {why}. Mend it, and go on"
                " with --resume"
            )
        return answer

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        rewards, failure = await outcome_of(self.environment.score, list(rollouts))
        if failure is not None:
            return [Reward(None, error=f"rollout.environment failed: {explained(failure)}")] * len(rollouts)
        if (why := why_no_rewards(rewards, len(rollouts))) is not None:
            raise ValueError(
                f"rollout.environment gave wrong rewards for group {rollouts[0].group_id}: {why}. Mend it, and go on"
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

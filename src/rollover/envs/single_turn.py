"""The environment of a single turn: a rollout is done when its generation stops, and is scored once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollover.envs.protocol import Environment
from rollover.types import Reward, Rollout, Task

Scorer = Callable[[list[Rollout]], Awaitable[list[Reward]]]


class SingleTurn:
    """`scorer` scores rollouts of one group, one Reward each, in order; `scores_singly`: see Environment."""

    def __init__(self, scorer: Scorer, scores_singly: Callable[[Task], bool] = lambda task: False) -> None:
        self.score, self.scores_singly = scorer, scores_singly

    async def next(self, rollout: Rollout) -> None:
        """Done."""


def has_turns(environment: Environment) -> bool:
    """Whether it may write something after a turn of the policy."""
    return not isinstance(environment, SingleTurn)

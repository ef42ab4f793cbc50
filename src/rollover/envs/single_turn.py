"""The environment of a single turn: a rollout is done when its generation stops, and is scored once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollover.envs.protocol import RunEnvironment
from rollover.types import Prompt, Reward, Rollout, Task

Scorer = Callable[[list[Rollout]], Awaitable[list[Reward]]]


class SingleTurn(RunEnvironment):
    """`scorer` scores rollouts of one group, one Reward each, in order; `scores_singly`: see Environment."""

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

"""Scorings under way, each a future: of a rollout alone as soon as it stops, or of a group once it is complete.

Owns the futures. Never decides what becomes of rewards, and never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from rollover.config.workflow import WorkflowConfig
from rollover.envs.protocol import Environment
from rollover.rollout.lifecycle import is_complete
from rollover.rollout.strays import Strays
from rollover.rollout.watchdog import Watchdog
from rollover.types import Group, Reward, Rollout, RolloutState, StopReason

Scoring = asyncio.Future[list[Reward]]


class ToScore(NamedTuple):
    """Rollouts of one group that are scored together; `key`: the group's id, or that of a rollout scored alone."""

    rollouts: Sequence[Rollout]
    key: int | str


class Scorings:
    """Of one driver. `tasks`: what is under way, in the order in which it began.

    What `environment` took too long over, or failed at, is not scored by it: the first gets what `workflow` says, the
    second no reward. `failures`: why it failed, by the id of a rollout that is to be scored next.
    """

    def __init__(self, environment: Environment, workflow: WorkflowConfig, watchdog: Watchdog, strays: Strays) -> None:
        self.environment, self.workflow = environment, workflow
        self.watchdog, self.strays = watchdog, strays
        self.tasks: dict[Scoring, ToScore] = {}
        self.failures: dict[str, str] = {}

    def begin(self, group: Group) -> None:
        """Score what has stopped of a group: one by one if that may be, else together once the group is complete."""
        under_way = {r.rollout_id for scored in self.tasks.values() for r in scored.rollouts}
        left = [r for r in group.rollouts if r.state is RolloutState.SCORING and r.rollout_id not in under_way]
        for rollout in left:
            if (reward := self._reward_unasked(rollout)) is not None:
                self.give(ToScore([rollout], rollout.rollout_id), reward)
                under_way.add(rollout.rollout_id)
        left = [r for r in left if r.rollout_id not in under_way]
        if self.environment.scores_singly(group.task):
            for rollout in left:
                self._begin(ToScore([rollout], rollout.rollout_id))
        elif left and is_complete(group):
            self._begin(ToScore(left, group.group_id))

    def again(self, task: Scoring) -> None:
        self.strays.add(task)
        self._begin(self.tasks.pop(task))

    def fail(self, task: Scoring, why: str) -> None:
        """Its rewards are missing."""
        self.strays.add(task)
        self.give(self.tasks.pop(task), Reward(None, error=why))

    def give(self, scored: ToScore, reward: Reward) -> None:
        """They get this reward, each of them."""
        given: Scoring = asyncio.get_running_loop().create_future()
        given.set_result([reward] * len(scored.rollouts))
        self.tasks[given] = scored

    def end(self, task: Scoring) -> ToScore:
        """It is done."""
        scored = self.tasks.pop(task)
        self.watchdog.on_scored(scored.key, _now())
        return scored

    def give_up(self, task: Scoring) -> None:
        """Wait for it no more. Its rollouts stay unscored, and are scored again."""
        self.end(task)
        self.strays.add(task)

    # Private

    def _reward_unasked(self, rollout: Rollout) -> Reward | None:
        """Of a rollout that its environment did not end; None: it is asked for the reward."""
        if rollout.stop_reason is StopReason.TIMEOUT:
            return self._reward_of_time_out()
        if rollout.stop_reason is StopReason.ERROR:
            return Reward(None, error=self.failures.pop(rollout.rollout_id, "the environment failed at it"))
        return None

    def _reward_of_time_out(self) -> Reward:
        if self.workflow.on_timeout == "score":
            return Reward(self.workflow.timeout_score)
        why = f"the environment worked for longer than workflow.timeout_s = {self.workflow.timeout_s:g}"
        return Reward(None, error=why)

    def _begin(self, scored: ToScore) -> None:
        self.tasks[asyncio.ensure_future(self.environment.score(list(scored.rollouts)))] = scored
        self.watchdog.on_score(scored.rollouts[0].group_id, _now(), scored.key)


def _now() -> float:
    return asyncio.get_running_loop().time()

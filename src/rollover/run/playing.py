"""Plays groups of a task to their end on an engine, where nothing is scheduled, interrupted or trained: evaluations.

    play ──▶ each rollout: asker.extend ──a turn──▶ environment, or an agent ──its words──▶ asker.extend ──▶ ... done
      └────▶ environment.score ──▶ a group of READY rollouts, which is in no cache, ledger or record

Owns what is asked of the engine for them, and the watch over it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rollover.config import Config
from rollover.engine.protocol import Engine
from rollover.envs.protocol import AS_CONFIGURED, BeginAgain, Environment, HoldsObjects
from rollover.envs.single_turn import has_turns
from rollover.rollout.acting import Acting, EnvironmentFailed
from rollover.rollout.asker import Asker
from rollover.rollout.requests import Requests
from rollover.rollout.scorings import reward_of_time_out
from rollover.rollout.turn import is_asked, to_append
from rollover.rollout.watchdog import Watchdog
from rollover.run.episode_host import EpisodeHost
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task
from rollover.workflows.episodes import Episodes

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Playing:
    """Of one evaluation, whose tokens are drawn as `sampling` and `seed` say; groups have at most `most_siblings`.

    `stop_token_ids` (EOS) add to those of the config.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        config: Config,
        stop_token_ids: frozenset[int],
        sampling: SamplingParams,
        seed: int,
        most_siblings: int,
    ) -> None:
        # Agents of training are at work meanwhile: these have a host of their own, and are counted apart.
        self.episodes = environment.apart() if isinstance(environment, Episodes) else None
        self.environment = self.episodes or environment
        self.watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(most_siblings))
        self._asker = Asker(engine, config.watchdog)
        self._requests = Requests(config.rollout, seed, stop_token_ids, may_go_on=has_turns(environment))
        self._sampling, self._most = sampling, config.rollout.max_new_tokens
        self._workflow = self._limits = config.workflow
        self._host: EpisodeHost | None = None
        if self.episodes is not None:
            self._limits = config.workflow.model_copy(update={"timeout_s": math.inf})  # an agent has a clock of its own
            self._host = EpisodeHost(self.episodes, self._rollout, self._asker.release)

    async def play(self, group_id: int, task: Task, prompt: Prompt, num_siblings: int) -> Group:
        """`num_siblings` episodes of the task, all at once, with their rewards. `group_id` is below 0: no group that is
        trained has it.

        Where the environment fails, or takes too long, the reward says so. ValueError where the engine fails at a
        rollout again and again.
        """
        firsts = [Rollout(group_id, i, task, prompt=prompt) for i in range(num_siblings)]
        try:
            played = [of for one in await together([self._episode(first) for first in firsts]) for of in one]
            await self._score([rollout for rollout in played if rollout.reward is None])
        finally:
            if isinstance(self.environment, HoldsObjects):
                self.environment.release(firsts)
        for rollout in played:
            rollout.state = RolloutState.READY
        return Group(group_id, task, prompt, played)

    async def unless_it_stalls(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of `work`, which plays. The first stall ends it (ValueError): it is not worth a second try."""
        if not self.watchdog.is_on:
            return await work
        task, watchdog = asyncio.ensure_future(work), self.watchdog
        try:
            while not task.done():
                await asyncio.wait([task], timeout=watchdog.pause(_now()))
                rollout_ids = watchdog.extending
                progress = {i: [] for i in rollout_ids} | await self._asker.progress(rollout_ids)
                stalls = watchdog.look(_now(), progress, await self._asker.queued(rollout_ids), watchdog.scoring)
                if stalls and not task.done():
                    task.cancel()
                    await asyncio.wait([task], timeout=watchdog.config.grace_s)
                    raise ValueError(
                        f"watchdog: {'; '.join(stall.what for stall in stalls)}: the evaluation is given up"
                    )
        finally:
            task.cancel()
        return task.result()

    # Private

    async def _episode(self, first: Rollout) -> list[Rollout]:
        if self._host is not None:
            return await self._host.play(first)
        acting = Acting(self.environment.next, self._limits)
        while True:
            try:
                await self._rollout(first, acting)
                return [first]
            except BeginAgain:
                self._asker.release([first.rollout_id])
                if isinstance(self.environment, HoldsObjects):
                    self.environment.release([first])
                first = Rollout(first.group_id, first.sibling, first.task, prompt=first.prompt)

    async def _score(self, rollouts: list[Rollout]) -> None:
        if not rollouts:
            return
        index = -1 - rollouts[0].group_id
        self.watchdog.on_score(index, _now())
        rewards = await self.environment.score(rollouts)
        self.watchdog.on_scored(index, _now())
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = reward

    async def _rollout(self, rollout: Rollout, acting: Acting | None = None) -> None:
        """To its end: then it is SCORING. It has a reward by then where the environment is not to be asked for that, as
        it failed, or took too long. BeginAgain where it has to."""
        if acting is None:
            acting = Acting(self.environment.next, self._limits)
        while rollout.reward is None and rollout.stop_reason in (None, StopReason.PAUSED):
            if await self._turn(rollout):
                try:
                    _add(rollout, to_append(rollout, await _answer_to(acting, rollout), self._most))
                except EnvironmentFailed as failed:
                    rollout.reward = Reward(None, error=str(failed))
        if rollout.stop_reason is StopReason.TIMEOUT:
            rollout.reward = reward_of_time_out(self._workflow)
        rollout.state = RolloutState.SCORING
        self._asker.release([rollout.rollout_id])

    async def _turn(self, rollout: Rollout) -> bool:
        """The engine goes on with it. Whether somebody is asked what follows."""
        turn = AS_CONFIGURED if self.episodes is None else self.episodes.options(rollout)
        request = self._requests.to_go_on(rollout, turn)
        request = replace(request, sampling=self._sampling, pause_after=0, stop_repetition_tokens=0)
        self.watchdog.on_start(rollout.rollout_id, -1 - rollout.group_id, rollout.num_tokens, _now())
        segments = await self._asker.extend(request)
        acts = self._requests.may_go_on and is_asked(rollout, segments, self._most)
        if self.episodes is not None:  # whoever called is told of every turn
            acts = segments[-1].stop_reason is not StopReason.PAUSED
        _add(rollout, segments)
        self.watchdog.on_end(rollout.rollout_id, rollout.num_tokens, _now())
        return acts


async def together(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """The results of all. Where one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# Private


def _now() -> float:
    return asyncio.get_running_loop().time()


def _add(rollout: Rollout, segments: Sequence[Segment]) -> None:
    """Append them; what stops with the last of them has stopped."""
    for segment in segments:
        rollout.add(segment)
        rollout.stop_reason = segment.stop_reason


async def _answer_to(acting: Acting, rollout: Rollout) -> Segment | None:
    """What follows its turn. Raises as Acting.end."""
    acting.begin(rollout)
    try:
        while not (done := acting.done()):
            await asyncio.wait(acting.waited_for, return_when=asyncio.FIRST_COMPLETED)
        return acting.end(done[0][1])
    finally:
        acting.clear()

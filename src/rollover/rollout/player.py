"""The player: takes every rollout from its slot to its reward. Generation, environment and scoring are asyncio tasks.

    start ──▶ engine.extend ──▶ Lifecycle.append ──▶ environment.score ──▶ Lifecycle.set_rewards
                                     └── a turn ended ──▶ environment.next ──▶ Lifecycle.append

Owns the tasks, what is known of those that were cancelled, and which groups leave as soon as none of their rollouts
runs. Never decides what starts or stops (the scheduler does), and never waits for them (the driver does). What has
arrived together is handled in order of (group id, sibling), so that results do not depend on the order of arrival.

One more task checks at intervals what is under way, and acts as the watchdog decides. It ends once it has acted on a
stall, which wakes the driver: the driver waits for this task as it does for the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollover.config.workflow import WorkflowConfig
from rollover.envs.protocol import RunEnvironment, StateLost
from rollover.rollout.asker import Asker, ExtendFailed
from rollover.rollout.cancelled_tasks import CancelledTasks
from rollover.rollout.env_tasks import Answering, EnvironmentFailed, EnvTasks
from rollover.rollout.episode_runner import EpisodeRunner
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.lifecycle import Lifecycle, acting_in, is_complete
from rollover.rollout.requests import Requests, ending, is_asked, to_append
from rollover.rollout.watchdog import Action, Stall, Watchdog, salvaged
from rollover.types import DropReason, Group, Reward, Rollout, RolloutState, Segment, StopReason

logger = logging.getLogger(__name__)

Extending = asyncio.Future[list[Segment]]
Scoring = asyncio.Future[list[Reward]]

_MAY_BE_LOST = (RolloutState.PARKED, RolloutState.ACTING, RolloutState.SCORING)


class Scored(NamedTuple):
    """Rollouts of one group that are scored together. `key`: the group's id, or that of a rollout scored alone."""

    rollouts: Sequence[Rollout]
    key: int | str


class Player:
    """Plays the rollouts of one driver.

    `extends`, `scorings`, `env_tasks`: what is under way, in the order in which it began. `cancelled`: tasks that were
    cancelled and have not ended. `arrival` is set when a group gets READY.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        asker: Asker,
        requests: Requests,
        environment: RunEnvironment,
        workflow: WorkflowConfig,
        watchdog: Watchdog,
        failure_limit: FailureLimit,
    ) -> None:
        self.lifecycle, self.asker, self.requests = lifecycle, asker, requests
        self.environment, self.workflow = environment, workflow
        self.watchdog, self.failure_limit = watchdog, failure_limit
        self.extends: dict[Extending, Rollout] = {}
        self.scorings: dict[Scoring, Scored] = {}
        self.cancelled = CancelledTasks()
        self.arrival = asyncio.Event()
        self.episode_runner: EpisodeRunner | None = None
        if environment.agents is not None:
            # An agent has retries and a clock of its own: one of its Rollouts may act while another one has a turn.
            workflow = workflow.model_copy(update={"timeout_s": math.inf, "retries": 0})
            self.episode_runner = EpisodeRunner(lifecycle, environment.agents, self._forget)
        self.env_tasks = EnvTasks(environment.next, workflow)
        self._salvaged: dict[Extending, list[Segment]] = {}  # of extensions that were cancelled
        self._failures: dict[str, str] = {}  # why the environment failed, by the id of a rollout to be scored next
        # Groups that leave as soon as none of their rollouts runs, and why, in words too
        self._dropping: dict[int, tuple[DropReason, str]] = {}
        self._watching: asyncio.Task[None] | None = None

    @property
    def anything(self) -> bool:
        """Whether a rollout runs or is scored. One that acts holds nothing up."""
        return bool(self.extends or self.scorings)

    @property
    def drops(self) -> bool:
        """Whether a group is to leave: a parked sibling must not start again."""
        return bool(self._dropping)

    @property
    def waited_for(self) -> list[asyncio.Future]:
        """All tasks; once one of them ends, `handle_done` has something to do."""
        agents = self.episode_runner.waited_for if self.episode_runner else ()
        return [*self.extends, *self.scorings, *self.env_tasks.waited_for, *agents]

    # What the driver does

    def start(self, rollout: Rollout) -> None:
        """Continue a rollout that has just got a slot."""
        request = self.requests.to_go_on(rollout, self.environment.options(rollout))
        self.extends[asyncio.ensure_future(self.asker.extend(request))] = rollout
        self.watchdog.on_start(rollout.rollout_id, rollout.group_id, rollout.num_tokens, now())

    def ask_for_all(self) -> None:
        """Start every task that is missing, after a restart say: environments of acting rollouts, and scorings."""
        cache = self.lifecycle.cache
        if self.episode_runner is not None:
            self.episode_runner.ask_for_all()
        self._recall_kept()
        left = [r for r in acting_in(cache.groups.values()) if r.group_id not in self._dropping and r.num_tokens]
        self.env_tasks.begin_again(left)
        for group_id in dict.fromkeys(r.group_id for r in cache.unscored()):
            self._score(cache.groups[group_id])

    def handle_done(self) -> None:
        """Apply the results of every extension, environment and scoring that is done."""
        extends = [(r, t) for t, r in self.extends.items() if t.done()]
        for rollout, task in sorted(extends, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_extend(task, self._answer(task, rollout))
        for rollout, answering in self.env_tasks.done():
            self._end_acting(rollout, answering)
        for rollout in [] if self.episode_runner is None else self.episode_runner.handle():
            last = [] if rollout.num_tokens else [self.requests.no_turn(rollout)]
            self._on_stop(rollout, self.lifecycle.append(rollout, last))
        scorings = [(scored.rollouts[0], task) for task, scored in self.scorings.items() if task.done()]
        for _, task in sorted(scorings, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_scoring(task)
        if self._dropping:
            self._drop_what_ended()

    def release(self, groups: Iterable[Group]) -> None:
        """They left the system."""
        for group in groups:
            self._forget([r.rollout_id for r in group.rollouts], left=True)
            self.environment.release(group.rollouts)

    def give_up_scores(self) -> None:
        """Wait for no score that is under way."""
        for task in [task for task in self.scorings if not task.done()]:
            self._give_up_scoring(task)

    async def abandon(self) -> None:
        """After an error or a cancellation: end everything, so that the cache is consistent."""
        tasks: list[asyncio.Future] = [*self.extends, *self.scorings]
        for left in (self.extends, self.scorings, self._salvaged, self._dropping, self.watchdog):
            left.clear()
        for task in tasks:
            self.cancelled.add(task)
        acting = self.env_tasks.clear()
        if self.episode_runner is not None:
            self.episode_runner.clear()
        if tasks:
            await asyncio.wait(tasks, timeout=self.watchdog.config.grace_s if self.watchdog.is_on else None)
        if acting:
            await asyncio.wait(acting, timeout=self.watchdog.config.grace_s)
        for rollout in self.lifecycle.cache.running():
            self.lifecycle.park(rollout)

    # Stalls

    @property
    def watching(self) -> list[asyncio.Task[None]]:
        """The task that checks for stalls; none where the watchdog is off."""
        return [] if self._watching is None else [self._watching]

    def watch(self) -> None:
        """Start the task that checks for stalls. A running one is replaced, which sets a new time for the next check:
        what was interrupted has less time (watchdog.grace_s) than what runs, so that check may be due earlier."""
        self.stop_watching()
        self._watching = asyncio.ensure_future(self._watch_until_a_stall()) if self.watchdog.is_on else None

    def stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def watch_again(self) -> None:
        """Start the task again if it has ended. Raises the error that it ended with."""
        if self._watching is not None and self._watching.done():
            if not self._watching.cancelled():
                self._watching.result()
            self.watch()

    async def _watch_until_a_stall(self) -> None:
        while True:
            await asyncio.sleep(self.watchdog.pause(now()))
            asked = {r.rollout_id: task for task, r in self.extends.items() if not task.done()}
            seen, queued = await self.asker.progress(asked), await self.asker.queued(asked)
            running = {i: task for i, task in asked.items() if task in self.extends and not task.done()}
            scoring = {s.key: task for task, s in self.scorings.items() if not task.done()}
            progress = {i: seen.get(i, []) for i in running}
            stalls = self.watchdog.look(now(), progress, queued, scoring)
            for stall in stalls:
                logger.warning(str(stall))
                if stall.is_scoring:
                    self._on_stalled_scoring(stall, scoring[stall.key])
                else:
                    self._on_stalled_extend(stall, running[str(stall.key)], progress[str(stall.key)])
            if stalls:
                return

    def _on_stalled_extend(self, stall: Stall, task: Extending, segments: Sequence[Segment]) -> None:
        """`segments`: the tokens that it is known to have, from which it goes on if that can be."""
        rollout = self.extends[task]
        match stall.action:
            case Action.CONTINUE:
                self.asker.interrupt([rollout.rollout_id])
            case Action.CANCEL | Action.CANCEL_DROPPED:
                known = salvaged(segments, rollout.num_tokens, self.lifecycle.cache.remaining(rollout.rollout_id))
                self._salvaged[task] = known or self.requests.nothing_for(rollout)
                task.cancel()
            case Action.DROP:
                self._drop_soon(rollout.group_id, DropReason.STALLED, stall.what)
            case Action.ABANDON:
                self._end_extend(task, self._salvaged.pop(task))
                self.cancelled.add(task)
                self._drop_soon(rollout.group_id, DropReason.STALLED, stall.what)

    def _on_stalled_scoring(self, stall: Stall, task: Scoring) -> None:
        scored = self.scorings.pop(task)
        self.cancelled.add(task)
        if stall.action is Action.RESCORE:
            self._begin_scoring(scored)
        else:
            self._give(scored, Reward(None, error=f"stalled: {stall.what}"))

    # Extensions

    def _answer(self, task: Extending, rollout: Rollout) -> list[Segment]:
        """What its extension returned; nothing if that failed for good: then its group is dropped."""
        salvage = self._salvaged.pop(task, None)
        if salvage is not None and task.cancelled():
            return salvage
        try:
            return task.result()
        except ExtendFailed as failure:
            if rollout.group_id not in self._dropping:
                logger.warning(f"{failure}: its group is dropped (failed)")
            self._drop_soon(rollout.group_id, DropReason.FAILED, str(failure))
            return self.requests.nothing_for(rollout)

    def _end_extend(self, task: Extending, segments: list[Segment]) -> None:
        rollout = self.extends.pop(task)
        acts = self.requests.may_go_on and is_asked(rollout, segments, self.requests.config.max_new_tokens)
        if self.episode_runner is not None:  # whoever called is told of every turn
            acts = segments[-1].stop_reason is not StopReason.PAUSED
        complete = self.lifecycle.append(rollout, segments, acts=acts)
        self.watchdog.on_end(rollout.rollout_id, rollout.num_tokens, now())
        if rollout.state is RolloutState.ACTING:
            self.env_tasks.begin(rollout)
        self._on_stop(rollout, complete)

    def _on_stop(self, rollout: Rollout, complete: Group | None) -> None:
        """A rollout left the engine, or its environment. `complete`: its group, if all of that is finished now."""
        if complete is not None:
            self.failure_limit.on_complete()
            self._dropping.pop(complete.group_id, None)  # it came round at the last moment
        if rollout.state is RolloutState.SCORING:
            if self.requests.may_go_on:
                self.asker.release([rollout.rollout_id])
            self._score(self.lifecycle.cache.groups[rollout.group_id])

    # Environments

    def _end_acting(self, rollout: Rollout, task: Answering) -> None:
        try:
            answer = self.env_tasks.end(task)
        except StateLost:
            self._restart(rollout)
            return
        except EnvironmentFailed as failure:
            self._failures[rollout.rollout_id] = str(failure)
            answer = ending(rollout, StopReason.ERROR)
        self._on_stop(
            rollout, self.lifecycle.append(rollout, to_append(rollout, answer, self.requests.config.max_new_tokens))
        )

    def _recall_kept(self) -> None:
        """The environment gets what it has kept of the groups, and what it has lost begins again."""
        scored = {r.rollout_id for scoring in self.scorings.values() for r in scoring.rollouts}
        under_way = self.env_tasks.asked() | scored
        for group in list(self.lifecycle.cache.groups.values()):
            if group.group_id in self._dropping:
                continue
            for sibling, kept in group.kept.items():
                self.environment.recall(group.group_id, sibling, kept)
            for rollout in [r for r in group.rollouts if r.state in _MAY_BE_LOST and r.rollout_id not in under_way]:
                if self.environment.has_lost(rollout):
                    self._restart(rollout)

    def _restart(self, rollout: Rollout) -> None:
        """Its tokens are dropped (restarted), and one without a token comes in its place."""
        group = self.lifecycle.cache.groups[rollout.group_id]
        self._forget([rollout.rollout_id])
        self.environment.on_restart(rollout, group.kept.get(rollout.sibling, {}))
        self.lifecycle.restart_episode(group, rollout.sibling)

    # Scorings

    def _score(self, group: Group) -> None:
        """Score what has stopped of a group: one by one if that may be, else together once the group is complete."""
        under_way = {r.rollout_id for scored in self.scorings.values() for r in scored.rollouts}
        left = []
        for rollout in group.rollouts:
            if rollout.state is RolloutState.SCORING and rollout.rollout_id not in under_way:
                if (reward := self._reward_unasked(rollout)) is not None:
                    self._give(Scored([rollout], rollout.rollout_id), reward)
                else:
                    left.append(rollout)
        if self.environment.scores_singly(group.task):
            for rollout in left:
                self._begin_scoring(Scored([rollout], rollout.rollout_id))
        elif left and is_complete(group):
            self._begin_scoring(Scored(left, group.group_id))

    def _reward_unasked(self, rollout: Rollout) -> Reward | None:
        """Of a rollout that its environment did not end; None: the environment is asked for the reward."""
        if rollout.stop_reason is StopReason.ERROR:
            return Reward(None, error=self._failures.pop(rollout.rollout_id, "the environment failed at it"))
        if rollout.stop_reason is not StopReason.TIMEOUT:
            return None
        if self.workflow.on_timeout == "score":
            return Reward(self.workflow.timeout_score)
        why = f"the environment worked for longer than workflow.timeout_s = {self.workflow.timeout_s:g}"
        return Reward(None, error=why)

    def _begin_scoring(self, scored: Scored) -> None:
        self.scorings[asyncio.ensure_future(self.environment.score(list(scored.rollouts)))] = scored
        self.watchdog.on_score(scored.rollouts[0].group_id, now(), scored.key)

    def _give(self, scored: Scored, reward: Reward) -> None:
        """They get this reward, each of them."""
        given: Scoring = asyncio.get_running_loop().create_future()
        given.set_result([reward] * len(scored.rollouts))
        self.scorings[given] = scored

    def _give_up_scoring(self, task: Scoring) -> None:
        """Wait for it no more. Its rollouts stay unscored, and are scored again."""
        self.watchdog.on_scored(self.scorings.pop(task).key, now())
        self.cancelled.add(task)

    def _end_scoring(self, task: Scoring) -> None:
        scored = self.scorings.pop(task)
        self.watchdog.on_scored(scored.key, now())
        group, rewards = self.lifecycle.cache.groups[scored.rollouts[0].group_id], task.result()
        ready = self.lifecycle.set_rewards(group, rewards, scored.rollouts)
        if ready is True:
            self.arrival.set()
            self.failure_limit.on_ready()
        elif ready:
            self.release([group])
            self.failure_limit.on_dropped(ready, [r.reward for r in group.rollouts if r.reward is not None])

    # Groups that leave

    def _drop_soon(self, group_id: int, reason: DropReason, why: str) -> None:
        """Interrupt the group's rollouts: it leaves once none of them runs."""
        self._dropping.setdefault(group_id, (reason, why))
        rollout_ids = [r.rollout_id for r in self.extends.values() if r.group_id == group_id]
        self.asker.interrupt(rollout_ids)
        self.watchdog.on_interrupt(rollout_ids, now())

    def _drop_what_ended(self) -> None:
        running = {r.group_id for r in self.extends.values()}
        for group_id in sorted(self._dropping.keys() - running):
            for task in [t for t, scored in self.scorings.items() if scored.rollouts[0].group_id == group_id]:
                self._give_up_scoring(task)
            reason, why = self._dropping.pop(group_id)
            self.release([self.lifecycle.drop(group_id, reason, why=why)])
            self.failure_limit.on_given_up()

    def _forget(self, rollout_ids: list[str], *, left: bool = False) -> None:
        self.asker.release(rollout_ids)
        self.env_tasks.forget(rollout_ids, left=left)
        self.watchdog.on_leave(rollout_ids)


def now() -> float:
    """The watchdog's clock."""
    return asyncio.get_running_loop().time()

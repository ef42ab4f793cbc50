"""The player takes every rollout from its slot to its reward. Generation, environment and scoring are asyncio tasks.

    start ──▶ engine.extend ──▶ Lifecycle.append ──▶ environment.score ──▶ Lifecycle.set_rewards
                                     └── a turn ended ──▶ environment.next ──▶ Lifecycle.append

    a group of a workflow is admitted ──▶ its Rollouts act: the agents run, before their first calls
    a request to open a Rollout ──▶ it is WAITING with the prompt of a call, and scheduled as any other
    a request to restart ──▶ the Episode's Rollouts are dropped (restarted) and replaced by one without tokens

If an agent was lost, with the process or its event loop, its function runs again: all its Rollouts act until the agent
repeats their turns, and at its end the turns that it did not repeat are dropped. If the workflow cannot resume
(`Episodes.resumes`), the Episode restarts.

Owns the tasks, the tokens of cancelled ones, and the groups to drop as soon as none of their rollouts runs. Never
decides what starts or stops (scheduler.py), and never waits for tasks (driver.py). Results that arrive together are
handled in order of (group id, sibling), so that they do not depend on the order of arrival.

One more task runs the watchdog's checks and its actions. It ends after a stall, which wakes the driver.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rollover.config.workflow import WorkflowConfig
from rollover.engine.validate import resumable_segments
from rollover.envs.protocol import RunEnvironment, StateLost
from rollover.rollout.env_tasks import EnvironmentFailed, EnvTask, EnvTasks
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.lifecycle import (
    Lifecycle,
    end_segment,
    environment_is_next,
    is_complete,
    segments_to_append,
)
from rollover.rollout.requests import ExtendFailed, Requests, RetryingEngine
from rollover.rollout.watchdog import Action, Stall, Watchdog
from rollover.shutdown import cancel_in_background
from rollover.types import DropReason, Group, Reward, Rollout, RolloutState, Segment, StopReason
from rollover.workflows.conversations import MODEL
from rollover.workflows.turns import EpisodePlace

logger = logging.getLogger(__name__)

ExtendTask = asyncio.Future[list[Segment]]
ScoringTask = asyncio.Future[list[Reward]]

_MAY_BE_LOST = (RolloutState.PARKED, RolloutState.ACTING, RolloutState.SCORING)
_UNOPENED = (RolloutState.WAITING, RolloutState.ACTING)


class ScoringJob(NamedTuple):
    """Rollouts of one group that are scored together. `key`: the group's id, or that of a rollout scored alone."""

    rollouts: Sequence[Rollout]
    key: int | str


class Player:
    """Player of the rollouts of one driver.

    `extends`, `scorings`, `env_tasks`: tasks in flight, in the order in which they began. `arrival` is set when a group
    gets READY. `episodes`: those of a workflow (workflows/episodes.py), or None.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: RetryingEngine,
        requests: Requests,
        environment: RunEnvironment,
        workflow: WorkflowConfig,
        watchdog: Watchdog,
        failure_limit: FailureLimit,
    ) -> None:
        self.lifecycle, self.engine, self.requests = lifecycle, engine, requests
        self.environment, self.workflow = environment, workflow
        self.watchdog, self.failure_limit = watchdog, failure_limit
        self.extends: dict[ExtendTask, Rollout] = {}
        self.scorings: dict[ScoringTask, ScoringJob] = {}
        self.arrival = asyncio.Event()
        self.episodes = environment.agents
        if self.episodes is not None:
            # Agents have their own retries and timeout: one of their Rollouts may act while another has a turn.
            workflow = workflow.model_copy(update={"timeout_s": math.inf, "retries": 0})
        self.env_tasks = EnvTasks(environment.next, workflow)
        self._known_segments: dict[ExtendTask, list[Segment]] = {}  # segments of cancelled extensions
        self._failures: dict[str, str] = {}  # errors of environments, by id of the rollout to score
        # Groups to drop as soon as none of their rollouts runs
        self._dropping: dict[int, tuple[DropReason, str]] = {}
        self._watching: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Return whether a rollout runs or is being scored. Acting ones do not count."""
        return bool(self.extends or self.scorings)

    @property
    def is_dropping(self) -> bool:
        """Return whether a group is to be dropped: its parked rollouts must not start again."""
        return bool(self._dropping)

    @property
    def pending(self) -> list[asyncio.Future]:
        """Return all tasks in flight; `handle_done` handles those that have ended."""
        agents = () if self.episodes is None else self.episodes.pending
        return [*self.extends, *self.scorings, *self.env_tasks.pending, *agents]

    # Called by the driver

    def on_admit(self, group: Group) -> None:
        """Begin the episodes of a new group, if agents play it."""
        for rollout in () if self.episodes is None else group.rollouts:
            self._begin_episode(group, rollout.sibling)

    def start(self, rollout: Rollout) -> None:
        """Extend a rollout that has just got a slot."""
        request = self.requests.continuation(rollout, self.environment.options(rollout))
        self.extends[asyncio.ensure_future(self.engine.extend(request))] = rollout
        self.watchdog.on_start(rollout.rollout_id, rollout.group_id, rollout.num_tokens, now())

    def start_missing(self) -> None:
        """Start the missing tasks of acting and finished rollouts, e.g. after a restart."""
        cache = self.lifecycle.cache
        if self.episodes is not None:
            self._start_missing_agents()
        self._restore_environments()
        acting = [r for r in cache.acting() if r.group_id not in self._dropping and r.num_tokens]
        self.env_tasks.start_missing(acting)
        for group_id in dict.fromkeys(r.group_id for r in cache.unscored()):
            self._score(cache.groups[group_id])

    def handle_done(self) -> None:
        """Apply the results of all tasks that are done."""
        extends = [(r, t) for t, r in self.extends.items() if t.done()]
        for rollout, task in sorted(extends, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_extend(task, self._answer(task, rollout))
        for rollout, task in self.env_tasks.done():
            self._end_acting(rollout, task)
        if self.episodes is not None:
            self._handle_agents()
        scorings = [(job.rollouts[0], task) for task, job in self.scorings.items() if task.done()]
        for _, task in sorted(scorings, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_scoring(task)
        if self._dropping:
            self._drop_stopped()

    def release(self, groups: Iterable[Group]) -> None:
        """Free the resources of groups that left."""
        for group in groups:
            self._release([r.rollout_id for r in group.rollouts], left=True)
            self.environment.release(group.rollouts)

    def cancel_scorings(self) -> None:
        """Cancel the scorings in flight. A restarted run scores those rollouts again."""
        for task in [task for task in self.scorings if not task.done()]:
            self._cancel_scoring(task)

    async def abandon(self) -> None:
        """Cancel all tasks, and park the running rollouts, after an error: the cache stays consistent."""
        tasks: list[asyncio.Future] = [*self.extends, *self.scorings]
        for state in (self.extends, self.scorings, self._known_segments, self._dropping, self.watchdog):
            state.clear()
        for task in tasks:
            cancel_in_background(task)
        acting = self.env_tasks.cancel_all()
        if self.episodes is not None:
            self.episodes.end_all()
        if tasks:
            await asyncio.wait(tasks, timeout=self.watchdog.config.grace_s if self.watchdog.is_on else None)
        if acting:
            await asyncio.wait(acting, timeout=self.watchdog.config.grace_s)
        for rollout in self.lifecycle.cache.running():
            self.lifecycle.park(rollout)

    # Stalls

    @property
    def watching(self) -> list[asyncio.Task[None]]:
        """Return the task that checks for stalls; none if the watchdog is off."""
        return [] if self._watching is None else [self._watching]

    def watch(self) -> None:
        """Start the task that checks for stalls; a running one is replaced.

        That sets a new time for the next check: interrupted rollouts have less time (watchdog.grace_s) than running
        ones.
        """
        self.stop_watching()
        self._watching = asyncio.ensure_future(self._watch_until_a_stall()) if self.watchdog.is_on else None

    def stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def renew_watch(self) -> None:
        """Restart the task if it has ended. Raises its error."""
        if self._watching is not None and self._watching.done():
            if not self._watching.cancelled():
                self._watching.result()
            self.watch()

    async def _watch_until_a_stall(self) -> None:
        while True:
            await asyncio.sleep(self.watchdog.next_check_in(now()))
            extends = {r.rollout_id: task for task, r in self.extends.items() if not task.done()}
            found, queued = await self.engine.progress(extends), await self.engine.queued(extends)
            running = {i: task for i, task in extends.items() if task in self.extends and not task.done()}
            scoring = {s.key: task for task, s in self.scorings.items() if not task.done()}
            progress = {i: found.get(i, []) for i in running}
            stalls = self.watchdog.check(now(), progress, queued, scoring)
            for stall in stalls:
                logger.warning(str(stall))
                if stall.is_scoring:
                    self._on_stalled_scoring(stall, scoring[stall.key])
                else:
                    self._on_stalled_extend(stall, running[str(stall.key)], progress[str(stall.key)])
            if stalls:
                return

    def _on_stalled_extend(self, stall: Stall, task: ExtendTask, segments: Sequence[Segment]) -> None:
        """Act on a stalled extension. `segments`: its tokens so far, from which it continues if they are valid."""
        rollout = self.extends[task]
        match stall.action:
            case Action.CONTINUE:
                self.engine.interrupt([rollout.rollout_id])
            case Action.CANCEL | Action.CANCEL_DROPPED:
                remaining = self.lifecycle.cache.remaining(rollout.rollout_id)
                known = resumable_segments(segments, rollout.num_tokens, remaining)
                self._known_segments[task] = known or self.requests.empty_answer(rollout)
                task.cancel()
            case Action.DROP:
                self._drop_soon(rollout.group_id, DropReason.STALLED, stall.what)
            case Action.ABANDON:
                self._end_extend(task, self._known_segments.pop(task))
                cancel_in_background(task)
                self._drop_soon(rollout.group_id, DropReason.STALLED, stall.what)

    def _on_stalled_scoring(self, stall: Stall, task: ScoringTask) -> None:
        job = self.scorings.pop(task)
        cancel_in_background(task)
        if stall.action is Action.RESCORE:
            self._start_scoring(job)
        else:
            self._set_score(job, Reward(None, error=f"stalled: {stall.what}"))

    # Extensions

    def _answer(self, task: ExtendTask, rollout: Rollout) -> list[Segment]:
        """Return the segments of a finished extension. If it failed for good: an empty one, and drop the group."""
        known = self._known_segments.pop(task, None)
        if known is not None and task.cancelled():
            return known
        try:
            return task.result()
        except ExtendFailed as failure:
            if rollout.group_id not in self._dropping:
                logger.warning(f"{failure}: its group is dropped (failed)")
            self._drop_soon(rollout.group_id, DropReason.FAILED, str(failure))
            return self.requests.empty_answer(rollout)

    def _end_extend(self, task: ExtendTask, segments: list[Segment]) -> None:
        rollout = self.extends.pop(task)
        acts = self.requests.may_continue and environment_is_next(
            rollout, segments, self.requests.config.max_new_tokens
        )
        if self.episodes is not None:  # the agent gets the result of every turn
            acts = segments[-1].stop_reason is not StopReason.PAUSED
        complete = self.lifecycle.append(rollout, segments, acts=acts)
        self.watchdog.on_end(rollout.rollout_id, rollout.num_tokens, now())
        if rollout.state is RolloutState.ACTING:
            self.env_tasks.start(rollout)
        self._on_stop(rollout, complete)

    def _on_stop(self, rollout: Rollout, complete: Group | None) -> None:
        """Handle a rollout that left the engine or its environment. `complete`: its group, if that is finished now."""
        if complete is not None:
            self.failure_limit.on_complete()
            self._dropping.pop(complete.group_id, None)  # the stalled rollout finished at the last moment
        if rollout.state is RolloutState.SCORING:
            if self.requests.may_continue:
                self.engine.release([rollout.rollout_id])
            self._score(self.lifecycle.cache.groups[rollout.group_id])

    # Environments

    def _end_acting(self, rollout: Rollout, task: EnvTask) -> None:
        try:
            answer = self.env_tasks.result(task)
        except StateLost:
            self._restart(rollout)
            return
        except EnvironmentFailed as failure:
            self._failures[rollout.rollout_id] = str(failure)
            answer = end_segment(rollout, StopReason.ERROR)
        segments = segments_to_append(rollout, answer, self.requests.config.max_new_tokens)
        self._on_stop(rollout, self.lifecycle.append(rollout, segments))

    def _restore_environments(self) -> None:
        """Give the environment the values that it kept, and restart the rollouts whose state it has lost."""
        scored = {r.rollout_id for job in self.scorings.values() for r in job.rollouts}
        in_flight = self.env_tasks.pending_ids() | scored
        for group in list(self.lifecycle.cache.groups.values()):
            if group.group_id in self._dropping:
                continue
            for sibling, kept in group.kept.items():
                self.environment.recall(group.group_id, sibling, kept)
            for rollout in [r for r in group.rollouts if r.state in _MAY_BE_LOST and r.rollout_id not in in_flight]:
                if self.environment.has_lost(rollout):
                    self._restart(rollout)

    def _restart(self, rollout: Rollout) -> None:
        """Drop the rollout's tokens (restarted), and replace it by one without tokens."""
        group = self.lifecycle.cache.groups[rollout.group_id]
        self._release([rollout.rollout_id])
        self.environment.on_restart(rollout, group.kept.get(rollout.sibling, {}))
        self.lifecycle.restart_episode(group, rollout.sibling)

    # Agents: their requests become transitions of the held rollouts

    def _start_missing_agents(self) -> None:
        """Start the agent of every unfinished Episode that has none: of new groups, and those that were lost."""
        for group in list(self.lifecycle.cache.groups.values()):
            for sibling in dict.fromkeys(r.sibling for r in group.rollouts if r.state is not RolloutState.READY):
                if not self.episodes.has((group.group_id, sibling)):
                    self._resume_episode(group, sibling)

    def _handle_agents(self) -> None:
        """Apply the agents' requests, and finish the Rollouts of ended episodes that no turn will finish.

        Those are Rollouts whose unrepeated turns were dropped, and those of an Episode that made no call.
        """
        requests, ended = self.episodes.take_requests()
        groups = self.lifecycle.cache.groups
        for (group_id, sibling), rollout in requests:
            if rollout is not None and group_id in groups:
                self.lifecycle.open(rollout)
            elif group_id in groups:
                self._begin_episode(groups[group_id], sibling)
        finished = []
        for place in ended:
            if place[0] in groups:
                finished += self._drop_unrepeated(place)
                # A WAITING one was opened by a call that its agent abandoned: its turn is played, and ends it.
                acting = [r for r in _of(groups[place[0]], place[1]) if r.state is RolloutState.ACTING]
                finished += [r for r in acting if not r.num_tokens]
        for rollout in finished:
            last = [] if rollout.num_tokens else [self.requests.end_without_turn(rollout)]
            self._on_stop(rollout, self.lifecycle.append(rollout, last))

    def _resume_episode(self, group: Group, sibling: int) -> None:
        """Start an agent for an Episode that has lost its own."""
        rollouts = _of(group, sibling)
        if not self.episodes.resumes or _has_just_begun(rollouts, group):
            self._begin_episode(group, sibling)
            return
        for rollout in rollouts:
            self.lifecycle.rerun_agent(rollout)
        first = Rollout(group.group_id, sibling, group.task, prompt=group.prompt)
        self.episodes.begin(first, group.kept.get(sibling), [replace(rollout) for rollout in rollouts])

    def _begin_episode(self, group: Group, sibling: int) -> None:
        rollouts = _of(group, sibling)
        first = rollouts[0]
        if not _has_just_begun(rollouts, group):
            self._release([r.rollout_id for r in rollouts])
            first = self.lifecycle.restart_episode(group, sibling)
        if first.state is RolloutState.WAITING:
            self.lifecycle.begin_acting(first)
        self.episodes.begin(first, group.kept.get(sibling))

    def _drop_unrepeated(self, place: EpisodePlace) -> list[Rollout]:
        """Drop the recorded turns that a rerun agent, which has ended, did not repeat. Returns Rollouts with turns
        left.
        """
        shortened = []
        unreplayed = list(self.episodes.unreplayed(place).items())
        for rollout_id, num_tokens in reversed(unreplayed):  # so that the first Rollout stays if all are dropped
            self._release([rollout_id])
            shorter = self.lifecycle.truncate(self.lifecycle.cache.rollout(rollout_id), num_tokens)
            shortened += [shorter] if num_tokens else []
        self.episodes.on_truncated(place)
        return shortened

    # Scorings

    def _score(self, group: Group) -> None:
        """Score the finished rollouts of a group: one by one if possible, else together once the group is complete."""
        in_flight = {r.rollout_id for job in self.scorings.values() for r in job.rollouts}
        to_score = []
        for rollout in group.rollouts:
            if rollout.state is RolloutState.SCORING and rollout.rollout_id not in in_flight:
                if (reward := self._failed_reward(rollout)) is not None:
                    self._set_score(ScoringJob([rollout], rollout.rollout_id), reward)
                else:
                    to_score.append(rollout)
        if self.environment.scores_singly(group.task):
            for rollout in to_score:
                self._start_scoring(ScoringJob([rollout], rollout.rollout_id))
        elif to_score and is_complete(group):
            self._start_scoring(ScoringJob(to_score, group.group_id))

    def _failed_reward(self, rollout: Rollout) -> Reward | None:
        """Return the reward of a rollout whose environment failed or timed out; None: the environment scores it."""
        if rollout.stop_reason is StopReason.ERROR:
            return Reward(None, error=self._failures.pop(rollout.rollout_id, "the environment failed at it"))
        if rollout.stop_reason is not StopReason.TIMEOUT:
            return None
        if self.workflow.on_timeout == "score":
            return Reward(self.workflow.timeout_score)
        why = f"the environment exceeded workflow.timeout_s = {self.workflow.timeout_s:g}"
        return Reward(None, error=why)

    def _start_scoring(self, job: ScoringJob) -> None:
        self.scorings[asyncio.ensure_future(self.environment.score(list(job.rollouts)))] = job
        self.watchdog.on_scoring_start(job.rollouts[0].group_id, now(), job.key)

    def _set_score(self, job: ScoringJob, reward: Reward) -> None:
        """Complete a job with this reward for each of its rollouts."""
        task: ScoringTask = asyncio.get_running_loop().create_future()
        task.set_result([reward] * len(job.rollouts))
        self.scorings[task] = job

    def _cancel_scoring(self, task: ScoringTask) -> None:
        """Cancel a scoring. Its rollouts stay unscored, and are scored again."""
        self.watchdog.on_scoring_end(self.scorings.pop(task).key, now())
        cancel_in_background(task)

    def _end_scoring(self, task: ScoringTask) -> None:
        job = self.scorings.pop(task)
        self.watchdog.on_scoring_end(job.key, now())
        group, rewards = self.lifecycle.cache.groups[job.rollouts[0].group_id], task.result()
        ready = self.lifecycle.set_rewards(group, rewards, job.rollouts)
        if ready is True:
            self.arrival.set()
            self.failure_limit.on_ready()
        elif ready:
            self.release([group])
            self.failure_limit.on_dropped(ready, [r.reward for r in group.rollouts if r.reward is not None])

    # Groups to drop

    def _drop_soon(self, group_id: int, reason: DropReason, why: str) -> None:
        """Interrupt the group's rollouts, and drop it once none of them runs."""
        self._dropping.setdefault(group_id, (reason, why))
        rollout_ids = [r.rollout_id for r in self.extends.values() if r.group_id == group_id]
        self.engine.interrupt(rollout_ids)
        self.watchdog.on_interrupt(rollout_ids, now())

    def _drop_stopped(self) -> None:
        running = {r.group_id for r in self.extends.values()}
        for group_id in sorted(self._dropping.keys() - running):
            for task in [t for t, job in self.scorings.items() if job.rollouts[0].group_id == group_id]:
                self._cancel_scoring(task)
            reason, why = self._dropping.pop(group_id)
            self.release([self.lifecycle.drop(group_id, reason, why=why)])
            self.failure_limit.on_group_failed()

    def _release(self, rollout_ids: list[str], *, left: bool = False) -> None:
        self.engine.release(rollout_ids)
        self.env_tasks.cancel(rollout_ids, left=left)
        self.watchdog.on_leave(rollout_ids)


def now() -> float:
    """Return the time of the watchdog's clock."""
    return asyncio.get_running_loop().time()


def _of(group: Group, sibling: int) -> list[Rollout]:
    """Return the Rollouts of an Episode."""
    return [r for r in group.rollouts if r.sibling == sibling]


def _has_just_begun(rollouts: list[Rollout], group: Group) -> bool:
    """Return whether the Episode's only Rollout is as the group was admitted with it."""
    first = rollouts[0]
    as_admitted = first.prompt == group.prompt and first.role == MODEL
    return len(rollouts) == 1 and first.state in _UNOPENED and not first.num_tokens and as_admitted

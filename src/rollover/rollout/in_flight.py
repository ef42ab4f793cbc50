"""What is in flight: turns of rollouts on the engine, their environments at work, and scorings, each a future.

    start ──▶ handle_done ──▶ Lifecycle.append ──▶ score ──▶ handle_done ──▶ Lifecycle.set_rewards
                                   └── a turn ended ──▶ acting ──▶ handle_done ──▶ Lifecycle.append

Owns the futures, and which groups leave as soon as none of their rollouts runs. Never decides what starts or stops, and
never waits: the driver does. What has arrived together is handled in order of (group id, sibling), so that results do
not depend on the order of arrival.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence

from rollover.config.workflow import WorkflowConfig
from rollover.envs.class_environment import ClassEnvironment
from rollover.envs.protocol import AS_CONFIGURED, BeginAgain, Environment, HoldsObjects
from rollover.rollout.acting import Acting, Answering, EnvironmentFailed
from rollover.rollout.asker import Asker, ExtendFailed
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.hosting import Hosting
from rollover.rollout.lifecycle import Lifecycle, acting_in
from rollover.rollout.lost_objects import LostObjects
from rollover.rollout.requests import Requests
from rollover.rollout.scorings import Scoring, Scorings
from rollover.rollout.strays import Strays
from rollover.rollout.turn import ending, is_asked, to_append
from rollover.rollout.watchdog import Watchdog, salvaged
from rollover.types import DropReason, Group, Rollout, RolloutState, Segment, StopReason
from rollover.workflows.episodes import Episodes

logger = logging.getLogger(__name__)

Extending = asyncio.Future[list[Segment]]


class InFlight:
    """Of one driver, which gives it its parts.

    `extends`, `scorings`, `acting`: what is under way, in the order in which it began. `strays`: what nobody waits for
    any more. `arrival` is set when a group gets READY.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        asker: Asker,
        requests: Requests,
        environment: Environment,
        workflow: WorkflowConfig,
        watchdog: Watchdog,
        failure_limit: FailureLimit,
    ) -> None:
        self.lifecycle, self.asker, self.requests = lifecycle, asker, requests
        self.environment = environment
        self.watchdog, self.failure_limit = watchdog, failure_limit
        self.extends: dict[Extending, Rollout] = {}
        self.strays = Strays()
        self.hosting: Hosting | None = None
        if isinstance(environment, Episodes):
            # An agent has retries and a clock of its own: one of its Rollouts may act while another one has a turn.
            workflow = workflow.model_copy(update={"timeout_s": math.inf, "retries": 0})
            self.hosting = Hosting(lifecycle, environment, self._forget)
        objects = environment if isinstance(environment, ClassEnvironment) else None
        self.lost_objects = LostObjects(lifecycle, objects, self._forget)
        self.acting = Acting(environment.next, workflow)
        self.scorings = Scorings(environment, workflow, watchdog, self.strays)
        self.arrival = asyncio.Event()
        self._salvaged: dict[Extending, list[Segment]] = {}  # of extensions that were cancelled
        # Groups that leave as soon as none of their rollouts runs, and why, in words too
        self._dropping: dict[int, tuple[DropReason, str]] = {}

    @property
    def anything(self) -> bool:
        """Whether a rollout runs or is scored. One that acts holds nothing up."""
        return bool(self.extends or self.scorings.tasks)

    @property
    def drops(self) -> bool:
        """Whether a group is to leave: a parked sibling must not start again."""
        return bool(self._dropping)

    # What the driver does

    def start(self, rollout: Rollout) -> None:
        """Ask the engine to go on with a rollout that has just begun to run."""
        turn = AS_CONFIGURED if self.hosting is None else self.hosting.episodes.options(rollout)
        request = self.requests.to_go_on(rollout, turn)
        self.extends[asyncio.ensure_future(self.asker.extend(request))] = rollout
        self.watchdog.on_start(rollout.rollout_id, rollout.group_id, rollout.num_tokens, now())

    def go_on(self) -> None:
        """Ask for everything that nobody is asked for: what acts, and what is to be scored, after a restart, say."""
        cache = self.lifecycle.cache
        if self.hosting is not None:
            self.hosting.go_on()
        scored = {r.rollout_id for scoring in self.scorings.tasks.values() for r in scoring.rollouts}
        self.lost_objects.go_on(self.acting.asked() | scored, self._dropping.keys())
        left = [r for r in acting_in(cache.groups.values()) if r.group_id not in self._dropping and r.num_tokens]
        self.acting.begin_again(left)
        for group_id in dict.fromkeys(r.group_id for r in cache.unscored()):
            self.scorings.begin(cache.groups[group_id])

    def handle_done(self) -> None:
        """Take over what every extension, environment and scoring that is done has given."""
        extends = [(r, t) for t, r in self.extends.items() if t.done()]
        for rollout, task in sorted(extends, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_extend(task, self._answer(task, rollout))
        for rollout, answering in self.acting.done():
            self._end_acting(rollout, answering)
        for rollout in [] if self.hosting is None else self.hosting.handle():
            ending = [] if rollout.num_tokens else [self.requests.no_turn(rollout)]
            self._on_stop(rollout, self.lifecycle.append(rollout, ending))
        scorings = [(scored.rollouts[0], task) for task, scored in self.scorings.tasks.items() if task.done()]
        for _, task in sorted(scorings, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_scoring(task)
        if self._dropping:
            self._drop_what_ended()

    def release(self, groups: Iterable[Group]) -> None:
        """They left the system."""
        for group in groups:
            self._forget([r.rollout_id for r in group.rollouts], left=True)
            if isinstance(self.environment, HoldsObjects):
                self.environment.release(group.rollouts)

    def give_up_scores(self) -> None:
        """Wait for no score that is under way."""
        for task in [task for task in self.scorings.tasks if not task.done()]:
            self.scorings.give_up(task)

    async def abandon(self) -> None:
        """After an error or a cancellation: end everything, so that the cache is consistent."""
        tasks: list[asyncio.Future] = [*self.extends, *self.scorings.tasks]
        for left in (self.extends, self.scorings.tasks, self._salvaged, self._dropping, self.watchdog):
            left.clear()
        for task in tasks:
            self.strays.add(task)
        acting = self.acting.clear()
        if self.hosting is not None:
            self.hosting.clear()
        if tasks:
            await asyncio.wait(tasks, timeout=self.watchdog.config.grace_s if self.watchdog.is_on else None)
        if acting:
            await asyncio.wait(acting, timeout=self.watchdog.config.grace_s)
        for rollout in self.lifecycle.cache.running():
            self.lifecycle.park(rollout)

    # What is done about one that stalls

    def cancel_extend(self, task: Extending, segments: Sequence[Segment]) -> None:
        """It goes on from `segments`, what it is known to have, if that can be."""
        rollout = self.extends[task]
        known = salvaged(segments, rollout.num_tokens, self.lifecycle.cache.remaining(rollout.rollout_id))
        self._salvaged[task] = known or self.requests.nothing_for(rollout)
        task.cancel()

    def give_up_extend(self, task: Extending, why: str) -> None:
        """Wait no more for one that was cancelled. Its group is dropped."""
        rollout = self.extends[task]
        self._end_extend(task, self._salvaged.pop(task))
        self.strays.add(task)
        self.drop_soon(rollout.group_id, DropReason.STALLED, why)

    def drop_soon(self, group_id: int, reason: DropReason, why: str) -> None:
        """Interrupt the group's rollouts: it leaves once none of them runs."""
        self._dropping.setdefault(group_id, (reason, why))
        rollout_ids = [r.rollout_id for r in self.extends.values() if r.group_id == group_id]
        self.asker.interrupt(rollout_ids)
        self.watchdog.on_interrupt(rollout_ids, now())

    # Private

    def _forget(self, rollout_ids: list[str], *, left: bool = False) -> None:
        self.asker.release(rollout_ids)
        self.acting.forget(rollout_ids, left=left)
        self.watchdog.on_leave(rollout_ids)

    def _answer(self, task: Extending, rollout: Rollout) -> list[Segment]:
        """What its extension returned; nothing if that failed for good: then its group is dropped."""
        salvage = self._salvaged.pop(task, None)
        if salvage is not None and task.cancelled():
            return salvage
        try:
            return task.result()
        except ExtendFailed as failure:
            self._on_failure(rollout, failure)
            return self.requests.nothing_for(rollout)

    def _on_failure(self, rollout: Rollout, failure: ExtendFailed) -> None:
        if rollout.group_id not in self._dropping:
            logger.warning(f"{failure}: its group is dropped (failed)")
        self.drop_soon(rollout.group_id, DropReason.FAILED, str(failure))

    def _end_extend(self, task: Extending, segments: list[Segment]) -> None:
        rollout = self.extends.pop(task)
        acts = self.requests.may_go_on and is_asked(rollout, segments, self.requests.config.max_new_tokens)
        if self.hosting is not None:  # whoever called is told of every turn
            acts = segments[-1].stop_reason is not StopReason.PAUSED
        complete = self.lifecycle.append(rollout, segments, acts=acts)
        self.watchdog.on_end(rollout.rollout_id, rollout.num_tokens, now())
        if rollout.state is RolloutState.ACTING:
            self.acting.begin(rollout)
        self._on_stop(rollout, complete)

    def _end_acting(self, rollout: Rollout, task: Answering) -> None:
        try:
            answer = self.acting.end(task)
        except BeginAgain:
            self.lost_objects.begin_again(rollout)
            return
        except EnvironmentFailed as failure:
            self.scorings.failures[rollout.rollout_id] = str(failure)
            answer = ending(rollout, StopReason.ERROR)
        self._on_stop(
            rollout, self.lifecycle.append(rollout, to_append(rollout, answer, self.requests.config.max_new_tokens))
        )

    def _on_stop(self, rollout: Rollout, complete: Group | None) -> None:
        """A rollout left the engine, or its environment. `complete`: its group, if all of that is finished now."""
        if complete is not None:
            self.failure_limit.on_complete()
            self._dropping.pop(complete.group_id, None)  # it came round at the last moment
        if rollout.state is RolloutState.SCORING:
            if self.requests.may_go_on:
                self.asker.release([rollout.rollout_id])
            self.scorings.begin(self.lifecycle.cache.groups[rollout.group_id])

    def _end_scoring(self, task: Scoring) -> None:
        rollouts = self.scorings.end(task).rollouts
        group, rewards = self.lifecycle.cache.groups[rollouts[0].group_id], task.result()
        ready = self.lifecycle.set_rewards(group, rewards, rollouts)
        if ready is True:
            self.arrival.set()
            self.failure_limit.on_ready()
        elif ready:
            self.release([group])
            self.failure_limit.on_dropped(ready, [r.reward for r in group.rollouts if r.reward is not None])

    def _drop_what_ended(self) -> None:
        running = {r.group_id for r in self.extends.values()}
        for group_id in sorted(self._dropping.keys() - running):
            for task in [t for t, scored in self.scorings.tasks.items() if scored.rollouts[0].group_id == group_id]:
                self.scorings.give_up(task)
            reason, why = self._dropping.pop(group_id)
            self.release([self.lifecycle.drop(group_id, reason, why=why)])
            self.failure_limit.on_given_up()


def now() -> float:
    """The watchdog's clock."""
    return asyncio.get_running_loop().time()

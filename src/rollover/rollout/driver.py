"""The driver: the asyncio shell that carries out what the scheduler decides. One `collect` gives one step's groups.

    next_task -> admit -> engine.extend -> append -> park | act | finish -> score -> ready -> consume
                                              act -> environment.next -> append

Owns the waiting: for what the player has in flight (player.py), which the watchdog looks at. Never decides an
order, never changes a rollout itself (Lifecycle does), never trains or hands over weights. Between two `collect` calls
nothing runs: every held rollout is WAITING, PARKED, ACTING, SCORING (siblings still unfinished) or READY. What acts
goes on meanwhile, and nobody waits for it where anything else can go on. With `rollout.overlap` that holds after
`interrupt_all` alone: `collect` leaves in flight what it does not return, and `go_on` generates while the trainer
trains.

No wait has a limit of its own but that for an environment (env_tasks.py). The watchdog looks at its own times, without
changing the order of what makes progress, and may end an extension or a scoring, or take it out of the wait for good.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from rollover.config.workflow import WorkflowConfig
from rollover.engine.protocol import Engine
from rollover.envs.protocol import RunEnvironment
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.player import Player, now
from rollover.rollout.requests import Asker, Requests
from rollover.rollout.watchdog import Watchdog
from rollover.types import Group, NextTask


class PhaseClock:
    """The seconds of the driver's phases, cumulative.

    `generation_s`: the run waited while something was generated, or (`environment_s` of it) for environments alone.
    `scoring_s`: it waited for scores, and nothing was generated. `scheduling_s`: the rest of the phases, which are new
    tasks, decisions and bookkeeping. `idle`: the engine ran nothing. `beside_training`: set while the trainer trains
    beside generation; nobody waits for generation then, so that only `idle` goes on.
    """

    def __init__(self) -> None:
        self.generation_s = self.environment_s = self.scoring_s = self.scheduling_s = 0.0
        self.idle = IdleTime()
        self.beside_training = False

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Counts the time of a block as scheduling, without what `waiting` counts within it."""
        started, waited = time.perf_counter(), self.generation_s + self.scoring_s
        try:
            yield
        finally:
            waited = self.generation_s + self.scoring_s - waited
            self.scheduling_s += time.perf_counter() - started - waited

    @contextmanager
    def waiting(self, *, generating: bool, acting: bool = False) -> Iterator[None]:
        """Counts the time of a block, in which the driver waits, as generation, of environments alone (`acting`), or as
        scoring."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if self.beside_training:
            return
        if generating or acting:
            self.generation_s += seconds
            self.environment_s += seconds if acting else 0.0
        else:
            self.scoring_s += seconds


class IdleTime:
    """Seconds in which the engine ran nothing beside the trainer's work (`Driver.go_on`), by cause, one at a time.

    "trainer": nothing was in flight, and nothing may start before the trainer has trained or handed over its weights;
    "rewards": only scorings were in flight.
    """

    def __init__(self) -> None:
        self._seconds = {"trainer": 0.0, "rewards": 0.0}
        self._cause: str | None = None
        self._since = 0.0

    @property
    def running(self) -> bool:
        """Whether the engine is idle now. For any thread."""
        return self._cause is not None

    def set(self, cause: str | None) -> None:
        """From now on the engine is idle for `cause`; None: it is not. What was until now is counted."""
        now = time.perf_counter()
        if self._cause is not None:
            self._seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def seconds(self) -> dict[str, float]:
        """By cause, cumulative and up to now."""
        self.set(self._cause)
        return dict(self._seconds)


class Driver:
    """Runs generation phases on one engine.

    `next_task` returns the next (task, prompt), None at the end of the stream. `environment` is asked after every
    stopped generation whether the rollout goes on, and scores it when it is done. `requests` makes the engine's
    requests. Without a `watchdog`, hanging calls are waited for. `clock` counts the time that each phase took.
    `on_abandon` is called before what is in flight is abandoned.

    There are three ways to stop what is in flight, and these words mean them everywhere:

        drain       nothing is started, and what runs ends by itself
        interrupt   what runs returns at once with the tokens it has, and is parked, to be continued later
        abandon     nobody waits any more: what runs is parked with the tokens that it had before
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: Engine,
        next_task: NextTask,
        environment: RunEnvironment,
        requests: Requests,
        watchdog: Watchdog | None = None,
        workflow: WorkflowConfig | None = None,
        on_abandon: Callable[[], None] | None = None,
    ) -> None:
        self.config = lifecycle.config
        self.lifecycle, self.engine, self.next_task = lifecycle, engine, next_task
        self.watchdog = watchdog or Watchdog()
        self.on_abandon = on_abandon
        self.clock = PhaseClock()

        failure_limit = FailureLimit(lifecycle, self.watchdog.config.max_failures, self.watchdog.max_filtered_steps)
        self.asker = Asker(engine, self.watchdog.config, failure_limit)
        self.player = Player(
            lifecycle,
            self.asker,
            requests,
            environment,
            workflow or WorkflowConfig(),
            self.watchdog,
            failure_limit,
        )
        self._interrupted_for_good = False
        self._meanwhile: asyncio.Task[None] | None = None  # generates while the trainer trains
        self._woken: asyncio.Future[None] | None = None  # ends a wait when all is interrupted for good

    @property
    def has_turns(self) -> bool:
        """Whether an environment may answer the policy."""
        return self.player.requests.may_go_on

    async def collect(self, version: int) -> list[Group] | None:
        """Generate until there is enough for the step at trainer `version`; return its groups, in group-id order.

        They have left the cache as consumed. At the end of the task stream: what is left, smaller than a step, then [].
        None after `interrupt_for_good`: everything is parked or finished and stays in the cache. Scores are not waited
        for then: a restarted run asks for them again.
        With `rollout.overlap` what else is in flight goes on; else it is parked. Raises ValueError if no group gets
        enough rewards before the first step. Errors propagate: after one of the user's (ValueError) what was running is
        parked, after others (the engine has ended, say) without the tokens of this run.
        """
        await self._rejoin()
        self._begin(version)
        with self.clock.phase():
            try:
                while True:
                    await self._generate(version, until_enough=True)
                    if self._interrupted_for_good or not self.config.overlap:
                        await self._interrupt(None if self._interrupted_for_good else version)
                    if self._interrupted_for_good:
                        return None
                    # A group that was dropped while winding down may be missed: complete_by = "rollout" counted it.
                    if self._is_enough(version):
                        groups = self.lifecycle.consume(version, self.lifecycle.stream_ended)
                        self.player.release(groups)
                        return groups
            except BaseException as error:
                await self.abandon(error)
                raise
            finally:
                if not self.player.anything:
                    self.player.stop_watching()

    async def next_ready(self) -> None:
        """Wait until another group is READY."""
        self.player.arrival.clear()
        await self.player.arrival.wait()

    def go_on(self, version: int) -> None:
        """Generate for later steps while the one at trainer `version` is trained, until the next call of `collect`."""
        assert self.config.overlap and self._meanwhile is None
        self._begin(version + 1)
        self.clock.beside_training = True
        self._meanwhile = asyncio.ensure_future(self._generate(version + 1, until_enough=False))

    async def drain(self) -> None:
        """Wait for what runs to end, and start nothing: before new weights that no turn may meet half-way."""
        await self._rejoin()
        while self.player.extends and not self._interrupted_for_good:
            await self._wait_for_some()
        self.clock.idle.set("trainer")

    async def interrupt_all(self) -> None:
        """Interrupt everything and wait for it and its scores: for a snapshot, or for other work of the engine."""
        await self._rejoin()
        await self._interrupt(None)
        self.player.stop_watching()

    async def abandon(self, error: BaseException | None = None) -> None:
        """End what is in flight without its tokens. The cache stays consistent.

        After `error`, if that is the user's (ValueError) and not the engine's end, what runs is interrupted first: it
        has tokens to keep.
        """
        await self._cancel_meanwhile()
        if isinstance(error, ValueError):
            self.interrupt_for_good()
            with suppress(ValueError):
                await self._interrupt(None)
        self.player.stop_watching()
        if self.on_abandon is not None:
            self.on_abandon()
        await self.player.abandon()

    def on_new_version(self, version: int) -> list[Group]:
        """Drop what can no longer be trained in bound, now that the trainer is at `version`. Returns those groups."""
        dropped = self.lifecycle.on_new_version(version)
        self.player.release(dropped)
        return dropped

    def interrupt_for_good(self) -> None:
        """Ask for an interruption of everything, after which nothing is generated any more.

        From now on `collect` parks what runs, gives up scores that are under way, and returns None. For the event
        loop's thread and its signal handlers.
        """
        self._interrupted_for_good = True
        self.asker.interrupt()
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # Private

    def _begin(self, version: int) -> None:
        """From now on generate for the step at trainer `version`."""
        self.lifecycle.scheduler.on_begin(version, self.engine.oldest_version)
        self.player.ask_for_all()
        self.player.watch()

    async def _rejoin(self) -> None:
        """What `go_on` began is waited for again: its rollouts run on, but it starts no more. Its error is raised."""
        self.clock.idle.set(None)
        try:
            meanwhile = await self._cancel_meanwhile()
            if meanwhile is not None and not meanwhile.cancelled():
                meanwhile.result()
        except BaseException as error:
            await self.abandon(error)
            raise

    async def _cancel_meanwhile(self) -> asyncio.Task[None] | None:
        meanwhile, self._meanwhile = self._meanwhile, None
        self.clock.beside_training = False
        if meanwhile is not None:
            meanwhile.cancel()
            await asyncio.wait([meanwhile])
        return meanwhile

    def _is_enough(self, version: int) -> bool:
        return self.lifecycle.scheduler.to_consume(version, self.lifecycle.stream_ended) is not None

    async def _generate(self, version: int, *, until_enough: bool) -> None:
        """Until there is enough for the step at `version`, or nothing more may run, or all is interrupted for good."""
        while not self._interrupted_for_good:
            self.lifecycle.scheduler.on_begin(version, self.engine.oldest_version)  # what lagged may have caught up
            if not self.player.drops:
                self._admit(version)
                if until_enough and self._is_enough(version):
                    return
                for rollout in self.lifecycle.start(version):
                    self.player.start(rollout)
            with self.clock.waiting(generating=bool(self.player.extends)):  # the engine may make a step
                await asyncio.sleep(0)  # the extensions just made begin: an interruption reaches only what has begun
            if not until_enough and not (self.player.anything or self.player.env_tasks or self.player.episode_runner):
                self.clock.idle.set("trainer")
                return
            await self._wait_for_some()

    def _admit(self, version: int) -> None:
        while not self.lifecycle.stream_ended and self.lifecycle.scheduler.num_to_admit() > 0:
            if (item := self.next_task()) is None:
                self.lifecycle.stream_ended = True
                return
            group = self.lifecycle.admit(*item, version)
            if self.player.episode_runner is not None:
                self.player.episode_runner.on_admit(group)

    async def _wait_for_some(self) -> None:
        """Wait until an extension, an environment or a scoring is done, and handle all that are."""
        if self._interrupted_for_good:
            return
        player = self.player
        generating, scoring = bool(player.extends), bool(player.scorings)
        self.clock.idle.set("rewards" if self._meanwhile is not None and scoring and not generating else None)
        with self.clock.waiting(generating=generating, acting=not (generating or scoring)):
            await self._wait(player.waited_for or _refuse_to_stand_still(self.lifecycle))
        player.handle_done()

    async def _interrupt(self, version: int | None) -> None:
        """Interrupt what runs and wait for it, then for the scores of every complete group unless that is for good.

        `version`: of the step that there is enough for, and which may let some rollouts end; None: interrupt all.
        """
        some, player = None, self.player
        if version is not None:
            some = self.lifecycle.scheduler.to_interrupt(version, self.lifecycle.stream_ended)
        self.asker.interrupt(some)
        self.watchdog.on_interrupt([r.rollout_id for r in player.extends.values()], now())
        self.player.watch()
        await self._wait_for_all(player.extends, generating=True)
        while player.scorings:  # an environment may be done meanwhile, so that there is more to score
            await self._wait_for_all(player.scorings, generating=False)
        assert not player.anything

    async def _wait_for_all(self, tasks: Mapping[asyncio.Future, object], *, generating: bool) -> None:
        """All of them before any is handled, so that the order of parking is not the order of arrival."""
        with self.clock.waiting(generating=generating):
            while waiting := [task for task in tasks if not task.done()]:
                if self._interrupted_for_good and not generating:
                    self.player.give_up_scores()
                    break
                everyone = asyncio.ensure_future(asyncio.wait(waiting))
                await self._wait([everyone])
                everyone.cancel()
        self.player.handle_done()

    async def _wait(self, tasks: Sequence[asyncio.Future]) -> None:
        """Until one of them is done, the watchdog acted on a stall, or everything is interrupted for good."""
        self._woken = asyncio.get_running_loop().create_future()
        await asyncio.wait([*tasks, self._woken, *self.player.watching], return_when=asyncio.FIRST_COMPLETED)
        self.player.watch_again()


def _refuse_to_stand_still(lifecycle: Lifecycle) -> NoReturn:
    """Nothing runs, and there is not enough for a step. ValueError if the engine is too far behind for more."""
    lag, most = lifecycle.scheduler.lag, lifecycle.config.max_staleness
    assert lag > most, "nothing runs and there is not enough for a step: the scheduler's proof is broken"
    raise ValueError(
        f"rollout.max_staleness = {most}: the engine may still sample under a policy {lag} versions old, so nothing"
        " that it begins could be trained. Raise it, or mend what keeps new weights from the engine, and go on with"
        " --resume"
    )

"""The driver: the asyncio shell that executes the scheduler's decisions. One `collect` returns one step's groups.

    next_task -> admit -> engine.extend -> append -> park | act | finish -> score -> ready -> consume
                                              act -> environment.next -> append

Owns the waiting for the player's tasks (player.py). Never decides an order, never changes a rollout itself (Lifecycle
does), never trains or syncs weights. Between two `collect` calls no rollout runs: each is WAITING, PARKED, ACTING,
SCORING (siblings unfinished) or READY; the environments of ACTING ones continue. With `rollout.overlap` that holds only
after `interrupt_all`: `collect` leaves the other rollouts in flight, and `generate_ahead` generates during training.

Only environment calls have their own timeout (env_tasks.py). The watchdog may end an extension or a scoring, or remove
it from the wait; it never changes the order of rollouts that make progress.
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
from rollover.rollout.requests import Requests, RetryingEngine
from rollover.rollout.watchdog import Watchdog
from rollover.types import Group, NextTask


class Driver:
    """Runner of generation phases on one engine.

    `next_task` returns the next (task, prompt), None at the end of the stream. After every stopped generation
    `environment` returns the next turn, or scores the rollout. Without a `watchdog`, hanging calls are waited for.
    `on_abandon` is called before tasks in flight are abandoned.

    There are three ways to stop rollouts in flight; the words mean this everywhere:

        drain       nothing is started, and running rollouts end by themselves
        interrupt   running rollouts return at once with their tokens, and are parked, to be continued later
        abandon     running rollouts are cancelled, and parked with the tokens that they had before
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
        self.retrying_engine = RetryingEngine(engine, self.watchdog.config, failure_limit)
        self.player = Player(
            lifecycle,
            self.retrying_engine,
            requests,
            environment,
            workflow or WorkflowConfig(),
            self.watchdog,
            failure_limit,
        )
        self._interrupted_for_good = False
        self._background: asyncio.Task[None] | None = None  # generates while the trainer trains
        self._woken: asyncio.Future[None] | None = None  # ends a wait in `interrupt_for_good`

    @property
    def has_turns(self) -> bool:
        """Return whether an environment may answer the policy."""
        return self.player.requests.may_continue

    async def collect(self, version: int) -> list[Group] | None:
        """Generate until there is enough for the step at trainer `version`; return its groups, in group-id order.

        They have left the cache as consumed. At the end of the task stream the last step may be smaller, then []. None
        after `interrupt_for_good`: rollouts stay parked or finished in the cache, and a restarted run scores again.
        With `rollout.overlap` the other rollouts stay in flight; else they are parked. Raises ValueError if no group
        gets enough rewards before the first step. Errors propagate: after a user's error (ValueError) running rollouts
        are parked with their tokens, after others (EngineDied) without the tokens of this run.
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
                    # Repeat if a group was dropped while winding down: complete_by = "rollout" had counted it.
                    if self._is_enough(version):
                        groups = self.lifecycle.consume(version, self.lifecycle.stream_ended)
                        self.player.release(groups)
                        return groups
            except BaseException as error:
                await self.abandon(error)
                raise
            finally:
                if not self.player.busy:
                    self.player.stop_watching()

    async def next_ready(self) -> None:
        """Wait until another group is READY."""
        self.player.arrival.clear()
        await self.player.arrival.wait()

    def generate_ahead(self, version: int) -> None:
        """Generate for later steps while the one at trainer `version` is trained, until the next call of `collect`."""
        assert self.config.overlap and self._background is None
        self._begin(version + 1)
        self.clock.beside_training = True
        self._background = asyncio.ensure_future(self._generate(version + 1, until_enough=False))

    async def drain(self) -> None:
        """Wait until running rollouts end, and start none: before weights that may not change within a turn."""
        await self._rejoin()
        while self.player.extends and not self._interrupted_for_good:
            await self._wait_for_some()
        self.clock.idle.set("trainer")

    async def interrupt_all(self) -> None:
        """Interrupt all rollouts, and wait for them and their scores: for a snapshot, or other work of the engine."""
        await self._rejoin()
        await self._interrupt(None)
        self.player.stop_watching()

    async def abandon(self, error: BaseException | None = None) -> None:
        """Cancel all tasks in flight without their tokens. The cache stays consistent.

        After a user's `error` (ValueError) running rollouts are interrupted first, to keep their tokens.
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
        """Drop groups beyond the staleness bound, now that the trainer is at `version`. Returns them."""
        dropped = self.lifecycle.on_new_version(version)
        self.player.release(dropped)
        return dropped

    def interrupt_for_good(self) -> None:
        """Interrupt all rollouts, and generate nothing from now on.

        `collect` parks running rollouts, cancels scorings, and returns None. Call it in the event loop's thread or its
        signal handlers.
        """
        self._interrupted_for_good = True
        self.retrying_engine.interrupt()
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # Private

    def _begin(self, version: int) -> None:
        """Generate for the step at trainer `version` from now on."""
        self.lifecycle.scheduler.begin_step(version, self.engine.oldest_version)
        self.player.start_missing()
        self.player.watch()

    async def _rejoin(self) -> None:
        """End the background task of `generate_ahead`, and raise its error. Its rollouts stay in flight."""
        self.clock.idle.set(None)
        try:
            meanwhile = await self._cancel_meanwhile()
            if meanwhile is not None and not meanwhile.cancelled():
                meanwhile.result()
        except BaseException as error:
            await self.abandon(error)
            raise

    async def _cancel_meanwhile(self) -> asyncio.Task[None] | None:
        meanwhile, self._background = self._background, None
        self.clock.beside_training = False
        if meanwhile is not None:
            meanwhile.cancel()
            await asyncio.wait([meanwhile])
        return meanwhile

    def _is_enough(self, version: int) -> bool:
        return self.lifecycle.scheduler.to_consume(version, self.lifecycle.stream_ended) is not None

    async def _generate(self, version: int, *, until_enough: bool) -> None:
        """Generate until there is enough for the step at `version`, nothing may run, or `interrupt_for_good`."""
        while not self._interrupted_for_good:
            self.lifecycle.scheduler.begin_step(version, self.engine.oldest_version)  # the engine may lag less now
            if not self.player.is_dropping:
                self._admit(version)
                if until_enough and self._is_enough(version):
                    return
                for rollout in self.lifecycle.start(version):
                    self.player.start(rollout)
            with self.clock.waiting(generating=bool(self.player.extends)):  # the engine may make a step
                await asyncio.sleep(0)  # let the new extensions begin: an interruption reaches only those
            if not until_enough and not self.player.pending:
                self.clock.idle.set("trainer")
                return
            await self._wait_for_some()

    def _admit(self, version: int) -> None:
        while not self.lifecycle.stream_ended and self.lifecycle.scheduler.num_to_admit() > 0:
            if (item := self.next_task()) is None:
                self.lifecycle.stream_ended = True
                return
            self.player.on_admit(self.lifecycle.admit(*item, version))

    async def _wait_for_some(self) -> None:
        """Wait until an extension, an environment or a scoring is done, and handle all that are."""
        if self._interrupted_for_good:
            return
        player = self.player
        generating, scoring = bool(player.extends), bool(player.scorings)
        self.clock.idle.set("rewards" if self._background is not None and scoring and not generating else None)
        with self.clock.waiting(generating=generating, acting=not (generating or scoring)):
            await self._wait(player.pending or _raise_stuck(self.lifecycle))
        player.handle_done()

    async def _interrupt(self, version: int | None) -> None:
        """Interrupt running rollouts and wait for them, then for the scores of complete groups unless it is for good.

        `version`: the step that there is enough for; the scheduler may let some rollouts finish. None: interrupt all.
        """
        some, player = None, self.player
        if version is not None:
            some = self.lifecycle.scheduler.to_interrupt(version, self.lifecycle.stream_ended)
        self.retrying_engine.interrupt(some)
        self.watchdog.on_interrupt([r.rollout_id for r in player.extends.values()], now())
        self.player.watch()
        await self._wait_for_all(player.extends, generating=True)
        while player.scorings:  # an environment may end meanwhile, which adds a scoring
            await self._wait_for_all(player.scorings, generating=False)
        assert not player.busy

    async def _wait_for_all(self, tasks: Mapping[asyncio.Future, object], *, generating: bool) -> None:
        """Wait for all of them before any is handled, so that the order of parking is not the order of arrival."""
        with self.clock.waiting(generating=generating):
            while waiting := [task for task in tasks if not task.done()]:
                if self._interrupted_for_good and not generating:
                    self.player.cancel_scorings()
                    break
                all_done = asyncio.ensure_future(asyncio.wait(waiting))
                await self._wait([all_done])
                all_done.cancel()
        self.player.handle_done()

    async def _wait(self, tasks: Sequence[asyncio.Future]) -> None:
        """Wait until one of them is done, the watchdog acted on a stall, or `interrupt_for_good`."""
        self._woken = asyncio.get_running_loop().create_future()
        await asyncio.wait([*tasks, self._woken, *self.player.watching], return_when=asyncio.FIRST_COMPLETED)
        self.player.renew_watch()


def _raise_stuck(lifecycle: Lifecycle) -> NoReturn:
    """Raise the error for a phase in which nothing can run and there is not enough for a step."""
    lag, most = lifecycle.scheduler.lag, lifecycle.config.max_staleness
    assert lag > most, "nothing runs and there is not enough for a step: the scheduler's proof is broken"
    raise ValueError(
        f"rollout.max_staleness = {most}: the engine may still sample under a policy {lag} versions old, so nothing"
        " that it begins could be trained. Raise it, or fix what keeps new weights from the engine, and resume with"
        " --resume"
    )


class PhaseClock:
    """Cumulative seconds of the driver's phases.

    `generation_s`: waited for generation, or (`environment_s` of it) for environments alone. `scoring_s`: waited for
    scores, with nothing generating. `scheduling_s`: the rest (new tasks, decisions, bookkeeping). `idle`: the engine
    ran nothing. `beside_training`: set while the trainer trains beside generation; then only `idle` counts.
    """

    def __init__(self) -> None:
        self.generation_s = self.environment_s = self.scoring_s = self.scheduling_s = 0.0
        self.idle = IdleTime()
        self.beside_training = False

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Count the time of a block as scheduling, except what `waiting` counts within it."""
        started, waited = time.perf_counter(), self.generation_s + self.scoring_s
        try:
            yield
        finally:
            waited = self.generation_s + self.scoring_s - waited
            self.scheduling_s += time.perf_counter() - started - waited

    @contextmanager
    def waiting(self, *, generating: bool, acting: bool = False) -> Iterator[None]:
        """Count the time of a block as waiting for generation, for environments alone (`acting`), or for scores."""
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
    """Seconds, by cause, in which the engine ran nothing during training (`Driver.generate_ahead`).

    "trainer": nothing was in flight, and nothing may start before the training step or the weight sync;
    "rewards": only scorings were in flight.
    """

    def __init__(self) -> None:
        self._seconds = {"trainer": 0.0, "rewards": 0.0}
        self._cause: str | None = None
        self._since = 0.0

    @property
    def running(self) -> bool:
        """Return whether the engine is idle now. For any thread."""
        return self._cause is not None

    def set(self, cause: str | None) -> None:
        """Set the cause for which the engine is idle from now on; None: it runs. Counts the time until now."""
        now = time.perf_counter()
        if self._cause is not None:
            self._seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def seconds(self) -> dict[str, float]:
        """Return the seconds by cause, up to now."""
        self.set(self._cause)
        return dict(self._seconds)

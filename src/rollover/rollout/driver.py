"""The driver: the asyncio shell that carries out what the scheduler decides. One `collect` gives one step's groups.

    next_task -> admit -> engine.extend -> append -> park | finish -> scorer -> set_rewards -> consume

Owns the waiting: for what is in flight (in_flight.py), beside which the watchdog looks (watcher.py). Never decides an
order, never changes a rollout itself (Lifecycle does), never trains or hands over weights. Between two `collect` calls
nothing runs: every held rollout is WAITING, PARKED, SCORING (siblings still unfinished) or READY. With
`rollout.overlap` that holds after `interrupt_all` alone: `collect` leaves in flight what it does not return, and
`go_on` generates while the trainer trains.

A wait has no end of its own: the watchdog looks at times of its own, and does not change the order of what does not
stall. It may end an extension or a scoring, or take it out of the wait for good.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from rollover.engine.protocol import Engine
from rollover.envs.protocol import Environment
from rollover.rollout.asker import Asker
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.in_flight import InFlight, now
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.phase_clock import PhaseClock
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import Watchdog
from rollover.rollout.watcher import Watcher
from rollover.types import Group, NextTask


class Driver:
    """Runs generation phases on one engine.

    `next_task` returns the next (task, prompt ids), None at the end of the stream. `environment` is asked after every
    stopped generation whether the rollout goes on, and scores it when it is done. `stop_token_ids` (EOS) add to those
    of the config. Without a `watchdog` whatever hangs is
    waited for. `say` prints one of its lines. `clock` has the time that it took.
    `on_abandon` is called before what is in flight is ended without its tokens.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: Engine,
        next_task: NextTask,
        environment: Environment,
        run_seed: int,
        stop_token_ids: Iterable[int] = (),
        watchdog: Watchdog | None = None,
    ) -> None:
        config = self.config = lifecycle.config
        self.lifecycle, self.engine, self.next_task = lifecycle, engine, next_task
        self.watchdog = watchdog or Watchdog()
        self.say: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)
        self.on_abandon: Callable[[], None] = lambda: None
        self.clock = PhaseClock()

        def say(line: str) -> None:
            self.say(line)

        failure_limit = FailureLimit(lifecycle, self.watchdog.config.max_failures)
        requests = Requests(config, run_seed, stop_token_ids)
        self.asker = Asker(engine, self.watchdog.config, say, failure_limit)
        self.in_flight = InFlight(lifecycle, self.asker, requests, environment, self.watchdog, failure_limit, say)
        self.watcher = Watcher(self.in_flight, say)
        self._stop_requested = False
        self._meanwhile: asyncio.Task[None] | None = None  # generates while the trainer trains
        self._woken: asyncio.Future[None] | None = None  # ends a wait when the driver is told to stop

    async def collect(self, version: int) -> list[Group] | None:
        """Generate until there is enough for the step at trainer `version`; return its groups, in group-id order.

        They have left the cache as consumed. At the end of the task stream: what is left, smaller than a step, then [].
        None after `interrupt_for_good`: everything is parked or finished and stays in the cache. Scores are not waited
        for then: a restarted run asks for them again.
        With `rollout.overlap` what else is in flight goes on; else it is parked. Raises ValueError if no group gets
        enough rewards before the first step. Errors propagate: after one of the user's (ValueError) what was running is
        parked, after others (the engine has ended, say) without the tokens of this run.
        """
        await self._end_meanwhile()
        self._begin(version)
        with self.clock.phase():
            try:
                while True:
                    await self._generate(version, until_enough=True)
                    if self._stop_requested or not self.config.overlap:
                        await self._wind_down(None if self._stop_requested else version)
                    if self._stop_requested:
                        return None
                    # A group that was dropped while winding down may be missed: complete_by = "rollout" counted it.
                    if self._is_enough(version):
                        groups = self.lifecycle.consume(version, self.lifecycle.stream_ended)
                        self.in_flight.release(groups)
                        return groups
            except BaseException as error:
                await self._abandon(error)
                raise
            finally:
                if not self.in_flight.anything:
                    self.watcher.end()

    async def next_ready(self) -> None:
        """Wait until another group is READY."""
        self.in_flight.arrival.clear()
        await self.in_flight.arrival.wait()

    def go_on(self, version: int) -> None:
        """Generate for later steps while the one at trainer `version` is trained, until the next call of `collect`."""
        assert self.config.overlap and self._meanwhile is None
        self._begin(version + 1)
        self.clock.beside_training = True
        self._meanwhile = asyncio.ensure_future(self._generate(version + 1, until_enough=False))

    async def drain(self) -> None:
        """Wait for what runs to end, and start nothing: before new weights that no rollout may meet half-way."""
        await self._end_meanwhile()
        while self.in_flight.extends and not self._stop_requested:
            await self._wait_for_some()
        self.clock.idle.set("trainer")

    async def interrupt_all(self) -> None:
        """Interrupt everything and wait for it and its scores: for a snapshot, or for other work of the engine."""
        await self._end_meanwhile()
        await self._wind_down(None)
        self.watcher.end()

    async def abandon(self) -> None:
        """End what is in flight: its tokens are lost, the cache stays consistent."""
        await self._cancel_meanwhile()
        await self._abandon()

    def on_new_version(self, version: int) -> list[Group]:
        """Drop what can no longer be trained in bound, now that the trainer is at `version`. Returns those groups."""
        dropped = self.lifecycle.on_new_version(version)
        self.in_flight.release(dropped)
        return dropped

    def interrupt_for_good(self) -> None:
        """Interrupt everything: `collect` parks what runs, gives up scores under way, and returns None from now on.

        For the event loop's thread and its signal handlers.
        """
        self._stop_requested = True
        self.asker.interrupt()
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # Private

    def _begin(self, version: int) -> None:
        """From now on generate for the step at trainer `version`."""
        self.lifecycle.scheduler.on_begin(version, self.engine.oldest_version)
        for group_id in dict.fromkeys(r.group_id for r in self.lifecycle.cache.unscored()):
            self.in_flight.score(self.lifecycle.cache.groups[group_id])
        self.watcher.begin()

    async def _end_meanwhile(self) -> None:
        """End what `go_on` began: its rollouts run on, but nothing is started or handled. Its error is raised."""
        self.clock.idle.set(None)
        try:
            meanwhile = await self._cancel_meanwhile()
            if meanwhile is not None and not meanwhile.cancelled():
                meanwhile.result()
        except BaseException as error:
            await self._abandon(error)
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
        """Until there is enough for the step at `version`, or nothing more may run, or the driver is told to stop."""
        while not self._stop_requested:
            self.lifecycle.scheduler.on_begin(version, self.engine.oldest_version)  # what lagged may have caught up
            if not self.in_flight.drops:
                self._admit(version)
                if until_enough and self._is_enough(version):
                    return
                for rollout in self.lifecycle.start(version):
                    self.in_flight.start(rollout)
            with self.clock.waiting(generating=bool(self.in_flight.extends)):  # the engine may make a step
                await asyncio.sleep(0)  # the extensions just made begin: an interruption reaches only what has begun
            if not until_enough and not self.in_flight.anything:
                self.clock.idle.set("trainer")
                return
            await self._wait_for_some()

    def _admit(self, version: int) -> None:
        while not self.lifecycle.stream_ended and self.lifecycle.scheduler.num_to_admit() > 0:
            item = self.next_task()
            if item is None:
                self.lifecycle.stream_ended = True
                return
            self.lifecycle.admit(*item, version)

    async def _wait_for_some(self) -> None:
        """Wait until an extension or a scoring is done, and handle all that are."""
        if self._stop_requested:
            return
        flight = self.in_flight
        pending = [*flight.extends, *flight.scorings] or _refuse_to_stand_still(self.lifecycle)
        generating = bool(flight.extends)
        self.clock.idle.set("rewards" if self._meanwhile is not None and not generating else None)
        with self.clock.waiting(generating=generating):
            await self._wait(pending)
        flight.handle_done()

    async def _wind_down(self, version: int | None) -> None:
        """Interrupt what runs, wait for it, then for the scores of every complete group, but not when told to stop.

        `version`: of the step that there is enough for, and which may end some rollouts first; None: interrupt all.
        """
        some, flight = None, self.in_flight
        if version is not None:
            some = self.lifecycle.scheduler.to_interrupt(version, self.lifecycle.stream_ended)
        self.asker.interrupt(some)
        self.watchdog.on_interrupt([r.rollout_id for r in flight.extends.values()], now())
        self.watcher.begin()
        for tasks in (flight.extends, flight.scorings):
            # All of them before any is handled, so that the order of parking is not the order of arrival.
            with self.clock.waiting(generating=tasks is flight.extends):
                while waiting := [task for task in tasks if not task.done()]:
                    if self._stop_requested and tasks is flight.scorings:
                        flight.give_up_scores()
                        break
                    everyone = asyncio.ensure_future(asyncio.wait(waiting))
                    await self._wait([everyone])
                    everyone.cancel()
            flight.handle_done()
        assert not flight.anything

    async def _wait(self, tasks: Sequence[asyncio.Future]) -> None:
        """Until one of them is done, the watchdog did something about what stalls, or the driver is told to stop."""
        self._woken = asyncio.get_running_loop().create_future()
        await asyncio.wait([*tasks, self._woken, *self.watcher.tasks], return_when=asyncio.FIRST_COMPLETED)
        self.watcher.go_on()

    async def _abandon(self, error: BaseException | None = None) -> None:
        """After an error or a cancellation: end what is in flight, so that the cache is consistent."""
        if isinstance(error, ValueError):  # one of the user's, and not the engine's end: what runs has tokens to keep
            self.interrupt_for_good()
            with suppress(ValueError):
                await self._wind_down(None)
        self.watcher.end()
        self.on_abandon()
        await self.in_flight.abandon()


def _refuse_to_stand_still(lifecycle: Lifecycle) -> NoReturn:
    """Nothing runs, and there is not enough for a step. ValueError if the engine is too far behind for more."""
    lag, most = lifecycle.scheduler.lag, lifecycle.config.max_staleness
    assert lag > most, "nothing runs and there is not enough for a step: the scheduler's proof is broken"
    raise ValueError(
        f"rollout.max_staleness = {most}: the engine may still sample under a policy {lag} versions old, so nothing"
        " that it begins could be trained. Raise it, or mend what keeps new weights from the engine, and go on with"
        " --resume"
    )

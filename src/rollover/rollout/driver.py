"""The driver: the asyncio shell that carries out what the scheduler decides. One `collect` gives one step's groups.

    next_task -> admit -> engine.extend -> append -> park | finish -> scorer -> set_rewards -> consume

Owns the asyncio tasks in flight and the time spent waiting. Never decides an order, never changes a rollout itself
(Lifecycle does), never trains or publishes weights. Between two `collect` calls nothing runs: every held rollout is
WAITING, PARKED, SCORING (siblings still unfinished) or READY. With `rollout.overlap` that holds after `park` alone:
`collect` leaves in flight what it does not return, and `go_on` generates while the trainer trains.

What arrives together is handled in order of (group id, sibling), so results do not depend on the order of arrival.

A wait has no end of its own: beside it the watchdog looks, at times of its own, and does not change the order of what
does not stall. It may end an extension or a scoring, or take it out of the wait for good (`_stray`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from rollover.engine.protocol import Engine
from rollover.rollout.asker import Asker, ExtendFailed
from rollover.rollout.idle import IdleTime
from rollover.rollout.lifecycle import Lifecycle, is_complete
from rollover.rollout.patience import Patience
from rollover.rollout.requests import Requests
from rollover.rollout.strays import Strays
from rollover.rollout.watchdog import Action, Stall, Watchdog, salvaged
from rollover.types import DropReason, Group, Reward, Rollout, RolloutState, Segment, Task

NextTask = Callable[[], tuple[Task, Sequence[int]] | None]
Scorer = Callable[[list[Rollout]], Awaitable[list[Reward]]]


class _Scoring(NamedTuple):
    """Rollouts of one group that are scored together; `key`: the group's id, or that of a rollout scored alone."""

    rollouts: Sequence[Rollout]
    key: int | str


class Driver:
    """Runs generation phases on one engine.

    `next_task` returns the next (task, prompt ids), None at the end of the stream. `scorer` scores rollouts of one
    group, one Reward each, in order: all of them when the last has stopped; or, if `scores_singly` of their task, each
    as soon as it stops. `stop_token_ids` (EOS) add to those of the config. Without a `watchdog` whatever hangs is
    waited for. `say` prints one of its lines.

    Attributes, cumulative: `generation_s`, seconds in which something was generated; `scoring_s`, seconds spent waiting
    for scores alone; `scheduling_s`, the rest of `collect`: new tasks, decisions and bookkeeping. `idle_s` has
    those in which the engine waited.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: Engine,
        next_task: NextTask,
        scorer: Scorer,
        run_seed: int,
        stop_token_ids: Iterable[int] = (),
        watchdog: Watchdog | None = None,
        scores_singly: Callable[[Task], bool] = lambda task: False,
    ) -> None:
        config = lifecycle.config
        self.lifecycle, self.engine = lifecycle, engine
        self.next_task, self.scorer, self.scores_singly = next_task, scorer, scores_singly
        self.config = config
        self.requests = Requests(config, run_seed, stop_token_ids)
        self.watchdog = watchdog or Watchdog()
        self.say: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)
        self._patience = Patience(lifecycle, self.watchdog.config.max_failures)
        self.asker = Asker(engine, self.watchdog.config, lambda line: self.say(line), self._patience)
        self.generation_s = 0.0
        self.scoring_s = 0.0
        self.scheduling_s = 0.0
        self._idle = IdleTime()
        self._stop_requested = False
        self._extends: dict[asyncio.Future[list[Segment]], Rollout] = {}
        self._scorings: dict[asyncio.Future[list[Reward]], _Scoring] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._meanwhile: asyncio.Task[None] | None = None  # generates while the trainer trains
        self._salvaged: dict[asyncio.Future[list[Segment]], list[Segment]] = {}  # of extensions that were cancelled
        self._dropping: dict[int, DropReason] = {}  # groups that leave as soon as none of their rollouts runs
        self._strays = Strays()
        self._arrival = asyncio.Event()  # a group got READY
        self._woken: asyncio.Future[None] | None = None  # ends a wait when the driver is told to stop

    async def collect(self, version: int) -> list[Group] | None:
        """Generate until there is enough for the step at trainer `version`; return its groups, in group-id order.

        They have left the cache as consumed. At the end of the task stream: what is left, smaller than a step, then [].
        None after `request_stop`: everything is parked or finished and stays in the cache. Scores are not waited for
        then: a restarted run asks for them again.
        With `rollout.overlap` what else is in flight goes on; else it is parked. Raises ValueError if no group gets
        enough rewards before the first step. Errors of the engine and of the scorer propagate; what was running is
        parked without its lost tokens.
        """
        await self._halt()
        self._begin(version)
        started, waited = time.perf_counter(), self.generation_s + self.scoring_s
        try:
            while True:
                await self._generate(version, until_enough=True)
                if self._stop_requested or not self.config.overlap:
                    await self._wind_down(None if self._stop_requested else version)
                if self._stop_requested:
                    return None
                # A group that was dropped while winding down may be missed: complete_by = "rollout" counted it.
                if self._is_enough(version):
                    return self._consume(version)
        except BaseException:
            await self._abandon()
            raise
        finally:
            if not self._extends and not self._scorings:
                self._stop_watching()
            waited = self.generation_s + self.scoring_s - waited
            self.scheduling_s += time.perf_counter() - started - waited

    async def next_ready(self) -> None:
        """Wait until another group is READY."""
        self._arrival.clear()
        await self._arrival.wait()

    def go_on(self, version: int) -> None:
        """Generate for later steps while the one at trainer `version` is trained, until the next call of `collect`."""
        assert self.config.overlap and self._meanwhile is None
        self._begin(version + 1)
        self._meanwhile = asyncio.ensure_future(self._generate(version + 1, until_enough=False))

    async def drain(self) -> None:
        """Wait for what runs to end, and start nothing: before new weights that no rollout may meet half-way."""
        await self._halt()
        while self._extends and not self._stop_requested:
            await self._wait_for_some()
        self._idle.set("trainer")

    async def park(self) -> None:
        """Interrupt everything and wait for it and its scores: for a snapshot, or for other work of the engine."""
        await self._halt()
        await self._wind_down(None)
        self._stop_watching()

    async def close(self) -> None:
        """End what is in flight: its tokens are lost, the cache stays consistent."""
        await self._end_meanwhile()
        await self._abandon()

    def after_publish(self, version: int) -> list[Group]:
        """Drop what can no longer be trained in bound, now that the trainer is at `version`. Returns those groups."""
        dropped = self.lifecycle.publish(version)
        self._release(dropped)
        return dropped

    def request_stop(self) -> None:
        """Interrupt everything: `collect` parks what runs, gives up scores under way, and returns None from now on.

        For the event loop's thread and its signal handlers.
        """
        self._stop_requested = True
        self.asker.interrupt()
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def idle_s(self) -> dict[str, float]:
        """Seconds, cumulative and up to now, in which the engine ran nothing while nobody waited for it (`go_on`).

        "trainer": nothing was in flight, and nothing may start before the trainer has trained or published;
        "rewards": only scorings were in flight.
        """
        return self._idle.seconds()

    @property
    def engine_idle(self) -> bool:
        """Whether the engine runs nothing while nobody waits for it. For any thread."""
        return self._idle.running

    # Carrying out decisions

    def _begin(self, version: int) -> None:
        """From now on generate for the step at trainer `version`."""
        self.lifecycle.begin(version, self.engine.oldest_version)
        for group_id in dict.fromkeys(r.group_id for r in self.lifecycle.unscored()):
            self._score(self.lifecycle.cache.groups[group_id])
        self._watch()

    async def _halt(self) -> None:
        """End what `go_on` began: its rollouts run on, but nothing is started or handled. Its error is raised."""
        self._idle.set(None)
        try:
            meanwhile = await self._end_meanwhile()
            if meanwhile is not None and not meanwhile.cancelled():
                meanwhile.result()
        except BaseException:
            await self._abandon()
            raise

    async def _end_meanwhile(self) -> asyncio.Task[None] | None:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile.cancel()
            await asyncio.wait([meanwhile])
        return meanwhile

    def _is_enough(self, version: int) -> bool:
        return self.lifecycle.scheduler.to_consume(version, self.lifecycle.stream_ended) is not None

    async def _generate(self, version: int, *, until_enough: bool) -> None:
        """Until there is enough for the step at `version`, or nothing more may run, or the driver is told to stop."""
        while not self._stop_requested:
            self.lifecycle.begin(version, self.engine.oldest_version)  # what lagged may have caught up
            if not self._dropping:  # a parked sibling must not start again
                self._admit(version)
                if until_enough and self._is_enough(version):
                    return
                self._start(version)
            with self._waiting(generating=bool(self._extends)):  # the engine may make a step
                await asyncio.sleep(0)  # the extensions just made begin: an interruption reaches only what has begun
            if not until_enough and not self._extends and not self._scorings:
                self._idle.set("trainer")
                return
            await self._wait_for_some()

    def _admit(self, version: int) -> None:
        while not self.lifecycle.stream_ended and self.lifecycle.scheduler.num_to_admit() > 0:
            item = self.next_task()
            if item is None:
                self.lifecycle.stream_ended = True
                return
            self.lifecycle.admit(*item, version)

    def _start(self, version: int) -> None:
        for rollout in self.lifecycle.start(version):
            prompt_ids = self.lifecycle.cache.groups[rollout.group_id].prompt_ids
            request = self.requests.to_go_on(rollout, prompt_ids, self.lifecycle.scheduler.token_budget(rollout))
            self._extends[asyncio.ensure_future(self.asker.extend(request))] = rollout
            self.watchdog.on_start(rollout.rollout_id, rollout.group_id, rollout.num_tokens, _now())

    async def _wait_for_some(self) -> None:
        """Wait until an extension or a scoring is done, and handle all that are."""
        if self._stop_requested:
            return
        pending = [*self._extends, *self._scorings] or self.lifecycle.refuse_to_stand_still()
        generating = bool(self._extends)
        self._idle.set("rewards" if self._meanwhile is not None and not generating else None)
        with self._waiting(generating=generating):
            await self._wait(pending)
        self._handle_done()

    async def _wind_down(self, version: int | None) -> None:
        """Interrupt what runs, wait for it, then for the scores of every complete group, but not when told to stop.

        `version`: of the step that there is enough for, and which may end some rollouts first; None: interrupt all.
        """
        some = None
        if version is not None:
            some = self.lifecycle.scheduler.to_interrupt(version, self.lifecycle.stream_ended)
        self.asker.interrupt(some)
        self.watchdog.on_interrupt([r.rollout_id for r in self._extends.values()], _now())
        self._watch()  # anew: for the end of an interruption it looks earlier than for a stall
        for tasks in (self._extends, self._scorings):
            # All of them before any is handled, so that the order of parking is not the order of arrival.
            with self._waiting(generating=tasks is self._extends):
                while waiting := [task for task in tasks if not task.done()]:
                    if self._stop_requested and tasks is self._scorings:
                        self._give_up_scores()
                        break
                    everyone = asyncio.ensure_future(asyncio.wait(waiting))
                    await self._wait([everyone])
                    everyone.cancel()
            self._handle_done()
        assert not self._extends and not self._scorings

    def _give_up_scores(self) -> None:
        """Wait for no score that is under way. Those rollouts stay unscored, and are scored again."""
        for task, scoring in list(self._scorings.items()):
            if not task.done():
                del self._scorings[task]
                self.watchdog.on_scored(scoring.key, _now())
                self._strays.add(task)

    async def _wait(self, tasks: Sequence[asyncio.Future]) -> None:
        """Until one of them is done, the watchdog did something about what stalls, or the driver is told to stop."""
        self._woken = asyncio.get_running_loop().create_future()
        ends = [*tasks, self._woken] if self._watcher is None else [*tasks, self._woken, self._watcher]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._watcher is not None and self._watcher.done():
            if not self._watcher.cancelled():
                self._watcher.result()
            self._watch()

    def _consume(self, version: int) -> list[Group]:
        groups = self.lifecycle.consume(version, self.lifecycle.stream_ended)
        self._release(groups)
        return groups

    def _release(self, groups: list[Group]) -> None:
        for group in groups:
            rollout_ids = [r.rollout_id for r in group.rollouts]
            self.asker.release(rollout_ids)
            self.watchdog.on_leave(rollout_ids)

    # Handling what arrives

    def _handle_done(self) -> None:
        extends = [(r, t) for t, r in self._extends.items() if t.done()]
        for rollout, task in sorted(extends, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_extend(task, rollout, self._answer(task, rollout))
        scorings = [(scoring.rollouts[0], task) for task, scoring in self._scorings.items() if task.done()]
        for _, task in sorted(scorings, key=lambda item: (item[0].group_id, item[0].sibling)):
            self._end_scoring(task)
        if self._dropping:
            self._drop_what_ended()

    def _answer(self, task: asyncio.Future[list[Segment]], rollout: Rollout) -> list[Segment]:
        """What its extension returned; nothing if that failed for good: then its group is dropped."""
        salvage = self._salvaged.pop(task, None)
        if salvage is not None and task.cancelled():
            return salvage
        try:
            return task.result()
        except ExtendFailed as failure:
            if rollout.group_id not in self._dropping:
                self.say(f"{failure}: its group is dropped (failed)")
            self._drop_soon(rollout.group_id, DropReason.FAILED)
            return self.requests.nothing_for(rollout)

    def _end_extend(self, task: asyncio.Future, rollout: Rollout, segments: list[Segment]) -> None:
        del self._extends[task]
        complete = self.lifecycle.append(rollout, segments)
        self.watchdog.on_end(rollout.rollout_id, rollout.num_tokens, _now())
        if complete is not None:
            self._patience.on_complete()
            self._dropping.pop(complete.group_id, None)  # it came round at the last moment
        if rollout.state is RolloutState.SCORING:
            self._score(self.lifecycle.cache.groups[rollout.group_id])

    def _score(self, group: Group) -> None:
        """Score what has stopped of a group: one by one if that may be, else together once the group is complete."""
        under_way = {r.rollout_id for scoring in self._scorings.values() for r in scoring.rollouts}
        left = [r for r in group.rollouts if r.state is RolloutState.SCORING and r.rollout_id not in under_way]
        if self.scores_singly(group.task):
            for rollout in left:
                self._begin_scoring(_Scoring([rollout], rollout.rollout_id))
        elif left and is_complete(group):
            self._begin_scoring(_Scoring(left, group.group_id))

    def _begin_scoring(self, scoring: _Scoring) -> None:
        self._scorings[asyncio.ensure_future(self.scorer(list(scoring.rollouts)))] = scoring
        self.watchdog.on_score(scoring.rollouts[0].group_id, _now(), scoring.key)

    def _end_scoring(self, task: asyncio.Future[list[Reward]]) -> None:
        rollouts, key = self._scorings.pop(task)
        self.watchdog.on_scored(key, _now())
        group, rewards = self.lifecycle.cache.groups[rollouts[0].group_id], task.result()
        ready = self.lifecycle.set_rewards(group, rewards, rollouts)
        if ready is True:
            self._arrival.set()
            self._patience.on_ready()
        elif ready:
            self._release([group])
            self._patience.on_dropped(ready, [r.reward for r in group.rollouts if r.reward is not None])

    # What the watchdog finds

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    def _watch(self) -> None:
        """Look from now on, if there is anything to look for."""
        self._stop_watching()
        self._watcher = asyncio.ensure_future(self._look_until_it_stalls()) if self.watchdog.is_on else None

    async def _look_until_it_stalls(self) -> None:
        while True:
            await asyncio.sleep(self.watchdog.pause(_now()))
            asked = {r.rollout_id: task for task, r in self._extends.items() if not task.done()}
            seen, queued = await self.engine.progress(asked), await self.engine.queued(asked)
            running = {i: task for i, task in asked.items() if task in self._extends and not task.done()}
            scoring = {s.key: task for task, s in self._scorings.items() if not task.done()}
            progress = {i: seen.get(i, []) for i in running}
            stalls = self.watchdog.look(_now(), progress, queued, scoring)
            for stall in stalls:
                self.say(str(stall))
                if stall.is_scoring:
                    self._act_on_scoring(stall, scoring[stall.key])
                else:
                    self._act(stall.action, running[str(stall.key)], progress[str(stall.key)])
            if stalls:
                return

    def _act(self, action: Action, task: asyncio.Future, segments: list[Segment]) -> None:
        """Do something about a rollout that stalls. `segments`: what its extension is known to have."""
        rollout = self._extends[task]
        match action:
            case Action.CONTINUE:
                self.asker.interrupt([rollout.rollout_id])
            case Action.CANCEL | Action.CANCEL_DROPPED:
                known = salvaged(segments, rollout.num_tokens, self.lifecycle.cache.remaining(rollout.rollout_id))
                self._salvaged[task] = known or self.requests.nothing_for(rollout)
                task.cancel()
            case Action.DROP:
                self._drop_soon(rollout.group_id, DropReason.STALLED)
            case Action.ABANDON:
                self._end_extend(task, rollout, self._salvaged.pop(task))
                self._strays.add(task)
                self._drop_soon(rollout.group_id, DropReason.STALLED)

    def _drop_soon(self, group_id: int, reason: DropReason) -> None:
        """Interrupt the group's rollouts: it leaves once none of them runs."""
        self._dropping.setdefault(group_id, reason)
        rollout_ids = [r.rollout_id for r in self._extends.values() if r.group_id == group_id]
        self.asker.interrupt(rollout_ids)
        self.watchdog.on_interrupt(rollout_ids, _now())

    def _drop_what_ended(self) -> None:
        running = {r.group_id for r in self._extends.values()}
        for group_id in sorted(self._dropping.keys() - running):
            for task, scoring in list(self._scorings.items()):
                if scoring.rollouts[0].group_id == group_id:
                    del self._scorings[task]
                    self.watchdog.on_scored(scoring.key, _now())
                    self._strays.add(task)
            self._release([self.lifecycle.drop(group_id, self._dropping.pop(group_id))])
            self._patience.on_given_up()

    def _act_on_scoring(self, stall: Stall, task: asyncio.Future) -> None:
        scoring = self._scorings.pop(task)
        self._strays.add(task)
        if stall.action is Action.RESCORE:
            self._begin_scoring(scoring)
            return
        given_up: asyncio.Future[list[Reward]] = asyncio.get_running_loop().create_future()
        given_up.set_result([Reward(None, error=f"stalled: {stall.what}")] * len(scoring.rollouts))
        self._scorings[given_up] = scoring

    async def _abandon(self) -> None:
        """After an error or a cancellation: end what is in flight, so that the cache is consistent."""
        self._stop_watching()
        tasks = [*self._extends, *self._scorings]
        for left in (self._extends, self._scorings, self._salvaged, self._dropping, self.watchdog):
            left.clear()
        for task in tasks:
            self._strays.add(task)
        if tasks:
            await asyncio.wait(tasks, timeout=self.watchdog.config.grace_s if self.watchdog.is_on else None)
        for rollout in self.lifecycle.running():
            self.lifecycle.park(rollout)

    @contextmanager
    def _waiting(self, *, generating: bool) -> Iterator[None]:
        """Counts the time of a block as generation, or as scoring."""
        started = time.perf_counter()
        yield
        if self._meanwhile is not None:
            return  # nobody waited
        seconds = time.perf_counter() - started
        if generating:
            self.generation_s += seconds
        else:
            self.scoring_s += seconds


def _now() -> float:
    """The watchdog's clock."""
    return asyncio.get_running_loop().time()

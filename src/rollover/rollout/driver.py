"""The driver: the asyncio shell that carries out what the scheduler decides. One `collect` is one generation phase.

    next_task -> cache.admit -> engine.extend -> cache.append -> park | finish -> scorer -> cache.set_reward -> consume

Owns the asyncio tasks in flight and the time spent waiting. Never decides an order, never changes a rollout itself
(RolloutCache does), never trains or publishes weights. Between two `collect` calls nothing runs: every held rollout is
WAITING, PARKED, SCORING (siblings still unfinished) or READY.

What arrives together is handled in order of (group id, sibling), so results do not depend on the order of arrival.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from rollover.config.rollout import RolloutConfig
from rollover.engine.protocol import Engine, ExtendRequest
from rollover.rollout.cache import RolloutCache
from rollover.rollout.ledger import Ledger
from rollover.rollout.scheduler import Scheduler
from rollover.types import (
    DropReason,
    Group,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
    rollout_seed,
)


class EventKind(enum.Enum):
    ADMIT = "admit"
    START = "start"
    RESUME = "resume"
    PARK = "park"
    FINISH = "finish"
    READY = "ready"
    CONSUME = "consume"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that just happened: `rollout` for START, RESUME, PARK, FINISH; `reason` for DROP."""

    kind: EventKind
    group: Group
    rollout: Rollout | None = None
    reason: DropReason | None = None


# Later failures are data, but so many groups in a row that a reward service must be down.
_MAX_FAILED_STEPS = 4

NextTask = Callable[[], tuple[Task, Sequence[int]] | None]
Scorer = Callable[[list[Rollout]], Awaitable[list[Reward]]]


class Driver:
    """Runs generation phases on one engine.

    `next_task` returns the next (task, prompt ids), None at the end of the stream. `scorer` scores the rollouts of one
    whole group, one Reward each, in order. A group with fewer than `min_valid_rewards` valid ones is dropped.
    `stop_token_ids` (EOS) add to those of the config. `on_event` is called after each event, in the event loop.

    Attributes, cumulative: `generation_s`, seconds in which something was generated; `scoring_s`, seconds spent waiting
    for scores alone; `scheduling_s`, the rest of `collect`: new tasks, decisions and bookkeeping.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: RolloutCache,
        ledger: Ledger,
        engine: Engine,
        next_task: NextTask,
        scorer: Scorer,
        config: RolloutConfig,
        run_seed: int,
        stop_token_ids: Iterable[int] = (),
        min_valid_rewards: int = 2,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.scheduler, self.cache, self.ledger, self.engine = scheduler, cache, ledger, engine
        self.next_task, self.scorer, self.on_event = next_task, scorer, on_event
        self.config = config
        self.run_seed = run_seed
        self.min_valid_rewards = min_valid_rewards
        self.generation_s = 0.0
        self.scoring_s = 0.0
        self.scheduling_s = 0.0
        self.stream_ended = False
        self._sampling = SamplingParams(config.temperature, config.top_p, config.top_k, config.min_p)
        self._stop_token_ids = frozenset(stop_token_ids) | frozenset(config.stop_token_ids)
        self._stop_strings = tuple(config.stop)
        self._stop_requested = False
        self._failed_in_a_row = 0
        self._extends: dict[asyncio.Task[list[Segment]], Rollout] = {}
        self._scorings: dict[asyncio.Task[list[Reward]], Group] = {}

    async def collect(self, version: int) -> list[Group] | None:
        """Generate until there is enough for the step at trainer `version`; return its groups, in group-id order.

        They have left the cache as consumed. At the end of the task stream: what is left, smaller than a step, then [].
        None after `request_stop`: everything is parked or finished and stays in the cache.
        Raises ValueError if no group gets enough rewards before the first step. Errors of the engine and of the scorer
        propagate; what was running is parked without its lost tokens.
        """
        assert not self._extends and not self._scorings, "collect is already running"
        started, waited = time.perf_counter(), self.generation_s + self.scoring_s
        try:
            for group in self.cache.groups.values():
                self._score_if_complete(group)  # complete groups that a snapshot or an error left unscored
            while not self._stop_requested:
                self._admit(version)
                if self._to_consume(version) is not None:
                    break
                self._start(version)
                await self._wait_for_some()
            await self._wind_down(version)
            return None if self._stop_requested else self._consume(version)
        finally:
            await self._abandon()
            waited = self.generation_s + self.scoring_s - waited
            self.scheduling_s += time.perf_counter() - started - waited

    def check_restored(self, version: int, max_tokens: int) -> None:
        """After a restart: ValueError where this config cannot go on with the rollouts that a snapshot brought back.

        `max_tokens`: the longest rollout, prompt included, that the engine takes.
        """
        self.scheduler.check_held(self.cache.groups, version)
        limit = self.config.max_new_tokens
        for rollout in (r for g in self.cache.groups.values() for r in g.rollouts):
            unfinished = rollout.state in (RolloutState.WAITING, RolloutState.PARKED)
            if unfinished and (rollout.num_tokens >= limit or len(rollout.prompt_ids) + limit > max_tokens):
                raise ValueError(
                    f"--resume with rollout.max_new_tokens = {limit}: the unfinished rollout {rollout.rollout_id}"
                    f" has a prompt of {len(rollout.prompt_ids)} and {rollout.num_tokens} tokens so far, and the engine"
                    f" takes {max_tokens} in all. Set it (and engine.kv_memory_gb) back to what the run had"
                )
            for segment in rollout.segments:
                was = segment.sampling.temperature
                if segment.trainable and was != self._sampling.temperature:
                    raise ValueError(
                        f"--resume with rollout.temperature = {self._sampling.temperature:g}: rollout"
                        f" {rollout.rollout_id} was begun at {was:g}, and a rollout has one temperature."
                        f" Set rollout.temperature = {was:g}"
                    )

    def after_publish(self, version: int) -> list[Group]:
        """Drop what can no longer be trained in bound, now that the trainer is at `version`. Returns those groups."""
        stale = self.scheduler.to_drop(self.cache.groups, version)
        return [self._drop(group_id, DropReason.STALE) for group_id in stale]

    def request_stop(self) -> None:
        """Interrupt everything: `collect` parks what runs, waits for scores under way, and returns None from now on.

        For the event loop's thread and its signal handlers.
        """
        self._stop_requested = True
        self.engine.interrupt()

    # Carrying out decisions

    def _admit(self, version: int) -> None:
        while not self.stream_ended and self.scheduler.num_to_admit(self.cache.groups) > 0:
            item = self.next_task()
            if item is None:
                self.stream_ended = True
                return
            task, prompt_ids = item
            group = self.cache.admit(task, prompt_ids, self.config.group_size)
            self.scheduler.on_admit(group, version)
            self.ledger.on_admit(group)
            self._emit(EventKind.ADMIT, group)

    def _start(self, version: int) -> None:
        for rollout_id in self.scheduler.to_start(self.cache.groups, version):
            rollout = self.cache.rollout(rollout_id)
            resumed = rollout.state is RolloutState.PARKED
            self.cache.start(rollout_id)
            if resumed:
                self.ledger.on_resume()
            self._emit(EventKind.RESUME if resumed else EventKind.START, self._group_of(rollout), rollout)
            request = ExtendRequest(
                rollout_id=rollout_id,
                prompt_ids=rollout.prompt_ids,
                generated_ids=tuple(rollout.token_ids()),
                max_new_tokens=self.cache.remaining(rollout_id),
                seed=rollout_seed(self.run_seed, rollout.task.task_id, rollout.task.attempt, rollout.sibling),
                sampling=self._sampling,
                stop_token_ids=self._stop_token_ids,
                stop_strings=self._stop_strings,
            )
            self._extends[asyncio.ensure_future(self.engine.extend(request))] = rollout

    async def _wait_for_some(self) -> None:
        """Wait until an extension or a scoring is done, and handle all that are."""
        await asyncio.sleep(0)  # the extensions just made begin here: an interruption reaches only what has begun
        if self._stop_requested:
            return
        pending = [*self._extends, *self._scorings]
        assert pending, "nothing runs and there is not enough for a step: the scheduler's proof is broken"
        started, generating = time.perf_counter(), bool(self._extends)
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        self._count_time(started, generating)
        self._handle_done()

    async def _wind_down(self, version: int) -> None:
        """Interrupt what runs, wait for it, then for the scores of every complete group."""
        if self._stop_requested:
            self.engine.interrupt()
        else:
            self.engine.interrupt(self.scheduler.to_interrupt(self.cache.groups, version, self.stream_ended))
        for tasks in (self._extends, self._scorings):
            # All of them before any is handled, so that the order of parking is not the order of arrival.
            if tasks:
                started, generating = time.perf_counter(), tasks is self._extends
                await asyncio.wait(list(tasks))
                self._count_time(started, generating)
                self._handle_done()
        assert not self._extends and not self._scorings

    def _consume(self, version: int) -> list[Group]:
        # Asked again: groups that became ready while the others wound down may be older.
        group_ids = self._to_consume(version)
        assert group_ids is not None, "enough before winding down, but not after"
        groups = [self.cache.consume(group_id) for group_id in sorted(group_ids)]
        for group in groups:
            self.ledger.on_consume(group)
            self._leave(group)
            self._emit(EventKind.CONSUME, group)
        return groups

    def _drop(self, group_id: int, reason: DropReason) -> Group:
        group = self.cache.drop(group_id, reason)
        self.ledger.on_drop(group, reason)
        self._leave(group)
        self._emit(EventKind.DROP, group, reason=reason)
        return group

    def _leave(self, group: Group) -> None:
        self.scheduler.on_leave(group)
        self.engine.release([r.rollout_id for r in group.rollouts])

    def _to_consume(self, version: int) -> list[int] | None:
        return self.scheduler.to_consume(self.cache.groups, version, self.stream_ended)

    # Handling what arrives

    def _handle_done(self) -> None:
        extends = [(r, t) for t, r in self._extends.items() if t.done()]
        for rollout, task in sorted(extends, key=lambda item: (item[0].group_id, item[0].sibling)):
            segments = task.result()
            del self._extends[task]
            self._on_segments(rollout, segments)
        scorings = [(g, t) for t, g in self._scorings.items() if t.done()]
        for group, task in sorted(scorings, key=lambda item: item[0].group_id):
            rewards = task.result()
            del self._scorings[task]
            self._on_rewards(group, rewards)

    def _on_segments(self, rollout: Rollout, segments: list[Segment]) -> None:
        assert segments, f"extend of {rollout.rollout_id} returned no segment"
        self.cache.append(rollout.rollout_id, segments)
        self.ledger.on_append(segments)
        stop_reason = segments[-1].stop_reason
        if stop_reason is StopReason.PAUSED:
            self._park(rollout)
            return
        self.cache.finish(rollout.rollout_id, stop_reason)
        group = self._group_of(rollout)
        self._emit(EventKind.FINISH, group, rollout)
        self._score_if_complete(group)

    def _score_if_complete(self, group: Group) -> None:
        if all(r.state is RolloutState.SCORING for r in group.rollouts):
            self._scorings[asyncio.ensure_future(self.scorer(list(group.rollouts)))] = group

    def _on_rewards(self, group: Group, rewards: list[Reward]) -> None:
        assert len(rewards) == len(group.rollouts), f"{len(rewards)} rewards for {len(group.rollouts)} rollouts"
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            self.cache.set_reward(rollout.rollout_id, reward)
        if sum(not reward.missing for reward in rewards) >= self.min_valid_rewards:
            self._failed_in_a_row = 0
            self._emit(EventKind.READY, group)
            return
        self._drop(group.group_id, DropReason.TOO_FEW_REWARDS)
        self._failed_in_a_row += 1
        self._refuse_hopeless_rewards(rewards)

    def _refuse_hopeless_rewards(self, rewards: list[Reward]) -> None:
        """A reward function that never works, or works no more, would be retried for ever: end the run instead."""
        num_failed = self._failed_in_a_row
        started = self.ledger.trained.groups > 0 or any(g.ready for g in self.cache.groups.values())
        if num_failed < self.config.groups_per_step * (_MAX_FAILED_STEPS if started else 1):
            return
        error = next((r.error for r in rewards if r.missing), None)
        raise ValueError(
            f"rewards: none of {'the last' if started else 'the first'} {num_failed} groups got rewards.min_valid ="
            f" {self.min_valid_rewards} valid rewards of {self.config.group_size}; the last error is: {error}."
            " Fix the reward function" + (", and go on with --resume" if started else "")
        )

    def _park(self, rollout: Rollout) -> None:
        self.cache.park(rollout.rollout_id)
        self.scheduler.on_park(rollout)
        self._emit(EventKind.PARK, self._group_of(rollout), rollout)

    async def _abandon(self) -> None:
        """After an error or a cancellation: end what is in flight, so that the cache is consistent. Else nothing."""
        tasks = [*self._extends, *self._scorings]
        self._extends.clear()
        self._scorings.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for rollout in self._running():
            self._park(rollout)

    def _running(self) -> list[Rollout]:
        return [r for g in self.cache.groups.values() for r in g.rollouts if r.state is RolloutState.RUNNING]

    def _group_of(self, rollout: Rollout) -> Group:
        return self.cache.groups[rollout.group_id]

    def _count_time(self, started: float, generating: bool) -> None:
        seconds = time.perf_counter() - started
        if generating:
            self.generation_s += seconds
        else:
            self.scoring_s += seconds

    def _emit(
        self, kind: EventKind, group: Group, rollout: Rollout | None = None, reason: DropReason | None = None
    ) -> None:
        if self.on_event is not None:
            self.on_event(Event(kind, group, rollout, reason))

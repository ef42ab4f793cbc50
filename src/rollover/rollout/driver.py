"""The driver: the asyncio shell that carries out what the scheduler decides. One `collect` is one generation phase.

    next_task -> admit -> engine.extend -> append -> park | finish -> scorer -> set_rewards -> consume

Owns the asyncio tasks in flight and the time spent waiting. Never decides an order, never changes a rollout itself
(Lifecycle does), never trains or publishes weights. Between two `collect` calls nothing runs: every held rollout is
WAITING, PARKED, SCORING (siblings still unfinished) or READY.

What arrives together is handled in order of (group id, sibling), so results do not depend on the order of arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from rollover.engine.protocol import Engine, ExtendRequest
from rollover.rollout.lifecycle import Lifecycle
from rollover.types import (
    Group,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    Task,
    rollout_seed,
)

# Later failures are data, but so many groups in a row that a reward service must be down.
_MAX_FAILED_STEPS = 4

NextTask = Callable[[], tuple[Task, Sequence[int]] | None]
Scorer = Callable[[list[Rollout]], Awaitable[list[Reward]]]


class Driver:
    """Runs generation phases on one engine.

    `next_task` returns the next (task, prompt ids), None at the end of the stream. `scorer` scores the rollouts of one
    whole group, one Reward each, in order. `stop_token_ids` (EOS) add to those of the config.

    Attributes, cumulative: `generation_s`, seconds in which something was generated; `scoring_s`, seconds spent waiting
    for scores alone; `scheduling_s`, the rest of `collect`: new tasks, decisions and bookkeeping.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: Engine,
        next_task: NextTask,
        scorer: Scorer,
        run_seed: int,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        config = lifecycle.config
        self.lifecycle, self.engine = lifecycle, engine
        self.next_task, self.scorer = next_task, scorer
        self.config = config
        self.run_seed = run_seed
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
            for group in self.lifecycle.unscored():
                self._score(group)
            while not self._stop_requested:
                self._admit(version)
                if self.lifecycle.scheduler.to_consume(version, self.stream_ended) is not None:
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
        self.lifecycle.scheduler.check_held(version)
        limit = self.config.max_new_tokens
        for rollout in (r for g in self.lifecycle.cache.groups.values() for r in g.rollouts):
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
        dropped = self.lifecycle.publish(version)
        self._release(dropped)
        return dropped

    def request_stop(self) -> None:
        """Interrupt everything: `collect` parks what runs, waits for scores under way, and returns None from now on.

        For the event loop's thread and its signal handlers.
        """
        self._stop_requested = True
        self.engine.interrupt()

    # Carrying out decisions

    def _admit(self, version: int) -> None:
        while not self.stream_ended and self.lifecycle.scheduler.num_to_admit() > 0:
            item = self.next_task()
            if item is None:
                self.stream_ended = True
                return
            self.lifecycle.admit(*item, version)

    def _start(self, version: int) -> None:
        for rollout in self.lifecycle.start(version):
            request = ExtendRequest(
                rollout_id=rollout.rollout_id,
                prompt_ids=rollout.prompt_ids,
                generated_ids=tuple(rollout.token_ids()),
                max_new_tokens=self.lifecycle.cache.remaining(rollout.rollout_id),
                seed=rollout_seed(self.run_seed, rollout.task.task_id, rollout.task.attempt, rollout.sibling),
                sampling=self._sampling,
                stop_token_ids=self._stop_token_ids,
                stop_strings=self._stop_strings,
                pause_after=self.lifecycle.scheduler.token_budget(rollout),
                stop_repetition_tokens=self.config.stop_repetition_tokens,
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
            self.engine.interrupt(self.lifecycle.scheduler.to_interrupt(version, self.stream_ended))
        for tasks in (self._extends, self._scorings):
            # All of them before any is handled, so that the order of parking is not the order of arrival.
            if tasks:
                started, generating = time.perf_counter(), tasks is self._extends
                await asyncio.wait(list(tasks))
                self._count_time(started, generating)
                self._handle_done()
        assert not self._extends and not self._scorings

    def _consume(self, version: int) -> list[Group]:
        groups = self.lifecycle.consume(version, self.stream_ended)
        self._release(groups)
        return groups

    def _release(self, groups: list[Group]) -> None:
        for group in groups:
            self.engine.release([r.rollout_id for r in group.rollouts])

    # Handling what arrives

    def _handle_done(self) -> None:
        extends = [(r, t) for t, r in self._extends.items() if t.done()]
        for rollout, task in sorted(extends, key=lambda item: (item[0].group_id, item[0].sibling)):
            segments = task.result()
            del self._extends[task]
            complete = self.lifecycle.append(rollout, segments)
            if complete is not None:
                self._score(complete)
        scorings = [(g, t) for t, g in self._scorings.items() if t.done()]
        for group, task in sorted(scorings, key=lambda item: item[0].group_id):
            rewards = task.result()
            del self._scorings[task]
            if self.lifecycle.set_rewards(group, rewards):
                self._failed_in_a_row = 0
            else:
                self._release([group])
                self._failed_in_a_row += 1
                self._refuse_hopeless_rewards(rewards)

    def _score(self, group: Group) -> None:
        self._scorings[asyncio.ensure_future(self.scorer(list(group.rollouts)))] = group

    def _refuse_hopeless_rewards(self, rewards: list[Reward]) -> None:
        """A reward function that never works, or works no more, would be retried for ever: end the run instead."""
        num_failed = self._failed_in_a_row
        held = self.lifecycle.cache.groups.values()
        started = self.lifecycle.ledger.trained.groups > 0 or any(g.ready for g in held)
        if num_failed < self.config.groups_per_step * (_MAX_FAILED_STEPS if started else 1):
            return
        error = next((r.error for r in rewards if r.missing), None)
        min_valid = self.lifecycle.min_valid_rewards
        raise ValueError(
            f"rewards: none of {'the last' if started else 'the first'} {num_failed} groups got rewards.min_valid ="
            f" {min_valid} valid rewards of {self.config.group_size}; the last error is: {error}."
            " Fix the reward function" + (", and go on with --resume" if started else "")
        )

    async def _abandon(self) -> None:
        """After an error or a cancellation: end what is in flight, so that the cache is consistent. Else nothing."""
        tasks = [*self._extends, *self._scorings]
        self._extends.clear()
        self._scorings.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for rollout in self.lifecycle.running():
            self.lifecycle.park(rollout)

    def _count_time(self, started: float, generating: bool) -> None:
        seconds = time.perf_counter() - started
        if generating:
            self.generation_s += seconds
        else:
            self.scoring_s += seconds

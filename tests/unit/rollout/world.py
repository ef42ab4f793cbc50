"""The pure rollout core under a random driver: what the tests of conservation, staleness and append-only share.

`World` does what the real driver does, without an event loop, and lets a random generator decide everything that the
outside world decides: who finishes, when, how long answers are, which rewards fail, when the process is restarted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollover.config.rollout import RolloutConfig
from rollover.rollout.cache import RolloutCache
from rollover.rollout.ledger import Ledger
from rollover.rollout.lifecycle import Lifecycle, is_complete
from rollover.staleness import group_staleness
from rollover.types import (
    DropReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

MIN_VALID = 1


def make_task(i: int) -> Task:
    return Task(task_id=f"t{i}", source="s", reward="r", prompt=f"problem {i}", columns={"answer": i})


def make_segment(
    num_tokens: int, version: int, stop: StopReason = StopReason.PAUSED, first: int = 0, trainable: bool = True
) -> Segment:
    ids = np.arange(first, first + num_tokens, dtype=np.int32)
    logprobs = (-(ids + 1) / 16 - version).astype(np.float32) if trainable else np.zeros(num_tokens, np.float32)
    return Segment(ids, logprobs, version, SamplingParams(), stop, trainable)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def same_rollout(a: Rollout, b: Rollout) -> bool:
    return (
        (a.rollout_id, a.task, a.state, a.stop_reason, a.reward)
        == (b.rollout_id, b.task, b.state, b.stop_reason, b.reward)
        and len(a.segments) == len(b.segments)
        and all(map(same_segment, a.segments, b.segments))
    )


def same_segment(a: Segment, b: Segment) -> bool:
    return (
        a.token_ids.dtype == b.token_ids.dtype
        and a.logprobs.dtype == b.logprobs.dtype
        and np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and (a.policy_version, a.sampling, a.stop_reason, a.trainable)
        == (b.policy_version, b.sampling, b.stop_reason, b.trainable)
    )


class World:
    """One run. `num_tasks` None: an endless stream. `adversary` decides who makes progress first: "random", "newest"
    (the oldest groups finish last), or "stubborn" (some rollouts never stop before their whole budget is used).
    `min_pause_tokens`: an interrupted rollout got at least so many tokens. `filter_rate`: share of the groups that are
    dropped by one of two filters; which ones is known from their ids. `publish_every`: steps between two new weights.
    """

    def __init__(
        self,
        config: RolloutConfig,
        rng: random.Random,
        adversary: str = "random",
        max_running: int | None = None,
        failure_rate: float = 0.0,
        restart_rate: float = 0.0,
        num_tasks: int | None = None,
        min_pause_tokens: int = 0,
        filter_rate: float = 0.0,
        publish_every: int = 1,
    ) -> None:
        self.config, self.rng, self.adversary, self.max_running = config, rng, adversary, max_running
        self.failure_rate, self.restart_rate, self.num_tasks = failure_rate, restart_rate, num_tasks
        self.min_pause_tokens = min_pause_tokens
        self.filter_rate, self.publish_every = filter_rate, publish_every
        self.lifecycle = Lifecycle(config, max_running, MIN_VALID, group_filter=self._filter)
        self.singly = rng.random() < 0.5  # whether a rollout is scored when it stops, or with its group
        self.slow_scores = rng.random() < 0.3  # whether rewards come some time after they were asked for
        self.awaited: list[Sequence[Rollout]] = []
        self.turns = rng.random() < 0.5  # whether an environment answers, some time after a turn has ended
        self.written = 0  # tokens of the environment
        self.reserves = rng.random() < 0.3  # whether some groups are reserved for a step before it has enough
        self.reserved: set[int] = set()
        self.version = self.engine_version = 0
        self.next_task = 0
        self.stream_ended = False
        self.lengths: dict[str, int] = {}
        self.admitted_version: dict[int, int] = {}
        self.left: dict[int, str] = {}  # group id -> how it left
        self.seen: dict[str, list[tuple[int, float, int]]] = {}  # every token ever appended
        self.generated = 0

    @property
    def cache(self) -> RolloutCache:
        return self.lifecycle.cache

    @property
    def ledger(self) -> Ledger:
        return self.lifecycle.ledger

    def step(self) -> list[Group]:
        """One generation phase, the step, the publication. Returns the consumed groups."""
        while True:
            self._generate()
            self._wind_down()
            # A group that was dropped while winding down may be missed: complete_by = "rollout" counted it.
            if not self._is_enough():
                continue
            consumed = self.lifecycle.consume(self.version, self.stream_ended)
            if self.rng.random() >= self.restart_rate:
                break
            self._give_back(consumed)
        assert self.reserved <= {group.group_id for group in consumed}
        self.reserved = set()
        for group in consumed:
            assert {r.state for r in group.rollouts} == {RolloutState.CONSUMED}
            self._check_staleness(group)
            self._left(group, "consumed")
        self.check()
        self.trained()
        if self.rng.random() < self.restart_rate:
            self.restart()
        self.version += 1
        if self.version % self.publish_every == 0:
            self.engine_version = self.version
        for group in self.lifecycle.on_new_version(self.version):
            self._dropped(group, DropReason.STALE)
        self.check()
        return consumed

    def trained(self) -> None:
        """The step at `version` was trained."""

    def _give_back(self, consumed: list[Group]) -> None:
        """The training of the step fails: its groups are held again, for this process or the next."""
        self.lifecycle.give_back(consumed, self.version)
        self.reserved = set()
        self.check()
        if self.rng.random() < 0.5:
            self.restart()

    def _is_enough(self) -> bool:
        return self.lifecycle.scheduler.to_consume(self.version, self.stream_ended) is not None

    def _generate(self) -> None:
        while True:
            self.lifecycle.scheduler.begin_step(self.version, self.engine_version)
            self._admit()
            if self.reserves and self.rng.random() < 0.3:
                taken = set(self.lifecycle.scheduler.reserve(self.version, self.rng.randint(1, 3)))
                assert all(self.cache.groups[i].ready for i in taken) and not taken & self.reserved
                self.reserved |= taken
            if self._is_enough():
                return
            self.lifecycle.start(self.version)
            self._random_event()
            self.check()
            if self.rng.random() < self.restart_rate:
                self.restart()

    def _check_staleness(self, group: Group) -> None:
        bound = self.config.staleness_bound(self.publish_every)
        assert bound <= self.config.max_staleness
        stale = group_staleness(group, self.version)
        if self.config.on_stale != "mask":
            assert stale is not None and 0 <= stale <= bound
            return
        oldest = self.config.oldest_in_loss(self.version)
        versions = [s.policy_version for r in group.rollouts for s in r.segments if s.policy_version >= oldest]
        assert versions, "a group without a token in the loss was trained"
        assert all(0 <= self.version - v <= bound for v in versions)

    def check(self) -> None:
        """Conservation, and that no token that was ever appended has changed."""
        self.ledger.check(self.cache)
        assert self.ledger.generated_tokens == self.generated
        assert sorted([*self.left, *self.cache.groups]) == list(range(self.cache.num_admitted))
        assert len(self.cache.groups) <= self.config.most_held
        running = 0
        for group in self.cache.groups.values():
            assert len(group.rollouts) == self.config.group_size
            for rollout in group.rollouts:
                running += rollout.state is RolloutState.RUNNING
                assert rollout.num_tokens <= self.config.max_new_tokens
                assert self._tokens(rollout) == self.seen.get(rollout.rollout_id, [])
        assert self.max_running is None or running <= self.max_running

    def restart(self) -> None:
        """The process is killed and restarted from a snapshot of this moment."""
        state, arrays = self.lifecycle.state_dict()
        self.lifecycle = Lifecycle(self.config, self.max_running, MIN_VALID, group_filter=self._filter)
        self.lifecycle.load_state_dict(through_json(state), {name: array.copy() for name, array in arrays.items()})
        self.engine_version = self.version  # a restarted run hands the weights over at once
        self.lifecycle.scheduler.begin_step(self.version, self.engine_version)
        self.check()
        self.reserved, self.awaited = set(), []
        for rollout in self.lifecycle.cache.unscored():
            if self.singly or is_complete(self.cache.groups[rollout.group_id]):
                self._score([rollout])

    def _admit(self) -> None:
        for _ in range(self.lifecycle.scheduler.num_to_admit()):
            if self.next_task == self.num_tasks:
                self.stream_ended = True
                return
            group = self.lifecycle.admit(make_task(self.next_task), Prompt((1, 2, 3)), self.version)
            self.next_task += 1
            self.admitted_version[group.group_id] = self.version
            for rollout in group.rollouts:
                self.lengths[rollout.rollout_id] = self._length()

    def _length(self) -> int:
        most = self.config.max_new_tokens
        if self.adversary == "stubborn" and self.rng.random() < 0.3:
            return most + 1
        return self.rng.randint(1, most + 1)

    def _random_event(self) -> None:
        """A running rollout stops, or is paused with some tokens (its token budget, where there is one)."""
        running = self.lifecycle.cache.running()
        acting = self.cache.acting()
        assert running or self.awaited or acting, "nothing runs and there is not enough for a step"
        if acting and (not (running or self.awaited) or self.rng.random() < 0.2):
            self._answer(self.rng.choice(acting))
            return
        if self.awaited and (not running or self.rng.random() < 0.2):
            self._give_rewards(self.awaited.pop(self.rng.randrange(len(self.awaited))))
            return
        if self.adversary == "newest":
            rollout = running[-1]
        elif self.adversary == "stubborn":
            rollout = min(running, key=lambda r: self.lengths[r.rollout_id])
        else:
            rollout = self.rng.choice(running)
        if self.config.interrupt == "token_budget":
            self._extend(rollout, self.config.pause_after(rollout) or None)
        else:
            self._extend(rollout, None if self.rng.random() < 0.8 else self.rng.randint(self.min_pause_tokens, 3))

    def _extend(self, rollout: Rollout, num_tokens: int | None) -> None:
        """Give it `num_tokens` (None: all that are missing), then finish or park it."""
        name = rollout.rollout_id
        stop_at = min(self.lengths[name], self.config.max_new_tokens)
        missing = stop_at - rollout.num_tokens
        num_new = missing if num_tokens is None else min(num_tokens, missing)
        reason = StopReason.PAUSED
        if num_new == missing:
            reason = StopReason.EOS if self.lengths[name] <= self.config.max_new_tokens else StopReason.LENGTH
        segment = make_segment(num_new, self.engine_version, reason, first=rollout.num_tokens)
        self.generated += num_new
        self.seen.setdefault(name, []).extend(
            (int(t), float(p), self.engine_version) for t, p in zip(segment.token_ids, segment.logprobs, strict=True)
        )
        acts = self.turns and 0 < rollout.num_tokens + num_new < self.config.max_new_tokens and self.rng.random() < 0.7
        self._go_on(rollout, self.lifecycle.append(rollout, [segment], acts=acts))

    def _answer(self, rollout: Rollout) -> None:
        """The environment of an acting rollout lets it go on, ends it, or takes too long."""
        room, segments = self.config.max_new_tokens - rollout.num_tokens, []
        reason = self.rng.choice([StopReason.PAUSED, StopReason.PAUSED, StopReason.ENV_DONE, StopReason.TIMEOUT, None])
        if reason is StopReason.PAUSED and room < 2:
            reason = StopReason.LENGTH
        if reason is not None:
            num_new = self.rng.randint(1, min(room - 1, 3)) if reason is StopReason.PAUSED else 0
            num_new = min(room, self.rng.randint(0, 2)) if reason is StopReason.ENV_DONE else num_new
            version = rollout.segments[-1].policy_version
            segments = [make_segment(num_new, version, reason, first=rollout.num_tokens, trainable=False)]
            self.written += num_new
            self.seen[rollout.rollout_id] += [(int(t), 0.0, version) for t in segments[0].token_ids]
        if reason is StopReason.PAUSED:
            longest = self.config.max_new_tokens + 1
            self.lengths[rollout.rollout_id] = self.rng.randint(rollout.num_tokens + num_new + 1, longest)
        self._go_on(rollout, self.lifecycle.append(rollout, segments))

    def _go_on(self, rollout: Rollout, complete: Group | None) -> None:
        if self.singly and rollout.state is RolloutState.SCORING:
            self._score([rollout])
        elif complete is not None:
            self._score(complete.rollouts)

    def _wind_down(self) -> None:
        to_interrupt = self.lifecycle.scheduler.to_interrupt(self.version, self.stream_ended)
        running = self.lifecycle.cache.running()
        assert to_interrupt == [r.rollout_id for r in running]
        self.rng.shuffle(running)
        for rollout in running:
            self._extend(rollout, self.rng.randint(self.min_pause_tokens, 4))
        while self.awaited:
            self._give_rewards(self.awaited.pop())

    def _score(self, rollouts: Sequence[Rollout]) -> None:
        if self.slow_scores:
            self.awaited.append(rollouts)
        else:
            self._give_rewards(rollouts)

    def _give_rewards(self, rollouts: Sequence[Rollout]) -> None:
        group = self.cache.groups[rollouts[0].group_id]
        ready = self.lifecycle.set_rewards(group, [self._reward() for _ in rollouts], rollouts)
        if isinstance(ready, DropReason):
            enough = sum(r.reward is not None and not r.reward.missing for r in group.rollouts) >= MIN_VALID
            assert (ready is DropReason.TOO_FEW_REWARDS) == (not enough)
            assert ready is not DropReason.STALE or self.config.on_stale == "mask"
            self._dropped(group, ready)
        elif ready:
            assert self._filter(group) is None

    def _filter(self, group: Group) -> tuple[str, str] | None:
        assert group.ready and all(r.reward is not None for r in group.rollouts)
        rng = random.Random(group.group_id)
        return (rng.choice(["one", "other"]), "why") if rng.random() < self.filter_rate else None

    def _reward(self) -> Reward:
        return Reward(None, error="boom") if self.rng.random() < self.failure_rate else Reward(self.rng.random())

    def _dropped(self, group: Group, reason: DropReason) -> None:
        assert {r.state for r in group.rollouts} == {RolloutState.DROPPED}
        self._left(group, reason.value)

    def _left(self, group: Group, how: str) -> None:
        assert group.group_id not in self.left
        self.left[group.group_id] = how
        for rollout in group.rollouts:
            assert self._tokens(rollout) == self.seen.get(rollout.rollout_id, [])

    @staticmethod
    def _tokens(rollout: Rollout) -> list[tuple[int, float, int]]:
        return [
            (int(t), float(p), s.policy_version)
            for s in rollout.segments
            for t, p in zip(s.token_ids, s.logprobs, strict=True)
        ]

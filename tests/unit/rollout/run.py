"""A driver on the fake engine with all its parts: what the driver tests share."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

from fake_engine import FakeEngine
from heard import hear
from rollover.config.rollout import RolloutConfig
from rollover.config.workflow import WorkflowConfig
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.envs.build import SingleTurn
from rollover.envs.protocol import RunEnvironment
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Event, EventKind, Lifecycle
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import Watchdog
from rollover.staleness import group_staleness
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, rollout_seed
from unit.rollout.world import make_task, same_rollout, through_json
from virtual_time import at_once

EOS, PROMPT = 7, Prompt((1, 2, 3))


def long_tail(seed: int) -> int:
    """Mostly short, a fifth beyond any budget here."""
    return 500 if seed % 5 == 0 else 1 + seed % 20


async def score_by_tokens(rollouts: list[Rollout]) -> list[Reward]:
    return [Reward(float(sum(r.token_ids()))) for r in rollouts]


class Run:
    """A driver with all its parts, and what it did."""

    def __init__(
        self,
        lengths: Callable[[int], int] = long_tail,
        scorer=score_by_tokens,
        num_tasks: int | None = None,
        max_running: int | None = None,
        engine: FakeEngine | None = None,
        watchdog: Watchdog | None = None,
        group_filter: Callable[[Group], tuple[str, str] | None] | None = None,
        environment: RunEnvironment | None = None,
        workflow: WorkflowConfig | None = None,
        **config: object,
    ) -> None:
        defaults = {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 40}
        self.config = RolloutConfig.model_validate(defaults | config)
        self.engine = engine or FakeEngine(lengths)
        self.events: list[Event] = []
        self.lifecycle = Lifecycle(self.config, max_running, listeners=[self.events.append], group_filter=group_filter)
        self.scheduler, self.cache, self.ledger = (
            self.lifecycle.scheduler,
            self.lifecycle.cache,
            self.lifecycle.ledger,
        )
        self.num_tasks, self.cursor, self.version = num_tasks, 0, 0
        self.environment = environment or SingleTurn(scorer)
        requests = Requests(self.config, 3, [EOS], may_continue=self.environment.has_turns)
        watchdog = watchdog or Watchdog(max_filtered_steps=3)
        self.driver = Driver(
            self.lifecycle, self.engine, self.next_task, self.environment, requests, watchdog, workflow
        )
        self.said: list[str] = []
        hear(self.said)

    def next_task(self):
        if self.cursor == self.num_tasks:
            return None
        self.cursor += 1
        return make_task(self.cursor - 1), PROMPT

    async def step(self) -> list[Group] | None:
        """Collect, and publish a new version if there was something to train on."""
        groups = await self.driver.collect(self.version)
        self.check(stopped=groups is None)
        if groups:
            if self.config.on_stale != "mask":
                assert all((group_staleness(g, self.version) or 0) <= self.config.staleness_bound(1) for g in groups)
            assert [g.group_id for g in groups] == sorted(g.group_id for g in groups)
            self.publish()
        return groups

    def die(self) -> None:
        """The process is killed in the middle of a step."""

        async def run() -> None:
            collecting = asyncio.ensure_future(self.driver.collect(self.version))
            for _ in range(200):
                await asyncio.sleep(0)
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)

        asyncio.run(run())

    def publish(self) -> list[Group]:
        self.version += 1
        at_once(self.engine.load_weights(self.version, ()))
        dropped = self.driver.on_new_version(self.version)
        self.check()
        return dropped

    def steps(self, num: int) -> list[list[Group]]:
        async def run() -> list[list[Group]]:
            batches = [await self.step() for _ in range(num)]
            assert all(b is not None for b in batches)
            return batches  # type: ignore[return-value]

        return asyncio.run(run())

    def check(self, stopped: bool = False) -> None:
        self.ledger.check(self.cache)
        states = {r.state for g in self.cache.groups.values() for r in g.rollouts}
        assert RolloutState.RUNNING not in states
        for group in self.cache.groups.values():
            unscored = all(r.state is RolloutState.SCORING for r in group.rollouts)
            assert stopped or not unscored, "a complete group was not scored"

    def save(self):
        state, arrays = self.lifecycle.state_dict()
        return copy.deepcopy((through_json(state), arrays, self.cursor, self.version))

    def load(self, saved) -> None:
        state, arrays, self.cursor, self.version = copy.deepcopy(saved)
        self.lifecycle.load_state_dict(state, arrays)
        at_once(self.engine.load_weights(self.version, ()))

    def count(self, kind: EventKind) -> int:
        return sum(e.kind is kind for e in self.events)


PARTIAL = {"interrupt": "when_enough", "in_flight_groups": 5, "max_staleness": 2}


def ids(batches: list[list[Group]]) -> list[list[int]]:
    return [[g.group_id for g in batch] for batch in batches]


def assert_same_groups(ours: list[Group], theirs: list[Group]) -> None:
    assert [g.group_id for g in ours] == [g.group_id for g in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert all(map(same_rollout, a.rollouts, b.rollouts)) and len(a.rollouts) == len(b.rollouts)


def uninterrupted_tokens(rollout: Rollout, budget: int, lengths: Callable[[int], int] = long_tail) -> list[int]:
    """What a run of this rollout alone, without any interruption, generates."""
    seed = rollout_seed(3, rollout.task.task_id, rollout.task.attempt, rollout.sibling)
    request = ExtendRequest("x", PROMPT, (), budget, seed, SamplingParams(), StopCriteria(frozenset({EOS})))
    (segment,) = asyncio.run(FakeEngine(lengths).extend(request))
    return segment.token_ids.tolist()

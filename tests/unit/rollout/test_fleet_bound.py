"""The staleness bound holds for any lengths and any timing: while the trainer trains, and over several engines behind
one Engine, some of which get new weights later."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import virtual_time
from fake_engine import FakeEngine
from rollover.config import WatchdogConfig
from rollover.config.rollout import RolloutConfig
from rollover.engine.protocol import ExtendRequest, WeightLoad
from rollover.envs.build import SingleTurn
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import Watchdog
from rollover.staleness import group_staleness
from rollover.types import Group, Prompt, Reward, Rollout, Segment, StopReason
from unit.rollout.run import Run
from unit.rollout.world import make_segment, make_task


class AsyncWorld:
    """What driver and loop do with rollout.overlap, with random timing. Tokens come one by one, in random order.

    The lifecycle hears of a rollout's tokens, of all versions, when it stops or is parked (as for a checkpoint).

    `stubborn`: share of rollouts that use their whole budget, and are slow.
    """

    def __init__(self, config: RolloutConfig, rng: random.Random, publish_every: int, stubborn: float) -> None:
        self.config, self.rng, self.publish_every, self.stubborn = config, rng, publish_every, stubborn
        self.lifecycle = Lifecycle(config, rng.choice([None, 1, 3, 7]), min_valid_rewards=1)
        self.engine_version = self.version = self.next_task = 0
        self.running: list[Rollout] = []
        self.unseen: dict[str, Counter[int]] = {}  # tokens by version, of what runs
        self.ages: list[int] = []

    def generate(self, next_version: int) -> None:
        """One round of the driver's loop: admit, start, and some running rollouts get a token or stop."""
        life = self.lifecycle
        life.scheduler.begin_step(next_version, self.engine_version)
        for _ in range(life.scheduler.num_to_admit()):
            life.admit(make_task(self.next_task), Prompt((1, 2)), next_version)
            self.next_task += 1
        self.running += life.start(next_version)
        for rollout in [r for r in self.running if self.rng.random() < (0.2 if self.is_stubborn(r) else 0.5)]:
            self.extend(rollout)

    def is_stubborn(self, rollout: Rollout) -> bool:
        return (hash((rollout.group_id, rollout.sibling)) % 97) / 97 < self.stubborn

    def extend(self, rollout: Rollout) -> None:
        """One token under the engine's version; the engine begins a segment at every update."""
        life = self.lifecycle
        tokens = self.unseen.setdefault(rollout.rollout_id, Counter())
        tokens[self.engine_version] += 1
        left = self.config.max_new_tokens - rollout.num_tokens - tokens.total()
        ends = left == 0 or (self.rng.random() < 0.4 and not self.is_stubborn(rollout))
        if not ends and self.rng.random() < 0.9:
            return
        reason = (StopReason.LENGTH if left == 0 else StopReason.EOS) if ends else StopReason.PAUSED
        self.running.remove(rollout)
        reasons = [StopReason.PAUSED] * (len(tokens) - 1) + [reason]
        segments = [make_segment(n, v, r) for (v, n), r in zip(sorted(tokens.items()), reasons, strict=True)]
        del self.unseen[rollout.rollout_id]
        complete = life.append(rollout, segments)
        if complete is not None:
            life.set_rewards(complete, [Reward(1.0)] * len(complete.rollouts))

    def step(self) -> None:
        life = self.lifecycle
        for _ in range(10_000):
            if life.scheduler.to_consume(self.version) is not None:
                break
            self.generate(self.version)
        else:
            raise AssertionError("no step in 10,000 rounds: starvation")
        for group in life.consume(self.version):
            self.ages.append(group_staleness(group, self.version))
        for _ in range(self.rng.randrange(12)):  # while it is trained
            self.generate(self.version + 1)
        self.version += 1
        if self.version % self.publish_every == 0:
            self.engine_version = self.version
        life.on_new_version(self.version)
        life.check()


CONFIGS = st.builds(
    lambda staleness, groups, size, extra, order, longest: RolloutConfig(
        groups_per_step=groups, group_size=size, max_new_tokens=longest, overlap=True, interrupt="on_weight_update",
        max_staleness=staleness, order=order,
        in_flight_groups=min(groups + extra, (1 + staleness) * groups),
    ),
    st.integers(0, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 16),
    st.sampled_from(["oldest_first", "longest_first", "fifo"]), st.sampled_from([6, 60]),
)  # fmt: skip


@given(CONFIGS, st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=60)
def test_nothing_is_trained_beyond_the_bound_and_nothing_starves(config, seed, publish_every, stubborn) -> None:
    publish_every = min(publish_every, config.max_staleness + 1)
    world = AsyncWorld(config, random.Random(seed), publish_every, stubborn)
    for _ in range(8):
        world.step()
    assert max(world.ages) <= config.max_staleness
    assert len(world.ages) == 8 * config.groups_per_step
    assert world.lifecycle.metrics()["groups/dropped"] == 0


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_bound_is_reached_and_generation_runs_ahead(staleness: int) -> None:
    """Or the limit on admission would be tighter than it need be."""
    config = RolloutConfig(
        groups_per_step=2, group_size=2, max_new_tokens=6, overlap=True, interrupt="on_weight_update",
        max_staleness=staleness, in_flight_groups=2 * (1 + staleness),
    )  # fmt: skip
    world = AsyncWorld(config, random.Random(0), 1, 0.3)
    for _ in range(60):
        world.step()
    assert max(world.ages) == staleness
    life = world.lifecycle
    life.scheduler.begin_step(world.version, world.version - 1)
    held = life.metrics()["groups/held"]
    assert held + life.scheduler.num_to_admit() == 2 * staleness


def test_without_the_rule_on_lag_the_bound_would_break() -> None:
    """The test above would see it: first tokens under weights that are behind, and everybody held."""
    config = RolloutConfig(
        groups_per_step=2, group_size=1, max_new_tokens=6, overlap=True, interrupt="on_weight_update",
        max_staleness=1, in_flight_groups=4,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        for seed in range(20):
            world = AsyncWorld(config, random.Random(seed), 1, 0.5)
            generate = world.generate

            def unaware(next_version: int, world=world, generate=generate) -> None:
                generate(world.version)

            world.generate = unaware  # type: ignore[method-assign]
            for _ in range(60):
                world.step()
            assert max(world.ages) <= 1


@pytest.mark.parametrize("staleness", [1, 3])
def test_long_rollout_delays_the_step_before_it_is_stale(staleness: int) -> None:
    """The driver hears of its tokens at its end only, but they are of the versions of its beginning."""
    config = RolloutConfig(
        groups_per_step=1, group_size=1, max_new_tokens=200, overlap=True, interrupt="on_weight_update",
        max_staleness=staleness, in_flight_groups=1 + staleness,
    )  # fmt: skip

    class Lengths(dict):
        def __missing__(self, rollout_id: str) -> int:
            return 150 if rollout_id == "0-0" else 3

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(1.0)] * len(rollouts)

    tasks = iter(range(1000))
    engine = FakeEngine(Lengths(), turns_between_steps=16)
    driver = Driver(
        Lifecycle(config, None, 1),
        engine,
        lambda: (make_task(next(tasks)), Prompt((1,))),
        SingleTurn(score),
        Requests(config, 0),
    )
    ages = {}

    async def run() -> None:
        for version in range(8):
            for group in await driver.collect(version) or ():
                ages[group.group_id] = group_staleness(group, version)
            driver.generate_ahead(version)
            for _ in range(40):
                await asyncio.sleep(0)
            await engine.load_weights(version + 1, ())
            driver.on_new_version(version + 1)
        await driver.abandon()

    asyncio.run(run())
    assert len(ages) == 8 and max(ages.values()) == ages[0] == staleness


# Several engines


class TwoHalves:
    """An Engine of two. The second gets new weights at some later `extend`, but is never more than `max_lag` behind.

    Any extension may go to either, so that a rollout's versions may go back. `says`: which one is told as the oldest.
    """

    def __init__(self, rng: random.Random, max_lag: int, says: Any = min) -> None:
        self.halves = [FakeEngine(lambda seed: 1 + seed % 23) for _ in range(2)]
        self.rng, self.max_lag, self.says = rng, max_lag, says
        self.waiting: list[int] = []  # versions that the second has not loaded
        self.eagerness = rng.choice([0.0, 0.02, 0.2])
        self.gone_back = 0  # versions that an extension began behind the last of the rollout's
        self.newest: dict[str, int] = {}

    @property
    def oldest_version(self) -> int:
        return self.says(half.oldest_version for half in self.halves)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        if self.waiting and self.rng.random() < self.eagerness:
            await self._catch_up()
        half = self.rng.choice(self.halves)
        before = self.newest.get(request.rollout_id, 0)
        self.gone_back += half.oldest_version < before
        segments = await half.extend(request)
        self.newest[request.rollout_id] = max(before, *(s.policy_version for s in segments))
        return segments

    async def _catch_up(self) -> None:
        await self.halves[1].load_weights(self.waiting.pop(0), ())

    async def load_weights(self, version: int, tensors: Iterable[Any]) -> WeightLoad:
        self.waiting.append(version)
        while version - self.halves[1].oldest_version > self.max_lag:
            await self._catch_up()
        return await self.halves[0].load_weights(version, tensors)

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        rollout_ids = None if rollout_ids is None else list(rollout_ids)
        for half in self.halves:
            half.interrupt(rollout_ids)

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        rollout_ids = list(rollout_ids)
        return {i: s for half in self.halves for i, s in (await half.progress(rollout_ids)).items()}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return set()

    def release(self, rollout_ids: Iterable[str]) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        for half in self.halves:
            await half.close()


MODES: dict[str, dict[str, Any]] = {
    "sync": {"interrupt": "never"},
    "partial": {"interrupt": "when_enough"},
    "budget": {"interrupt": "token_budget", "token_budget": 7},
    "drop": {"interrupt": "when_enough", "on_stale": "drop"},
    "mask": {"interrupt": "when_enough", "on_stale": "mask"},
    "async": {"interrupt": "on_weight_update", "overlap": True},
}


def run_of(mode: str, staleness: int, lag: int, rng: random.Random, groups: int = 2, says: Any = min) -> Run:
    engine: Any = TwoHalves(rng, lag, says)
    limits = WatchdogConfig(rollout_timeout_s=0, reward_timeout_s=0, max_failures=99, retry_s=1)
    config = MODES[mode] | {"in_flight_groups": (1 + staleness) * groups, "max_staleness": staleness}
    return Run(engine=engine, watchdog=Watchdog(limits), groups_per_step=groups, **config)


def steps(run: Run, num: int, rng: random.Random) -> list[list[Group]]:
    """What is trained; the bound is checked at each step."""

    async def go() -> list[list[Group]]:
        batches = []
        async with asyncio.timeout(10_000):
            for version in range(num):
                groups = await run.driver.collect(version)
                assert groups is not None and len(groups) == run.config.groups_per_step
                for group in groups:
                    if run.config.on_stale == "mask":
                        newest = max(v for r in group.rollouts for v in r.versions)
                        assert version - newest <= run.config.max_staleness, "nothing of it is in the loss"
                    else:
                        assert (group_staleness(group, version) or 0) <= run.config.max_staleness
                batches.append(groups)
                if run.config.overlap:
                    run.driver.generate_ahead(version)
                    for _ in range(rng.randrange(60)):
                        await asyncio.sleep(0)
                await run.engine.load_weights(version + 1, ())
                run.driver.on_new_version(version + 1)
                run.lifecycle.check()
            await run.driver.abandon()
        return batches

    return virtual_time.run(go())


@given(
    st.sampled_from(sorted(MODES)), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.integers(0, 10**6)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_while_one_half_lags(mode: str, staleness: int, lag: int, groups: int, seed: int) -> None:
    rng = random.Random(seed)
    run = run_of(mode, staleness, min(lag, staleness), rng, groups)
    steps(run, 8, rng)
    metrics = run.lifecycle.metrics()
    assert metrics["dropped/failed/groups"] == 0 and not run.said
    if run.lifecycle.scheduler.config.finish_first:
        assert metrics["groups/dropped"] == 0


@given(CONFIGS, st.integers(0, 10**6), st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=60)
def test_and_whatever_token_is_sampled_by_whom(config, seed: int, lag: int, stubborn: float) -> None:
    """Without a driver: every token has any version between the oldest and the newest."""

    class Fleet(AsyncWorld):
        newest = 0

        def extend(self, rollout) -> None:
            oldest, self.engine_version = self.engine_version, self.rng.randint(self.engine_version, self.newest)
            super().extend(rollout)
            self.engine_version = oldest

        def step(self) -> None:
            before = self.engine_version
            super().step()
            self.newest = self.version
            self.engine_version = self.rng.randint(max(before, self.version - max_lag), self.version)

    max_lag = min(lag, config.max_staleness)
    world = Fleet(config, random.Random(seed), 1, stubborn)
    for _ in range(8):
        world.step()
    assert max(world.ages) <= config.max_staleness
    assert world.lifecycle.metrics()["groups/dropped"] == 0


@pytest.mark.parametrize("mode", ["partial", "async"])
def test_halves_do_lag_and_rollouts_go_on_under_older_weights(mode: str) -> None:
    """Or the tests above would see nothing."""
    ages, gone_back = [], 0
    for seed in range(8):
        rng = random.Random(seed)
        run = run_of(mode, staleness=2, lag=2, rng=rng)
        batches = steps(run, 8, rng)
        ages += [group_staleness(g, version) or 0 for version, groups in enumerate(batches) for g in groups]
        gone_back += run.engine.gone_back
    assert max(ages) == 2
    assert gone_back or mode == "async", "there nothing is interrupted"


@pytest.mark.parametrize("mode", sorted(MODES))
def test_an_engine_that_names_its_newest_version_is_not_believed(mode: str) -> None:
    """Tokens of its older half are refused, so that the bound holds; the newer one is asked in the end."""
    rng = random.Random(1)
    run = run_of(mode, staleness=2, lag=2, rng=rng, says=max)
    steps(run, 6, rng)
    assert run.driver.retrying_engine.stats()["watchdog/refused_answers"]
    assert any("below the engine's oldest_version" in line for line in run.said)


def test_engine_too_far_behind_ends_the_run() -> None:
    rng = random.Random(0)
    run = run_of("sync", staleness=1, lag=9, rng=rng)
    run.engine._catch_up = lambda: None
    with pytest.raises(ValueError, match=r"max_staleness = 1: the engine may still .* 2 versions old.*--resume"):
        steps(run, 6, rng)
    run.lifecycle.check()

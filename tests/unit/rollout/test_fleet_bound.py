"""Several engines behind one Engine, some of which get new weights later: the staleness bound holds all the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_overlap_bound import CONFIGS, AsyncWorld

import virtual_time
from fake_engine import FakeEngine
from rollover.config import WatchdogConfig
from rollover.engine.protocol import ExtendRequest, WeightLoad
from rollover.rollout.watchdog import Watchdog
from rollover.staleness import group_staleness
from rollover.types import Group, Segment
from unit.rollout.run import Run


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

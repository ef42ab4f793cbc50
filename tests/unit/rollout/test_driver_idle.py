"""How long the engine stood idle while the trainer worked, and for whom, under a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from fake_engine import FakeEngine
from rollover.rollout import driver
from rollover.types import Reward, Rollout
from unit.rollout.run import Run

OVERLAP = {"overlap": True, "interrupt": "on_weight_update", "max_staleness": 1, "in_flight_groups": 2}
NEVER = {"trainer": 0.0, "rewards": 0.0}


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(driver, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


class Gate:
    """A scorer whose scores come when the test opens it."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    async def __call__(self, rollouts: list[Rollout]) -> list[Reward]:
        await self.is_open.wait()
        return [Reward(1.0) for _ in rollouts]


async def settle() -> None:
    """Until the fake engine has generated what it may."""
    for _ in range(300):
        await asyncio.sleep(0)


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_waiting_for_scores_alone_is_not_generation(clock: Clock) -> None:
    class Ticking(FakeEngine):
        def _step(self) -> None:
            clock.now += 1
            super()._step()

    async def slow(rollouts: list[Rollout]) -> list[Reward]:
        await settle()
        clock.now += 100
        return [Reward(1.0) for _ in rollouts]

    run = Run(engine=Ticking({"0-0": 5, "0-1": 5, "1-0": 5, "1-1": 5}), scorer=slow)
    run.steps(1)
    driver = run.driver
    assert (driver.clock.generation_s, driver.clock.scoring_s, driver.clock.scheduling_s) == (5, 200, 0)


def test_what_is_neither_waiting_nor_generation_is_scheduling(clock: Clock) -> None:
    run = Run(lengths=lambda seed: 5)
    next_task = run.driver.next_task

    def slow():
        clock.now += 3
        return next_task()

    run.driver.next_task = slow
    run.steps(1)
    driver = run.driver
    assert (driver.clock.generation_s, driver.clock.scoring_s, driver.clock.scheduling_s) == (0, 0, 6), "two tasks"


def test_without_overlap_nobody_counts(clock: Clock) -> None:
    run = Run(lengths=lambda seed: 5)
    run.steps(2)
    clock.now += 9
    assert run.driver.clock.idle.seconds() == NEVER


def test_with_nothing_in_flight_the_engine_waits_for_the_trainer(clock: Clock) -> None:
    async def story() -> None:
        run = Run(lengths=lambda seed: 5, **OVERLAP)
        assert await run.driver.collect(0)
        clock.now += 7  # the engine is idle for nobody before `generate_ahead`
        run.driver.generate_ahead(0)
        await settle()
        assert run.driver.clock.idle.seconds() == NEVER, "the room for groups is filled, and now it begins"
        clock.now += 5
        assert run.driver.clock.idle.seconds() == {"trainer": 5.0, "rewards": 0.0}, "what goes on counts as well"
        run.publish()
        clock.now += 2
        assert await run.driver.collect(1)
        clock.now += 3  # `collect` has ended it
        assert run.driver.clock.idle.seconds() == {"trainer": 7.0, "rewards": 0.0}
        assert run.driver.clock.generation_s == run.driver.clock.scoring_s == 0.0
        await run.driver.abandon()

    play(story)


async def with_scorings_alone_in_flight() -> tuple[Run, Gate]:
    """While the trainer trains. The gate lets them end."""
    gate = Gate()
    gate.is_open.set()
    run = Run(lengths=lambda seed: 5, scorer=gate, **OVERLAP)
    assert await run.driver.collect(0)
    gate.is_open.clear()
    run.driver.generate_ahead(0)
    await settle()
    return run, gate


def test_with_scorings_alone_in_flight_it_waits_for_rewards(clock: Clock) -> None:
    async def story() -> None:
        run, gate = await with_scorings_alone_in_flight()
        clock.now += 4
        assert run.driver.clock.idle.seconds() == {"trainer": 0.0, "rewards": 4.0}
        gate.is_open.set()
        await settle()
        clock.now += 2
        assert run.driver.clock.idle.seconds() == {"trainer": 2.0, "rewards": 4.0}
        await run.driver.abandon()

    play(story)


def test_rewards_that_the_trainer_waits_for_are_its_own_wait(clock: Clock) -> None:
    async def story() -> None:
        run, gate = await with_scorings_alone_in_flight()
        clock.now += 4
        await run.engine.load_weights(1, ())
        run.driver.on_new_version(1)
        collecting = asyncio.ensure_future(run.driver.collect(1))
        await settle()
        before = run.driver.clock.scoring_s
        clock.now += 6
        gate.is_open.set()
        assert await collecting
        assert run.driver.clock.idle.seconds() == {"trainer": 0.0, "rewards": 4.0}
        assert run.driver.clock.scoring_s - before == 6.0
        await run.driver.abandon()

    play(story)


def test_to_close_ends_what_is_generated_meanwhile(clock: Clock) -> None:
    async def story() -> None:
        run = Run(lengths=lambda seed: 10**6, max_new_tokens=10**6, **OVERLAP)
        run.driver.generate_ahead(-1)
        await settle()
        await run.driver.abandon()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    play(story)


def test_an_engine_that_runs_is_not_idle(clock: Clock) -> None:
    async def story() -> None:
        run = Run(lengths=lambda seed: 5 if seed % 2 else 10**6, max_new_tokens=10**6, **OVERLAP)
        run.driver.generate_ahead(-1)
        await settle()
        assert run.driver.player.extends
        clock.now += 8
        assert run.driver.clock.idle.seconds() == NEVER
        await run.driver.abandon()

    play(story)


def test_after_a_drain_it_waits_for_the_new_weights(clock: Clock) -> None:
    async def story() -> None:
        run = Run(lengths=lambda seed: 30, **OVERLAP | {"interrupt": "never"})
        assert await run.driver.collect(0)
        run.driver.generate_ahead(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(run.driver.drain())
        for _ in range(10):  # of the 30 that the rollouts take
            await asyncio.sleep(0)
        clock.now += 3
        await draining
        assert run.driver.clock.generation_s == 3.0 and run.driver.clock.idle.seconds() == NEVER, (
            "the trainer waited for it"
        )
        clock.now += 2
        assert run.driver.clock.idle.seconds() == {"trainer": 2.0, "rewards": 0.0}
        await run.driver.interrupt_all()
        clock.now += 6  # an evaluation
        assert run.driver.clock.idle.seconds() == {"trainer": 2.0, "rewards": 0.0}
        await run.driver.abandon()

    play(story)

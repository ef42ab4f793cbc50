"""A stop waits for no score, and an engine that answers with nothing is not asked as fast as it answers."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

import virtual_time
from fake_engine import FakeEngine
from rollover.config import WatchdogConfig
from rollover.engine.protocol import ExtendRequest
from rollover.rollout.watchdog import Watchdog
from rollover.types import Reward, Rollout, RolloutState, Segment, StopReason
from unit.rollout.run import PARTIAL, Run


async def never(rollouts: list[Rollout]) -> list[Reward]:
    await asyncio.sleep(3600)
    raise AssertionError("nobody may wait for this")


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_waits_for_no_score_and_they_are_asked_for_again(watched: bool, overlap: bool) -> None:
    mode = {"overlap": True, "interrupt": "on_weight_update", "max_staleness": 2} if overlap else PARTIAL
    dog = Watchdog(WatchdogConfig(rollout_timeout_s=600, reward_timeout_s=600)) if watched else None
    run = Run(lambda seed: 3 if seed % 2 else 30, never, watchdog=dog, **(PARTIAL | mode))

    async def stop() -> None:
        collecting = asyncio.ensure_future(run.driver.collect(0))
        while not run.lifecycle.cache.unscored():
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        run.driver.interrupt_for_good()
        assert await asyncio.wait_for(collecting, 60) is None
        await asyncio.wait_for(run.driver.interrupt_all(), 60)
        await run.driver.abandon()

    asyncio.run(stop())
    run.check(stopped=True)
    unscored = run.lifecycle.cache.unscored()
    assert unscored and all(r.reward is None for r in unscored)
    resumed = Run(lambda seed: 3 if seed % 2 else 30, **PARTIAL)
    resumed.load(run.save())
    groups = [group for batch in resumed.steps(3) for group in batch]
    assert all(r.reward is not None for g in groups for r in g.rollouts)
    assert {r.group_id for r in unscored} & {g.group_id for g in groups}


class Empty(FakeEngine):
    """Answers some rollouts at once with nothing, `times` times each."""

    def __init__(self, rollout_ids: set[str], times: int) -> None:
        super().__init__(lambda seed: 5)
        self.left = dict.fromkeys(rollout_ids, times)
        self.calls = 0

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        self.calls += 1
        if self.left.get(request.rollout_id, 0) > 0:
            self.left[request.rollout_id] -= 1
            nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
            return [Segment(*nothing, self.oldest_version, request.sampling, StopReason.PAUSED)]
        return await super().extend(request)


def test_occasional_empty_answers_are_retried() -> None:
    engine = Empty({"0-0", "1-1"}, times=3)
    run = Run(engine=engine)
    (groups,) = run.steps(1)
    assert [r.num_tokens for g in groups for r in g.rollouts] == [5] * 4 and engine.calls == 4 + 2 * 3
    assert run.driver.retrying_engine.stats()["engine/empty_answers"] == 2 * 3
    assert not run.said


def test_endless_empty_answers_back_off_and_are_logged() -> None:
    engine = Empty({"0-0"}, times=10**9)
    dog = Watchdog(WatchdogConfig(rollout_timeout_s=0.3, max_stalls=2, reward_timeout_s=0))
    run = Run(engine=engine, watchdog=dog)
    started = time.perf_counter()
    (groups,) = run.steps(1)
    assert [g.group_id for g in groups] == [1, 2], "the watchdog dropped the group that got nothing"
    assert engine.calls < 100 * (1 + time.perf_counter() - started)
    assert any("rollout 0-0 (running, " in line and "0 tokens" in line for line in run.said), run.said


def test_long_empty_answers_are_logged_once() -> None:
    run = Run(engine=Empty({"0-0"}, times=10**9))

    async def for_a_minute() -> None:
        collecting = asyncio.ensure_future(run.driver.collect(0))
        await asyncio.sleep(60)
        run.driver.interrupt_for_good()
        await collecting

    virtual_time.run(for_a_minute())
    (line,) = run.said
    assert "no token for rollout 0-0" in line and line.endswith("retry every 1 s")


def test_a_stop_ends_the_pause() -> None:
    engine = Empty({"0-0"}, times=10**9)
    run = Run(engine=engine)

    async def stop() -> None:
        collecting = asyncio.ensure_future(run.driver.collect(0))
        await asyncio.sleep(0.3)
        run.driver.interrupt_for_good()
        assert await asyncio.wait_for(collecting, 30) is None

    asyncio.run(stop())
    run.check(stopped=True)
    assert run.cache.rollout("0-0").state is RolloutState.WAITING
    assert run.driver.retrying_engine.stats()["engine/empty_answers"] == engine.calls - 3, "of 0-0 alone"


def test_a_resumed_run_knows_that_its_tasks_had_ended() -> None:
    run = Run(num_tasks=2)
    assert [len(batch) for batch in run.steps(2)] == [2, 0]
    resumed = Run(num_tasks=None)  # as where failed tasks would be given again
    resumed.load(run.save())
    assert resumed.steps(1) == [[]]

"""The driver stopped, restarted from a snapshot, and under failing engines and scorers."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

import virtual_time
from fake_engine import FakeEngine
from rollover.config import WatchdogConfig
from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.rollout.lifecycle import EventKind
from rollover.rollout.watchdog import Watchdog
from rollover.types import Group, Reward, Rollout, RolloutState, Segment, StopReason
from unit.rollout.run import (
    PARTIAL,
    Run,
    assert_same_groups,
    ids,
    uninterrupted_tokens,
)


def test_stop_parks_and_the_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    """Stopped between two steps: every later batch is that of the run that went on."""
    straight = Run(**PARTIAL)
    expected = straight.steps(9)
    for num_before in range(1, 9):
        stopped = Run(**PARTIAL)
        stopped.steps(num_before)
        resumed = Run(**PARTIAL)
        resumed.load(stopped.save())
        for ours, theirs in zip(resumed.steps(9 - num_before), expected[num_before:], strict=True):
            assert_same_groups(ours, theirs)
        assert resumed.ledger.metrics(resumed.cache) == straight.ledger.metrics(straight.cache)


@pytest.mark.parametrize("mode", [{}, PARTIAL], ids=["sync", "partial"])
@pytest.mark.parametrize("delay", [0, 3, 12, 40])
def test_request_stop_during_generation(mode: dict, delay: int) -> None:
    run = Run(lengths=lambda seed: 10 + seed % 60, max_new_tokens=60, **mode)

    async def stop() -> list[Group] | None:
        collecting = asyncio.ensure_future(run.driver.collect(0))
        for _ in range(delay):
            await asyncio.sleep(0)
        run.driver.interrupt_for_good()
        return await collecting

    assert asyncio.run(stop()) is None
    run.check()
    assert run.count(EventKind.CONSUME) == 0
    assert asyncio.run(run.driver.collect(0)) is None, "stopped for good"
    before = {r.rollout_id: r.token_ids() for g in run.cache.groups.values() for r in g.rollouts}

    resumed = Run(lengths=lambda seed: 10 + seed % 60, max_new_tokens=60, **mode)
    resumed.load(run.save())
    for group in [g for b in resumed.steps(4) for g in b]:
        for rollout in group.rollouts:
            earlier = before.get(rollout.rollout_id, [])
            assert rollout.token_ids()[: len(earlier)] == earlier
            assert rollout.token_ids() == uninterrupted_tokens(rollout, 60, lambda seed: 10 + seed % 60)
    if not mode:
        # Frozen weights between stop and resumption: the first batch is that of a run that never stopped.
        straight = Run(lengths=lambda seed: 10 + seed % 60, max_new_tokens=60)
        tokens = [[r.token_ids() for g in b for r in g.rollouts] for b in straight.steps(4)]
        again = Run(lengths=lambda seed: 10 + seed % 60, max_new_tokens=60)
        again.load(run.save())
        assert [[r.token_ids() for g in b for r in g.rollouts] for b in again.steps(4)] == tokens


def test_stop_requested_before_the_extensions_have_begun() -> None:
    run = Run(lengths=lambda seed: 2000, max_new_tokens=1000)
    run.lifecycle.listeners = [lambda event: run.driver.interrupt_for_good() if event.kind is EventKind.START else None]
    assert asyncio.run(run.driver.collect(0)) is None
    run.check()
    assert run.ledger.generated_tokens < 100, "the extensions were not interrupted"


def test_the_order_of_parking_is_not_the_order_of_arrival() -> None:
    class LastComesFirst(FakeEngine):
        async def extend(self, request):
            segments = await super().extend(request)
            paused = segments[-1].stop_reason is StopReason.PAUSED
            for _ in range(40 - 4 * int(request.rollout_id[0]) if paused else 0):
                await asyncio.sleep(0)
            return segments

    lengths = {f"{group}-{sibling}": 4 if group < 2 else 500 for group in range(5) for sibling in range(2)}
    run = Run(engine=LastComesFirst(lengths), **PARTIAL)
    run.steps(1)
    parked = [(e.rollout.group_id, e.rollout.sibling) for e in run.events if e.kind is EventKind.PARK and e.rollout]
    assert len({group_id for group_id, _ in parked}) > 1 and parked == sorted(parked)


def test_complete_but_unscored_groups_are_scored_after_a_restart() -> None:
    """The process died while the scores of whole groups were on their way."""

    async def never(rollouts: list[Rollout]) -> list[Reward]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    dying = Run(scorer=never)

    dying.die()
    assert {r.state for g in dying.cache.groups.values() for r in g.rollouts} == {RolloutState.SCORING}
    resumed = Run()
    resumed.load(dying.save())
    for ours, theirs in zip(resumed.steps(2), Run().steps(2), strict=True):
        assert_same_groups(ours, theirs)


class FailingEngine(FakeEngine):
    async def extend(self, request):
        if request.rollout_id == "1-1":
            for _ in range(5):
                await asyncio.sleep(0)
            raise EngineDied("out of memory")
        return await super().extend(request)


def test_an_engine_that_ends_propagates_and_leaves_a_balanced_cache() -> None:
    run = Run(engine=FailingEngine(lambda seed: 30))

    async def fail() -> None:
        with pytest.raises(EngineDied, match="out of memory"):
            await run.driver.collect(0)
        for _ in range(3):
            await asyncio.sleep(0)  # the fake engine's own loop ends once nothing runs
        assert len(asyncio.all_tasks()) == 1, "tasks were left running"

    asyncio.run(fail())
    run.check()
    retry = Run()
    retry.load(run.save())
    assert ids(retry.steps(1)) == [[0, 1]]


def test_a_failing_scorer_propagates() -> None:
    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        raise RuntimeError("no such column")

    run = Run(scorer=scorer)
    with pytest.raises(RuntimeError, match="no such column"):
        run.steps(1)
    run.ledger.check(run.cache)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_of_the_users_loses_no_token_of_what_runs(overlap: bool) -> None:
    """No reward ever comes, say: the engine works, and gives back what it has."""

    async def no_rewards(rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(None, error="no such service")] * len(rollouts)

    short_ones = {f"{group}-{sibling}": 5 for group in (0, 1) for sibling in (0, 1)}
    long_ones = {f"{group}-{sibling}": 500 for group in (2, 3) for sibling in (0, 1)}
    run = Run(
        engine=FakeEngine(short_ones | long_ones),
        scorer=no_rewards,
        in_flight_groups=4,
        max_staleness=2,
        overlap=overlap,
        interrupt="on_weight_update" if overlap else "when_enough",
    )
    with pytest.raises(ValueError, match="no such service"):
        run.steps(1)
    run.ledger.check(run.cache)
    parked = {i: run.cache.rollout(i) for i in long_ones}
    assert all(r.state is RolloutState.PARKED and r.num_tokens >= 5 for r in parked.values())


@pytest.mark.parametrize(
    ("before", "after"), [((2, True), (3, True)), ((3, False), (2, True)), ((2, True), (2, False))]
)
def test_another_group_size_makes_no_rollout_greedy_and_none_of_them_trained(
    before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    def run(size: int, greedy: bool) -> Run:
        return Run(group_size=size, greedy_baseline=greedy, **(PARTIAL | {"in_flight_groups": 6}))

    first = run(*before)
    first.steps(2)
    roles = {r.rollout_id: r.greedy for g in first.cache.groups.values() for r in g.rollouts}
    assert roles, "nothing is held"
    resumed = run(*after)
    resumed.load(first.save())
    seen = {r.rollout_id: r for batch in resumed.steps(6) for g in batch for r in g.rollouts}
    checked = 0
    for rollout_id, greedy in roles.items():
        if rollout_id in seen:
            rollout = seen[rollout_id]
            assert rollout.greedy is greedy
            assert {s.sampling.temperature for s in rollout.segments} == {0.0 if greedy else 1.0}
            checked += 1
    assert checked
    new = [r for i, r in seen.items() if i not in roles]
    size, greedy = after
    assert new and all(r.greedy is (greedy and r.sibling == size) for r in new)


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

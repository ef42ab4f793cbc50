"""The driver stopped, restarted from a snapshot, and under failing engines and scorers."""

from __future__ import annotations

import asyncio

import pytest

from fake_engine import FakeEngine
from rollover.engine.protocol import EngineDied
from rollover.rollout.lifecycle import EventKind
from rollover.types import Group, Reward, Rollout, RolloutState, StopReason
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
@pytest.mark.parametrize("delay", [0, 1, 3, 7, 12, 20, 40])
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

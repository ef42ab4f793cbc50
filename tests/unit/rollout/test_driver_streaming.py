"""Scoring of single rollouts as they stop, and groups that a step takes before it has enough."""

from __future__ import annotations

import asyncio

import pytest
from hanging import assert_said, short, stats, steps, watchdog

from fake_engine import FakeEngine
from rollover.rollout.lifecycle import EventKind
from rollover.types import DropReason, Prompt, Reward, Rollout, RolloutState
from unit.rollout.run import PARTIAL, Run, assert_same_groups, ids, score_by_tokens


def streaming(scorer=score_by_tokens, **more) -> Run:
    run = Run(scorer=scorer, **more)
    run.environment.scores_singly = lambda task: True
    return run


def test_rollout_is_scored_before_its_group_is_complete() -> None:
    lengths = {f"{group}-{sibling}": 4 if sibling == 0 else 30 for group in range(4) for sibling in range(2)}
    calls: list[tuple[list[str], set[RolloutState]]] = []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        siblings = {r.state for r in run.cache.groups[rollouts[0].group_id].rollouts}
        calls.append(([r.rollout_id for r in rollouts], siblings))
        return await score_by_tokens(rollouts)

    run = streaming(scorer, engine=FakeEngine(lengths))
    run.steps(1)
    assert sorted(ids for ids, _ in calls) == [["0-0"], ["0-1"], ["1-0"], ["1-1"]]
    assert all(RolloutState.RUNNING in states for ids, states in calls if ids[0].endswith("-0"))


@pytest.mark.parametrize("mode", [{}, PARTIAL, {**PARTIAL, "complete_by": "rollout"}], ids=["sync", "partial", "count"])
def test_the_steps_are_those_of_scoring_by_group(mode: dict) -> None:
    for ours, theirs in zip(streaming(**mode).steps(8), Run(**mode).steps(8), strict=True):
        assert_same_groups(ours, theirs)


def test_waiting_rollouts_are_scored_once_single_scoring_is_on() -> None:
    """That the function takes single samples is found out with another group's answers."""
    run = Run(engine=FakeEngine({"0-0": 4, "0-1": 30, "1-0": 4, "1-1": 8}))
    run.environment.scores_singly = lambda task: any(e.kind is EventKind.READY for e in run.events)
    assert ids(run.steps(1)) == [[0, 1]]


def test_group_with_too_few_rewards_is_dropped_at_the_last() -> None:
    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(None, error="boom") if r.rollout_id == "0-0" else Reward(1.0) for r in rollouts]

    run = streaming(scorer)
    assert ids(run.steps(2)) == [[1, 2], [3, 4]]
    (dropped,) = (e for e in run.events if e.kind is EventKind.DROP)
    assert dropped.reason is DropReason.TOO_FEW_REWARDS and dropped.group.group_id == 0


def test_what_was_scored_before_a_snapshot_is_not_scored_again() -> None:
    """Of each group one rollout has its reward, one is in the reward function, when the process dies."""
    calls: list[str] = []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        calls.extend(r.rollout_id for r in rollouts)
        if rollouts[0].sibling == 1:
            await asyncio.get_running_loop().create_future()
        return await score_by_tokens(rollouts)

    dying = streaming(scorer)

    dying.die()
    assert sorted(calls) == ["0-0", "0-1", "1-0", "1-1"]
    calls.clear()

    async def again(rollouts: list[Rollout]) -> list[Reward]:
        calls.extend(r.rollout_id for r in rollouts)
        return await score_by_tokens(rollouts)

    resumed = streaming(again)
    resumed.load(dying.save())
    for ours, theirs in zip(resumed.steps(2), Run().steps(2), strict=True):
        assert_same_groups(ours, theirs)
    assert sorted(calls)[:2] == ["0-1", "1-1"] and "0-0" not in calls


def test_a_single_scoring_that_hangs_is_done_again_then_given_up() -> None:
    tries: list[str] = []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        (rollout,) = rollouts
        tries.append(rollout.rollout_id)
        if rollout.rollout_id == "1-0" or (rollout.rollout_id == "0-1" and tries.count("0-1") == 1):
            await asyncio.get_running_loop().create_future()
        return await score_by_tokens(rollouts)

    run = streaming(scorer, engine=FakeEngine(short), watchdog=watchdog())
    assert ids(steps(run, 2)) == [[0, 2], [3, 4]]
    what = r"watchdog: the reward of rollout {} \(scoring, begun \S+ s ago\): "
    assert_said(
        run,
        what.format("0-1") + "it is cancelled and scored again",
        what.format("1-0") + "it is cancelled and scored again",
        what.format("1-0") + "it is cancelled and its rewards are missing",
    )
    assert stats(run)[1:] == (3, 2)
    assert tries.count("0-1") == tries.count("1-0") == 2


def test_a_stalled_group_is_dropped_while_a_sibling_is_scored() -> None:
    """The scoring of a finished sibling must not come back to a group that has left."""
    from hanging import Hanging

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        if rollouts[0].group_id == 0:
            await asyncio.sleep(5)
        return await score_by_tokens(rollouts)

    dog = watchdog(max_stalls=1, reward_timeout_s=0)
    run = streaming(scorer, engine=Hanging("0-0", times=9), watchdog=dog)
    assert ids(steps(run, 2)) == [[1, 2], [3, 4]]
    assert [e.group.group_id for e in run.events if e.kind is EventKind.DROP] == [0]


# Groups reserved for a step


def reserve(run: Run, at_least: int) -> list[int]:
    return run.scheduler.reserve(run.version, at_least)


def test_a_step_takes_what_was_reserved_for_it() -> None:
    """Groups 0 and 2 are ready first and reserved; 1 comes last, and the step of two groups does not wait for it."""
    run = Run(
        engine=FakeEngine({f"{g}-{s}": {0: 4, 1: 60}.get(g, 20 + 5 * g) for g in range(9) for s in range(2)}),
        **{**PARTIAL, "max_new_tokens": 99},
    )

    async def go() -> None:
        collecting = asyncio.ensure_future(run.driver.collect(0))
        assert reserve(run, 1) == []
        await run.driver.next_ready()
        assert reserve(run, 2) == [], "not so many yet"
        first = reserve(run, 1)
        assert first == [0] and reserve(run, 1) == [], "nothing twice"
        groups = await collecting
        assert groups is not None and [g.group_id for g in groups] == [0, 2]

    asyncio.run(go())


def test_reserved_groups_stay_held_until_their_step() -> None:
    run = Run(**PARTIAL)

    async def go() -> None:
        collecting = asyncio.ensure_future(run.driver.collect(0))
        await run.driver.next_ready()
        reserved = reserve(run, 1)
        held = set(run.cache.groups)
        assert set(reserved) <= held
        run.driver.interrupt_for_good()
        assert await collecting is None
        assert set(reserved) <= set(run.cache.groups)
        run.scheduler.clear_reserved()
        run.check(stopped=True)

    asyncio.run(go())


def test_no_group_that_is_due_loses_its_place() -> None:
    """Two of the three groups that are left are due, and run still: one place is free for what is ready."""
    run = Run(lengths=lambda seed: 4, groups_per_step=3, in_flight_groups=6, max_staleness=1, interrupt="when_enough")
    life = run.lifecycle
    from unit.rollout.world import make_segment, make_task

    groups = [life.admit(make_task(i), Prompt((1, 2, 3)), 0) for i in range(6)]
    life.start(0)

    def give(index: int, version: int, stop: bool) -> None:
        from rollover.types import StopReason

        for rollout in groups[index].rollouts:
            reason = StopReason.EOS if stop else StopReason.PAUSED
            complete = life.append(rollout, [make_segment(2, version, reason, first=rollout.num_tokens)])
            if complete is not None:
                life.set_rewards(complete, [Reward(1.0)] * 2)

    for index in (0, 1, 2):
        give(index, 0, True)
    give(3, 0, False)
    give(4, 0, False)
    life.consume(0)
    life.on_new_version(1)
    life.start(1)
    give(5, 1, True)
    groups += [life.admit(make_task(i), Prompt((1, 2, 3)), 1) for i in (6, 7, 8)]
    life.start(1)
    give(6, 1, True)
    give(7, 1, True)
    assert life.scheduler.reserve(1, 1) == [5], "3 and 4 have the other two places of the step at 1"
    assert life.scheduler.reserve(1, 1) == []
    give(3, 1, True)
    give(4, 1, True)
    assert [g.group_id for g in life.consume(1)] == [3, 4, 5]

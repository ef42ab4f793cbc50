"""The driver under the watchdog: a scoring that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hanging import assert_said, assert_waits_for_ever, short, stats, steps, watchdog

import virtual_time
from fake_engine import FakeEngine
from rollover.rollout.lifecycle import EventKind
from rollover.types import DropReason, Group, Reward, Rollout
from unit.rollout.run import PARTIAL, Run, assert_same_groups, ids, score_by_tokens


def hanging_scorer(groups: set[int], times: float) -> Callable:
    """Works in turn, as the reward worker does; the scoring of some groups hangs the first times."""
    lock, calls = asyncio.Lock(), []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        async with lock:
            group_id = rollouts[0].group_id
            calls.append(group_id)
            if group_id in groups and calls.count(group_id) <= times:
                await asyncio.get_running_loop().create_future()
            return await score_by_tokens(rollouts)

    scorer.calls = calls  # type: ignore[attr-defined]
    return scorer


REWARDS = r"watchdog: the rewards of group {} \(scoring, begun \S+ s ago\): "
RESCORED = "it is cancelled and scored again"
GIVEN_UP = "it is cancelled and its rewards are missing"


def test_a_scoring_that_hangs_once_is_repeated() -> None:
    assert_waits_for_ever(Run(short, hanging_scorer({0}, 1)))
    assert_waits_for_ever(Run(short, hanging_scorer({0}, 1), watchdog=watchdog(reward_timeout_s=0)))
    scorer = hanging_scorer({0}, 1)
    run = Run(short, scorer, watchdog=watchdog())
    batches = steps(run, 2)
    for ours, theirs in zip(batches, Run(short).steps(2), strict=True):
        assert_same_groups(ours, theirs)
    assert_said(run, REWARDS.format(0) + RESCORED)
    assert stats(run) == (0, 1, 1)
    assert scorer.calls[:3] == [0, 1, 0], "what waited behind it comes first"


def test_a_scoring_that_hangs_for_ever_has_missing_rewards() -> None:
    assert_waits_for_ever(Run(short, hanging_scorer({1}, 99)))
    run = Run(short, hanging_scorer({1}, 99), watchdog=watchdog())
    batches = steps(run, 2)
    assert ids(batches) == [[0, 2], [3, 4]]
    assert_said(run, REWARDS.format(1) + RESCORED, REWARDS.format(1) + GIVEN_UP)
    assert stats(run) == (0, 2, 1)
    (drop,) = [e for e in run.events if e.kind is EventKind.DROP]
    assert drop.reason is DropReason.TOO_FEW_REWARDS
    assert all(r.reward.error.startswith("stalled: the rewards of group 1 (scoring, ") for r in drop.group.rollouts)


def test_a_scorer_that_hangs_while_the_phase_ends() -> None:
    scorer = hanging_scorer({2}, 1)
    lengths = {f"{g}-{s}": 4 if g < 3 else 30 for g in range(9) for s in range(2)}
    run = Run(scorer=scorer, engine=FakeEngine(lengths), watchdog=watchdog(), **PARTIAL)
    batches = steps(run, 2)
    assert ids(batches)[0] == [0, 1]
    assert_said(run, REWARDS.format(2) + RESCORED)


def test_a_scorer_that_always_hangs_ends_the_run() -> None:
    run = Run(short, hanging_scorer(set(range(99)), 99), watchdog=watchdog(reward_timeout_s=0.03))
    with pytest.raises(ValueError, match="first 2 groups.*stalled: the rewards of group"):
        steps(run, 1)
    run.ledger.check(run.cache)


def test_a_scorer_that_ignores_its_cancellation_is_left_alone() -> None:
    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        hung = rollouts[0].group_id == 0 and not asked
        asked.append(rollouts[0].group_id)
        while hung:
            try:
                await stuck.wait()
                break
            except asyncio.CancelledError:
                continue
        return await score_by_tokens(rollouts)

    asked: list[int] = []
    stuck = asyncio.Event()
    run = Run(short, scorer, watchdog=watchdog())

    async def go() -> list[Group] | None:
        async with asyncio.timeout(5):
            groups = await run.step()
        stuck.set()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1, "the scorer has ended"
        return groups

    groups = virtual_time.run(go())
    assert groups is not None and ids([groups]) == [[0, 1]]
    assert_said(run, REWARDS.format(0) + RESCORED)

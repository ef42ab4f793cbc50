"""Rollouts and scorings that hang on purpose: the driver names them, tries again, drops, and the step completes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hanging import (
    ABANDONED,
    CANCELLED,
    CANCELLED_DROPPED,
    CONTINUED,
    DROPPED,
    Hanging,
    assert_said,
    assert_waits_for_ever,
    let_go,
    said,
    short,
    stats,
    steps,
    watchdog,
)

import virtual_time
from fake_engine import FakeEngine
from rollover.rollout.lifecycle import EventKind
from rollover.rollout.watchdog import Watchdog
from rollover.types import DropReason, Group, Reward, Rollout, RolloutState, StopReason
from unit.rollout.run import PARTIAL, Run, assert_same_groups, ids, score_by_tokens, uninterrupted_tokens


@pytest.mark.parametrize("mode", [{}, PARTIAL], ids=["sync", "partial"])
def test_nothing_stalls_nothing_changes(mode: dict) -> None:
    """Looks many times, and the schedule is that of a run without a watchdog."""

    def run(dog: Watchdog | None) -> Run:
        return Run(engine=Hanging(pace_s=0.003, lengths=lambda seed: 8 + seed % 30), watchdog=dog, **mode)

    quick = watchdog(rollout_timeout_s=0.06, reward_timeout_s=0.06)
    looks = []
    quick_check = quick.check
    quick.check = lambda *args: (looks.append(args), quick_check(*args))[1]  # type: ignore[method-assign]
    watched, alone = run(quick), run(None)
    for ours, theirs in zip(steps(watched, 3), steps(alone, 3), strict=True):
        assert_same_groups(ours, theirs)
    trace = [[(e.kind, e.group.group_id, e.rollout and e.rollout.sibling) for e in r.events] for r in (watched, alone)]
    assert trace[0] == trace[1] and watched.said == [] and stats(watched) == (0, 0, 0)
    assert len(looks) > 3


@pytest.mark.parametrize("after", [0, 3])
def test_a_stalled_rollout_is_interrupted_and_continued(after: int) -> None:
    assert_waits_for_ever(Run(engine=Hanging("1-0", after=after)))
    assert_waits_for_ever(Run(engine=Hanging("1-0", after=after), watchdog=watchdog(rollout_timeout_s=0)))
    engine = Hanging("1-0", after=after)
    run = Run(engine=engine, watchdog=watchdog())
    batches = steps(run, 2)
    assert ids(batches) == [[0, 1], [2, 3]]
    assert_said(run, said("1-0", "running", after, CONTINUED))
    assert stats(run) == (1, 0, 1)
    rollout = batches[0][1].rollouts[0]
    assert rollout.token_ids() == uninterrupted_tokens(rollout, 40, short), "it went on where it was"
    first, second = engine.extensions["1-0"]
    assert (len(first.generated_ids), len(second.generated_ids)) == (0, after)
    assert run.ledger.metrics(run.cache)["groups/dropped"] == 0


@pytest.mark.parametrize("max_continuations", [0, 1])
def test_a_stall_under_a_token_budget_costs_the_rest_of_the_budget(max_continuations: int) -> None:
    engine = Hanging("1-0", lengths=lambda seed: 30)
    run = Run(
        engine=engine,
        watchdog=watchdog(),
        interrupt="token_budget",
        token_budget=10,
        max_continuations=max_continuations,
        in_flight_groups=3,
        max_staleness=2,
    )
    rollouts = [r for b in steps(run, 4) for g in b for r in g.rollouts]
    assert_said(run, said("1-0", "running", 3, CONTINUED))
    assert "1-0" in [r.rollout_id for r in rollouts]
    for rollout in rollouts:
        assert rollout.token_ids() == uninterrupted_tokens(rollout, 40, lambda seed: 30)


def test_one_that_does_not_return_is_cancelled_and_goes_on_from_what_it_had_shown() -> None:
    assert_waits_for_ever(Run(engine=Hanging("0-1", deaf=True)))
    engine = Hanging("0-1", deaf=True)
    run = Run(engine=engine, watchdog=watchdog())
    batches = steps(run, 2)
    assert ids(batches) == [[0, 1], [2, 3]]
    assert_said(run, said("0-1", "running", 3, CONTINUED), said("0-1", "interrupted", 3, CANCELLED))
    assert engine.cancelled == ["0-1"] and stats(run) == (1, 0, 1)
    assert len(engine.extensions["0-1"][1].generated_ids) == 3
    rollout = batches[0][0].rollouts[1]
    assert rollout.token_ids() == uninterrupted_tokens(rollout, 40, short)
    assert [s.stop_reason for s in rollout.segments][0] is StopReason.PAUSED


def test_tokens_that_cannot_be_gone_on_from_are_left_behind() -> None:
    class Confused(Hanging):
        async def progress(self, rollout_ids):
            return {i: s + s for i, s in (await super().progress(rollout_ids)).items()} if self.cancelling else {}

        @property
        def cancelling(self) -> bool:
            return any(s.interrupted for s in self._running.values())

    run = Run(engine=Confused("0-1", deaf=True, after=25, lengths=lambda seed: 30), watchdog=watchdog())
    batches = steps(run, 1)
    rollout = batches[0][0].rollouts[1]
    assert rollout.token_ids() == uninterrupted_tokens(rollout, 40, lambda seed: 30)
    assert len(rollout.segments) == 1


@pytest.mark.parametrize("deaf", [False, True], ids=["returns", "does not return"])
def test_the_second_stall_drops_the_group_and_a_new_task_takes_its_place(deaf: bool) -> None:
    assert_waits_for_ever(Run(engine=Hanging("1-0", times=9, deaf=deaf)))
    engine = Hanging("1-0", times=9, deaf=deaf)
    run = Run(engine=engine, watchdog=watchdog())
    batches = steps(run, 2)
    assert ids(batches) == [[0, 2], [3, 4]]
    (drop,) = [e for e in run.events if e.kind is EventKind.DROP]
    assert drop.group.group_id == 1 and drop.reason is DropReason.STALLED
    assert {r.state for r in drop.group.rollouts} == {RolloutState.DROPPED}
    metrics = run.ledger.metrics(run.cache)
    assert metrics["dropped/stalled/groups"] == 1
    assert metrics["dropped/stalled/tokens"] == sum(r.num_tokens for r in drop.group.rollouts)
    lines = [said("1-0", "running", 3, CONTINUED), said("1-0", "running", 3, DROPPED)]
    if deaf:
        lines.insert(1, said("1-0", "interrupted", 3, CANCELLED))
        lines.append(said("1-0", "interrupted", 3, CANCELLED_DROPPED))
    assert_said(run, *lines)


def test_running_siblings_of_a_dropped_group_are_interrupted_and_not_started_again() -> None:
    """A sibling that is parked first must not take its slot again while the other one is being ended."""

    class Endless(Hanging):
        def _decode(self, sequence):
            # The siblings of what hangs always get tokens, and are never done.
            if sequence.request.rollout_id in ("1-1", "1-2"):
                sequence.tokens.append((5, -1.0, self.oldest_version))
                return None
            return super()._decode(sequence)

    engine = Endless("1-0", times=9, deaf=True, after=0, pace_s=0.005)
    run = Run(engine=engine, group_size=3, max_new_tokens=10_000, watchdog=watchdog(max_stalls=1))
    assert ids(steps(run, 1)) == [[0, 2]]
    assert {i: len(engine.extensions[i]) for i in ("1-0", "1-1", "1-2")} == {"1-0": 1, "1-1": 1, "1-2": 1}
    assert run.ledger.dropped[DropReason.STALLED].rollouts == 3
    assert run.ledger.dropped[DropReason.STALLED].tokens > 0


def test_only_the_rollouts_of_a_dropped_group_are_interrupted() -> None:
    engine = Hanging("1-0", times=9, after=0, pace_s=0.005, lengths=lambda seed: 40)
    run = Run(engine=engine, watchdog=watchdog(max_stalls=1))
    assert ids(steps(run, 1)) == [[0, 2]]
    assert_said(run, said("1-0", "running", 0, DROPPED))
    assert [len(engine.extensions[i]) for i in ("0-0", "0-1")] == [1, 1], "they were running"


def test_a_group_that_is_finished_at_the_last_moment_is_kept() -> None:
    class LateRiser(Hanging):
        def interrupt(self, rollout_ids=None) -> None:
            self.hanging = ()  # woken by being asked to stop, it finishes before it stops

    run = Run(engine=LateRiser("1-0"), watchdog=watchdog(max_stalls=1, grace_s=5))
    assert ids(steps(run, 1)) == [[0, 1]]
    assert_said(run, said("1-0", "running", 3, DROPPED))
    assert run.ledger.dropped[DropReason.STALLED].groups == 0


def test_one_that_ignores_its_cancellation_is_left_alone() -> None:
    engine = Hanging("0-0", times=9, deaf=True, stubborn=True)
    run = Run(engine=engine, watchdog=watchdog())
    assert ids(virtual_time.run(let_go(run, engine))) == [[1, 2]]
    assert_said(
        run,
        said("0-0", "running", 3, CONTINUED),
        said("0-0", "interrupted", 3, CANCELLED),
        said("0-0", "cancelled", 3, ABANDONED),
    )
    assert len(engine.extensions["0-0"]) == 1, "its id is still in the engine: it must not be used again"
    assert run.ledger.dropped[DropReason.STALLED].groups == 1


@pytest.mark.parametrize("stubborn", [False, True], ids=["cancelled", "abandoned"])
def test_one_that_does_not_return_when_the_phase_ends(stubborn: bool) -> None:
    """Enough is ready: everything is interrupted, and one rollout never comes back."""

    def engine() -> Hanging:
        # Three groups are in flight, and the last one's rollouts are too long to end before the others.
        lengths = {f"{g}-{s}": 30 if g == 2 else 4 for g in range(9) for s in range(2)}
        return Hanging("2-0", deaf=True, stubborn=stubborn, after=1, lengths=lengths)

    config = {"interrupt": "when_enough", "in_flight_groups": 3, "max_staleness": 2}
    if not stubborn:  # such a one could not even be abandoned
        assert_waits_for_ever(Run(engine=engine(), **config))
    hanging = engine()
    run = Run(engine=hanging, watchdog=watchdog(rollout_timeout_s=2), **config)

    assert ids(virtual_time.run(let_go(run, hanging, 2)))[0] == [0, 1]
    lines = [said("2-0", "interrupted", 1, CANCELLED)]
    if stubborn:
        lines.append(said("2-0", "cancelled", 1, ABANDONED))
        assert run.ledger.dropped[DropReason.STALLED].groups == 1
    else:
        rollout = run.cache.rollout("2-0")
        assert hanging.extensions["2-0"][1].generated_ids == tuple(rollout.token_ids()[:1]), (
            "it went on in the next step"
        )
    assert_said(run, *lines)


def test_a_group_dropped_while_winding_down_may_leave_too_few_to_train() -> None:
    """complete_by = "rollout" counted a finished sibling of it: generation goes on until there is enough again."""
    lengths = {f"{g}-{s}": 4 for g in range(9) for s in range(2)} | {"1-0": 30, "1-1": 6, "2-0": 6, "2-1": 30}
    engine = Hanging("1-0", deaf=True, stubborn=True, after=1, times=9, lengths=lengths)
    run = Run(
        engine=engine,
        watchdog=watchdog(rollout_timeout_s=2),
        interrupt="when_enough",
        complete_by="rollout",
        in_flight_groups=3,
        max_staleness=2,
    )
    (groups,) = ids(virtual_time.run(let_go(run, engine)))
    assert 1 not in groups
    assert_said(run, said("1-0", "interrupted", 1, CANCELLED), said("1-0", "cancelled", 1, ABANDONED))
    assert len(engine.extensions["2-1"]) == 2, "it was interrupted, and went on when its group was needed after all"


@pytest.mark.parametrize("deaf", [False, True], ids=["returns", "does not return"])
def test_ctrl_c_does_not_wait_for_what_hangs(deaf: bool) -> None:
    engine = Hanging("0-0", "0-1", "1-0", "1-1", deaf=deaf)
    run = Run(engine=engine, watchdog=watchdog(rollout_timeout_s=60))

    async def stop() -> None:
        collecting = asyncio.ensure_future(run.driver.collect(0))
        while not engine.is_stuck:
            await asyncio.sleep(0)
        run.driver.interrupt_for_good()
        async with asyncio.timeout(5):
            assert await collecting is None

    virtual_time.run(stop())
    run.check()
    assert {r.num_tokens for g in run.cache.groups.values() for r in g.rollouts} == {3}
    assert len(run.said) == (4 if deaf else 0)


def test_an_engine_that_hangs_for_good_ends_the_run() -> None:
    everything = [f"{g}-{s}" for g in range(99) for s in range(2)]
    run = Run(engine=Hanging(*everything, times=99), watchdog=watchdog(max_stalls=1))
    with pytest.raises(ValueError, match="the last 8 groups.*none was finished.*--resume.*rollout_timeout_s"):
        steps(run, 1)
    run.check()
    assert run.ledger.dropped[DropReason.STALLED].groups == 8


def test_stalls_are_forgotten_when_a_rollout_leaves() -> None:
    told: list[str] = []

    class Listening(Watchdog):
        def on_leave(self, rollout_ids) -> None:
            told.extend(rollout_ids := list(rollout_ids))
            super().on_leave(rollout_ids)

    run = Run(engine=Hanging("1-0", times=9), watchdog=Listening(watchdog().config))
    steps(run, 2)
    left = {r.rollout_id for e in run.events if e.kind in (EventKind.CONSUME, EventKind.DROP) for r in e.group.rollouts}
    assert "1-0" in left and sorted(told) == sorted(left)


def test_an_engine_that_fails_when_it_is_looked_at_is_watched_all_the_same() -> None:
    class Broken(Hanging):
        async def progress(self, rollout_ids):
            raise RuntimeError("no connection")

    run = Run(engine=Broken("1-0"), watchdog=watchdog())
    steps(run, 2)
    run.check()
    (said,) = [line for line in run.said if "the engine fails at progress" in line]
    assert "no connection" in said and any("rollout 1-0" in line for line in run.said)


def test_the_end_of_a_phase_is_looked_at_after_the_grace_and_not_at_the_next_look_for_stalls() -> None:
    """A look every 150 s, and one rollout does not come back when there is enough: 0.04 s later it is cancelled."""
    engine = Hanging("2-0", deaf=True)
    run = Run(engine=engine, watchdog=watchdog(rollout_timeout_s=600, reward_timeout_s=600), **PARTIAL)

    async def three_steps() -> None:
        async with asyncio.timeout(5):
            for _ in range(3):
                assert await run.step()
        await engine.close()

    virtual_time.run(three_steps())
    assert_said(run, said("2-0", "interrupted", 3, CANCELLED))
    assert [len(request.generated_ids) for request in engine.extensions["2-0"]] == [0, 3], "it went on where it was"


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

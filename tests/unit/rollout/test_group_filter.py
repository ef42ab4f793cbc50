"""Groups that a filter drops when their rewards are there: replaced in every mode, counted, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import virtual_time
from rollover.rollout.lifecycle import EventKind
from rollover.rollout.watchdog import Watchdog
from rollover.types import DropReason, Group, Reward, Rollout
from unit.rollout.run import PARTIAL, Run, assert_same_groups, ids

MODES = {
    "sync": {},
    "partial": PARTIAL,
    "drop": PARTIAL | {"on_stale": "drop", "max_staleness": 1, "in_flight_groups": 6},
    "supplement": PARTIAL | {"supplement": True, "in_flight_groups": 4},
    "token budget": PARTIAL | {"interrupt": "token_budget", "token_budget": 9},
    "a share": PARTIAL | {"complete_fraction": 0.5, "complete_by": "rollout"},
    "one step off": {"overlap": True, "in_flight_groups": 4, "max_staleness": 1},
    "fully async": {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 6, "max_staleness": 2},
}


def alike(seed: int) -> int:
    """Rollouts of one length: groups are scored in the order of their ids."""
    return 5


def odd_ones(group: Group) -> tuple[str, str] | None:
    """Two filters in one: of the groups with an odd id every third is too hard."""
    if group.group_id % 2 == 0:
        return None
    return ("hard" if group.group_id % 3 == 0 else "easy"), "odd"


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_filtered_group_is_replaced_within_the_step(monkeypatch: pytest.MonkeyPatch, mode: dict) -> None:
    run = Run(group_filter=odd_ones, **mode)
    released: list[str] = []
    monkeypatch.setattr(run.engine, "release", released.extend)

    async def steps() -> list[list[Group]]:
        batches = []
        for _ in range(6):
            batches.append(await run.driver.collect(run.version))
            if run.config.overlap:
                run.driver.generate_ahead(run.version)
                await asyncio.sleep(0.01)
                await run.driver.interrupt_all()
            run.publish()
        await run.driver.abandon()
        return batches

    batches = virtual_time.run(steps())  # what goes on has done all that it may when it sleeps
    if run.config.complete_fraction == 1:
        assert all(len(batch) == 2 for batch in batches)
    assert all(group.group_id % 2 == 0 for batch in batches for group in batch)
    filtered = [e.group.group_id for e in run.events if e.reason is DropReason.FILTERED]
    assert filtered and all(i % 2 == 1 for i in filtered)
    assert all(e.group.group_id % 2 == 0 for e in run.events if e.kind is EventKind.READY)
    run.ledger.check(run.cache)
    metrics = run.ledger.metrics(run.cache)
    hard = sum(i % 3 == 0 for i in filtered)
    assert (metrics["filtered/hard/groups"], metrics["filtered/easy/groups"]) == (hard, len(filtered) - hard)
    assert metrics["dropped/filtered/groups"] == len(filtered) and metrics["dropped/filtered/tokens"] > 0
    assert set(released) >= {f"{i}-0" for i in filtered}


@pytest.mark.parametrize("singly", [False, True], ids=["by group", "one by one"])
def test_after_a_filter_that_failed_a_restarted_run_asks_it_again(singly: bool) -> None:
    """The group is not trained unfiltered, and none of its tokens is generated twice."""

    def fails(group: Group) -> tuple[str, str] | None:
        if group.group_id == 1:
            raise KeyError("level")
        return odd_ones(group)

    def run(group_filter: Callable[[Group], tuple[str, str] | None]) -> Run:
        run = Run(group_filter=group_filter, **PARTIAL)
        run.environment.scores_singly = lambda task: singly
        return run

    failing = run(fails)
    with pytest.raises(KeyError, match="level"):
        failing.steps(4)
    failing.ledger.check(failing.cache)
    generated = sum(r.num_tokens for r in failing.cache.groups[1].rollouts)
    assert not failing.cache.groups[1].ready and generated > 0
    resumed = run(odd_ones)
    resumed.load(failing.save())
    assert all(i % 2 == 0 for batch in ids(resumed.steps(4)) for i in batch)
    (dropped,) = [e.group for e in resumed.events if e.kind is EventKind.DROP and e.group.group_id == 1]
    assert sum(r.num_tokens for r in dropped.rollouts) == generated
    assert resumed.ledger.metrics(resumed.cache)["filtered/easy/groups"] >= 1


def test_a_restarted_run_filters_the_same_groups() -> None:
    straight = Run(group_filter=odd_ones, **PARTIAL)
    expected = straight.steps(8)
    stopped = Run(group_filter=odd_ones, **PARTIAL)
    stopped.steps(3)
    resumed = Run(group_filter=odd_ones, **PARTIAL)
    resumed.load(stopped.save())
    for ours, theirs in zip(resumed.steps(5), expected[3:], strict=True):
        assert_same_groups(ours, theirs)
    assert resumed.ledger.metrics(resumed.cache) == straight.ledger.metrics(straight.cache)


def test_stream_end_with_filtered_last_groups() -> None:
    run = Run(group_filter=lambda group: ("late", "") if group.group_id > 2 else None, num_tasks=6)
    assert ids(run.steps(3)) == [[0, 1], [2], []]
    assert run.ledger.filtered == {"late": 3} and not run.cache.groups


def scorer(missing: Callable[[int], bool]) -> Callable:
    """The rewards of groups whose id is `missing` are."""

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        lost = missing(rollouts[0].group_id)
        return [Reward(None, error="boom") if lost else Reward(1.0) for _ in rollouts]

    return score


def test_missing_rewards_come_before_filters() -> None:
    run = Run(scorer=scorer(lambda group: group == 1), group_filter=odd_ones)
    run.steps(2)
    assert run.ledger.dropped[DropReason.TOO_FEW_REWARDS].groups == 1
    assert all(e.group.group_id != 1 for e in run.events if e.reason is DropReason.FILTERED)


def test_no_end_of_filtered_groups_ends_the_run() -> None:
    """Run allows three steps' worth in a row, of two groups each."""
    run = Run(group_filter=lambda group: None if group.group_id < 4 else ("all", ""))
    run.steps(2)
    with pytest.raises(
        ValueError, match=r"each of the last 6 scored groups .*run: all 6\); the scores .* are \d+, \d+\."
    ):
        run.steps(1)
    assert run.ledger.filtered == {"all": 6}
    run.check()
    again = Run(group_filter=lambda g: None)
    again.load(run.save())
    assert len(again.steps(1)[0]) == 2, "with other filters it goes on"


def test_zero_steps_never_give_up() -> None:
    never = Watchdog(max_filtered_steps=0)
    run = Run(alike, watchdog=never, group_filter=lambda group: None if group.group_id >= 20 else ("all", ""))
    assert ids(run.steps(1)) == [[20, 21]]


def test_one_group_in_time_is_enough_to_go_on() -> None:
    run = Run(alike, group_filter=lambda group: None if group.group_id % 6 == 5 else ("most", ""))
    assert ids(run.steps(3)) == [[5, 11], [17, 23], [29, 35]]


def test_groups_without_rewards_in_between_do_not_reset_the_count() -> None:
    """And filtered ones show that the rewards work: else two without any would end a run before its first step."""
    run = Run(alike, scorer=scorer(lambda group: group % 2 == 0), group_filter=lambda group: ("all", ""))
    with pytest.raises(ValueError, match="each of the last 6 scored groups"):
        run.steps(1)
    assert run.ledger.dropped[DropReason.TOO_FEW_REWARDS].groups in (5, 6)


def test_failures_after_a_filtered_group_use_the_started_limit() -> None:
    run = Run(alike, scorer=scorer(lambda group: group > 0), group_filter=lambda group: ("all", ""))
    with pytest.raises(ValueError, match="none of the last 8 groups"):
        run.steps(1)


def test_occasional_missing_rewards_do_not_end_the_run() -> None:
    """A filtered group in between begins the count of failed ones anew: here 15 of 21 fail, three in a row at most."""
    run = Run(alike, scorer=scorer(lambda group: group % 4 > 0), group_filter=lambda group: ("all", ""))
    with pytest.raises(ValueError, match="each of the last 6 scored groups"):
        run.steps(1)
    assert run.ledger.dropped[DropReason.TOO_FEW_REWARDS].groups >= 15

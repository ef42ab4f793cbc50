"""Each mode on the real driver and the fake engine: what sets it apart from the others."""

from __future__ import annotations

import asyncio

import pytest

from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import EventKind
from rollover.rollout.scheduler import LengthEstimate, Scheduler
from rollover.types import DropReason, Group, Prompt, Reward, Rollout, rollout_seed
from unit.rollout.run import Run, ids, long_tail, uninterrupted_tokens
from unit.rollout.world import make_segment, make_task


def shortest_group_last(view):
    return (-view.group_id, view.num_tokens)


def of_task(lengths: dict[str, list[int]], default: int = 4):
    """Lengths by task id and sibling."""
    by_seed = {rollout_seed(3, t, 0, i): n for t, of in lengths.items() for i, n in enumerate(of)}
    return lambda seed: by_seed.get(seed, default)


def rollouts_of(batches) -> list[Rollout]:
    return [r for b in batches for g in b for r in g.rollouts]


# token_budget


def test_a_token_budget_bounds_what_a_rollout_gets_in_a_phase() -> None:
    run = Run(interrupt="token_budget", token_budget=6, in_flight_groups=5, max_staleness=2)
    batches = run.steps(10)
    assert run.count(EventKind.PARK) > 0
    for rollout in rollouts_of(batches):
        assert rollout.token_ids() == uninterrupted_tokens(rollout, 40), "the budget over all phases is that of one"
        assert all(len(s) <= 6 for s in rollout.segments)
        assert rollout.num_tokens <= 40


def test_a_phase_ends_when_everyone_had_the_budget() -> None:
    """Not as soon as there is enough: nobody is cut off within the budget."""
    lengths = of_task({"t0": [2, 2], "t1": [2, 2], "t2": [9, 9], "t3": [9, 9]})
    run = Run(lengths, interrupt="token_budget", token_budget=6, in_flight_groups=4, max_staleness=1)
    assert ids(run.steps(1)) == [[0, 1]]
    held = [r for g in run.cache.groups.values() for r in g.rollouts]
    assert [r.num_tokens for r in held] == [6, 6, 6, 6]


def test_a_second_budget_is_given_only_if_there_is_not_enough() -> None:
    run = Run(of_task({}, default=15), interrupt="token_budget", token_budget=6, in_flight_groups=2,
              complete_fraction=0.5, max_staleness=1)  # fmt: skip
    run.steps(1)
    parked = [e for e in run.events if e.kind is EventKind.PARK]
    assert len(parked) == 8, "two rounds for each of the four rollouts, then all are finished"


# complete_fraction and complete_by


def test_a_fraction_is_enough_and_all_that_is_ready_is_trained() -> None:
    lengths = of_task({f"t{i}": [30, 30] for i in range(2, 9)})
    run = Run(lengths, groups_per_step=4, in_flight_groups=4, interrupt="when_enough", complete_fraction=0.5,
              max_staleness=2)  # fmt: skip
    batches = run.steps(4)
    assert ids(batches)[0] == [0, 1]
    assert all(2 <= len(b) <= 4 for b in batches)


def test_complete_by_rollout_still_trains_whole_groups() -> None:
    """Four rollouts are finished, of which only one group is whole."""
    lengths = of_task({"t0": [3, 3], "t1": [3, 30], "t2": [3, 30], "t3": [30, 30]})
    settings = {"groups_per_step": 2, "in_flight_groups": 4, "interrupt": "when_enough", "max_staleness": 3}
    by_group = Run(lengths, **settings)
    by_group.steps(1)
    by_rollout = Run(lengths, complete_by="rollout", **settings)
    (batch,) = by_rollout.steps(1)
    assert [g.group_id for g in batch] == [0]
    assert by_rollout.ledger.generated_tokens < by_group.ledger.generated_tokens
    assert all(r.stop_reason is not None for g in batch for r in g.rollouts)


# supplement


def test_supplement_replaces_finished_groups() -> None:
    lengths = of_task({"t0": [2, 2], "t1": [40, 40], "t2": [40, 40]})
    settings = {"in_flight_groups": 3, "interrupt": "when_enough", "max_staleness": 2}
    without, with_it = Run(lengths, **settings), Run(lengths, supplement=True, **settings)
    without.steps(1)
    with_it.steps(1)
    assert without.cache.num_admitted == 3 and with_it.cache.num_admitted > 3
    # It was short: with its help there was enough before the long ones were done.
    assert with_it.ledger.generated_tokens < without.ledger.generated_tokens


def test_freed_slots_take_parked_rollouts_first() -> None:
    run = Run(lengths=lambda seed: 5 + seed % 25, max_running=3, interrupt="when_enough", in_flight_groups=4,
              supplement=True, max_staleness=2)  # fmt: skip
    run.steps(8)
    waiting_since: dict[str, bool] = {}
    for event in run.events:
        name = event.rollout.rollout_id if event.rollout else ""
        if event.kind is EventKind.PARK and event.rollout and event.rollout.num_tokens:
            waiting_since[name] = True
        if event.kind is EventKind.RESUME:
            del waiting_since[name]
    # Had new ones gone first, parked ones would pile up: at most those parked by the last interruption wait.
    assert len(waiting_since) <= 3


# max_continuations


def test_a_rollout_is_not_interrupted_more_often_than_allowed() -> None:
    settings = {"interrupt": "when_enough", "in_flight_groups": 8, "max_staleness": 3, "groups_per_step": 2}
    free, limited = Run(**settings), Run(max_continuations=1, **settings)
    assert max(len(r.segments) for r in rollouts_of(free.steps(12))) > 2
    assert max(len(r.segments) for r in rollouts_of(limited.steps(12))) == 2


def test_last_continuation_has_no_token_budget() -> None:
    """The step waits for it, as in the other modes: else the limit would hold for nobody."""
    run = Run(interrupt="token_budget", token_budget=6, in_flight_groups=8, max_staleness=3, max_continuations=1)
    rollouts = rollouts_of(run.steps(12))
    assert max(len(r.segments) for r in rollouts) == 2
    assert all(len(r.segments[0]) == 6 for r in rollouts if len(r.segments) == 2)


# on_stale = "mask"


def test_group_scored_beyond_the_bound_is_dropped() -> None:
    """With overlap, rewards may come after new weights are live: what was sampled before has nothing to train on."""
    late = asyncio.Event()

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        if rollouts[0].group_id in (2, 3):
            await late.wait()
        return [Reward(1.0)] * len(rollouts)

    run = Run(
        lambda seed: 3, score, overlap=True, interrupt="on_weight_update", in_flight_groups=4, max_staleness=0,
        on_stale="mask",
    )  # fmt: skip

    async def steps() -> list[list[int]]:
        taken = []
        for version in range(3):
            groups = await run.driver.collect(version)
            assert groups and all(v == version for g in groups for r in g.rollouts for v in r.versions)
            taken.append([g.group_id for g in groups])
            run.driver.generate_ahead(version)
            for _ in range(40):
                await asyncio.sleep(0)
            await run.engine.load_weights(version + 1, ())
            run.driver.on_new_version(version + 1)
            late.set()
        await run.driver.abandon()
        return taken

    assert asyncio.run(steps()) == [[0, 1], [4, 5], [8, 9]]
    dropped = {e.group.group_id: e.reason for e in run.events if e.kind is EventKind.DROP}
    assert dropped[2] is dropped[3] is DropReason.STALE
    assert run.lifecycle.metrics()["dropped/masked/tokens"] == 0


def test_no_rollout_starts_too_old_for_every_step() -> None:
    """With overlap and no staleness allowed, a first token sampled while training is of no use to the next step."""
    run = Run(
        lambda seed: 3, overlap=True, interrupt="on_weight_update", in_flight_groups=4, max_staleness=0, on_stale="mask"
    )

    async def first_step() -> None:
        assert await run.driver.collect(0)
        admitted = run.cache.num_admitted
        run.driver.generate_ahead(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert run.cache.num_admitted == admitted, "tasks were used up for nothing"
        await run.driver.abandon()

    asyncio.run(first_step())


def test_group_is_stale_without_a_rewarded_rollout_in_bound() -> None:
    group = Group(
        0, make_task(0), Prompt((1,)), [Rollout(0, i, make_task(0), [make_segment(2, v)]) for i, v in [(0, 3), (1, 5)]]
    )
    config = RolloutConfig(max_staleness=1, on_stale="mask")
    assert config.expiry(group) == 6
    group.rollouts[1].reward = Reward(None, error="no reward, no loss")
    assert config.expiry(group) == 4
    group.rollouts[1].reward, group.rollouts[1].greedy = Reward(1.0), True
    assert config.expiry(group) == 4


def test_masked_tokens_are_counted_as_dropped_and_bound_nothing() -> None:
    run = Run(interrupt="when_enough", in_flight_groups=6, max_staleness=0, on_stale="mask")
    batches = run.steps(10)
    mixed = [r for r in rollouts_of(batches) if len(r.versions) > 1]
    assert mixed, "nothing rolled over"
    metrics = run.lifecycle.metrics()
    masked = sum(
        len(s) for v, b in enumerate(batches) for g in b for r in g.rollouts for s in r.segments if s.policy_version < v
    )
    assert metrics["dropped/masked/tokens"] == masked > 0
    assert metrics["dropped/masked/groups"] == 0
    trained = sum(r.num_tokens for r in rollouts_of(batches))
    assert metrics["tokens/trained"] == trained - masked


# in_flight_groups = "auto"


def test_auto_holds_more_the_longer_the_tail() -> None:
    def chosen(lengths: list[int], slots: int | None = 16, **config: object) -> int:
        estimate = LengthEstimate()
        for _ in range(10):
            estimate.observe(lengths)
        defaults = {"groups_per_step": 4, "group_size": 4, "in_flight_groups": "auto", "max_staleness": 5}
        return estimate.in_flight_groups(RolloutConfig.model_validate({**defaults, **config}), slots)

    # All alike: the slots' worth in progress, one step's worth ready beside it.
    assert chosen([10, 10, 10, 10]) == 4 + 4
    assert chosen([10, 10, 10, 50]) == 10 + 4  # the longest is 2.5 times the mean
    assert chosen([10, 10, 10, 50], supplement=True) == 10
    assert chosen([1, 1, 1, 400]) == 16 + 4
    assert chosen([1, 1, 1, 400], max_staleness=1) == 8, "no more than the staleness bound allows"
    assert chosen([1, 1, 1, 400], slots=1) == 1 + 4
    assert LengthEstimate().in_flight_groups(RolloutConfig(in_flight_groups="auto"), None) == 8


def test_auto_is_decided_between_steps_and_survives_a_restart() -> None:
    settings = {"interrupt": "when_enough", "in_flight_groups": "auto", "max_staleness": 4, "max_running": 4}
    run = Run(long_tail, **settings)
    run.steps(6)
    assert run.scheduler.in_flight_groups != run.config.first_in_flight
    assert run.lifecycle.metrics()["groups/in_flight_limit"] == run.scheduler.in_flight_groups
    other = Run(long_tail, **settings)
    other.load(run.save())
    assert other.scheduler.in_flight_groups == run.scheduler.in_flight_groups
    assert ids(other.steps(4)) == ids(run.steps(4))


# A user's own order


def test_a_users_own_order() -> None:
    run = Run(order=f"{__name__}:shortest_group_last", interrupt="when_enough", in_flight_groups=6, max_staleness=2,
              max_running=4)  # fmt: skip
    run.steps(6)
    resumed = [e.group.group_id for e in run.events if e.kind is EventKind.RESUME]
    assert resumed != sorted(resumed)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("nowhere_to_be_found:f", "there is no module 'nowhere_to_be_found'"),
        (f"{__name__}:shortest_group", "did you mean shortest_group_last"),
    ],
)
def test_an_order_that_cannot_be_found(order: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(RolloutConfig(order=order))

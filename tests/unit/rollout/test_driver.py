"""The driver end to end on the fake engine: every mode, failures, the end of the stream, stop and resume."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import virtual_time
from fake_engine import FakeEngine
from rollover.rollout.lifecycle import EventKind
from rollover.staleness import group_staleness
from rollover.types import DropReason, Group, Reward, Rollout, RolloutState, StopReason, rollout_seed
from unit.rollout.run import (
    EOS,
    PARTIAL,
    PROMPT,
    Run,
    assert_same_groups,
    ids,
    long_tail,
    score_by_tokens,
    uninterrupted_tokens,
)


def test_sync_trains_the_tasks_in_order_with_nothing_left() -> None:
    run = Run()
    batches = run.steps(4)
    assert ids(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not run.cache.groups and run.count(EventKind.PARK) == 0
    for version, batch in enumerate(batches):
        for rollout in (r for g in batch for r in g.rollouts):
            assert rollout.versions == [version] and rollout.state is RolloutState.CONSUMED
            assert rollout.token_ids() == uninterrupted_tokens(rollout, 40)
            long = rollout.num_tokens == 40 and rollout.token_ids()[-1] != EOS
            assert rollout.stop_reason is (StopReason.LENGTH if long else StopReason.EOS)
            assert rollout.reward == Reward(float(sum(rollout.token_ids())))


def test_never_with_more_in_flight_keeps_the_rest_ready() -> None:
    run = Run(in_flight_groups=5, max_staleness=2)
    batches = run.steps(4)
    assert ids(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [max(group_staleness(g, v) for g in b) for v, b in enumerate(batches)] == [0, 1, 2, 2]
    assert run.count(EventKind.PARK) == 0


@pytest.mark.parametrize("order", ["oldest_first", "longest_first", "shortest_remaining", "fifo"])
@pytest.mark.parametrize("max_running", [None, 3])
def test_partial_rolls_over_and_equals_uninterrupted(order: str, max_running: int | None) -> None:
    run = Run(order=order, max_running=max_running, **PARTIAL)
    batches = run.steps(12)
    trained = [i for b in ids(batches) for i in b]
    assert all(len(b) == 2 for b in batches) and len(set(trained)) == len(trained)
    rollouts = [r for b in batches for g in b for r in g.rollouts]
    assert any(len(r.versions) > 1 for r in rollouts), "nothing was resumed under newer weights"
    for rollout in rollouts:
        assert rollout.token_ids() == uninterrupted_tokens(rollout, 40)
        assert rollout.num_tokens <= 40
    metrics = run.ledger.metrics(run.cache)
    assert metrics["rollouts/resumed"] == run.count(EventKind.RESUME) > 0
    assert metrics["groups/dropped"] == 0
    running = 0
    for event in run.events:
        running += event.kind in (EventKind.START, EventKind.RESUME)
        running -= event.kind in (EventKind.PARK, EventKind.FINISH)
        assert max_running is None or running <= max_running


def test_finish_first_never_passes_the_bound_when_drop_has_to() -> None:
    """A rollout of the first group needs far more tokens than a step gives it."""

    def stubborn(seed: int) -> int:
        return 400 if seed == rollout_seed(3, "t0", 0, 0) else 4

    settings_ = {"groups_per_step": 1, "in_flight_groups": 3, "max_staleness": 2, "max_new_tokens": 300}
    patient = Run(lengths=stubborn, interrupt="when_enough", **settings_)
    batches = patient.steps(6)
    (first,) = [(v, g) for v, b in enumerate(batches) for g in b if g.group_id == 0]
    assert first[0] == 2, "the step at version 2 is the last that may train it, and waits for it"
    rollout = first[1].rollouts[0]
    assert rollout.num_tokens == 300 and rollout.versions[0] == 0 and rollout.versions[-1] == 2

    strict = Run(lengths=stubborn, interrupt="when_enough", on_stale="drop", **settings_)
    batches = strict.steps(6)
    assert 0 not in [i for b in ids(batches) for i in b]
    (drop,) = [e for e in strict.events if e.kind is EventKind.DROP and e.group.group_id == 0]
    assert drop.reason is DropReason.STALE
    metrics = strict.ledger.metrics(strict.cache)
    assert metrics["dropped/stale/tokens"] >= drop.group.rollouts[0].num_tokens > 0


def test_after_publish_returns_the_dropped_groups() -> None:
    run = Run(lengths=lambda seed: 1 + seed % 30, interrupt="when_enough", in_flight_groups=6, on_stale="drop")
    asyncio.run(run.driver.collect(0))
    held = {i for i, g in run.cache.groups.items() if g.min_version is not None}
    assert held and {g.group_id for g in run.publish()} == held
    assert all(g.min_version is None for g in run.cache.groups.values())


# Rewards


def hashed_failures(rate: int) -> Callable:
    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        def fails(r: Rollout) -> bool:
            return hashlib.sha256(r.rollout_id.encode()).digest()[0] % 100 < rate

        return [Reward(None, error="boom") if fails(r) else Reward(1.0) for r in rollouts]

    return scorer


def test_groups_with_too_few_rewards_are_dropped_and_replaced() -> None:
    run = Run(group_size=3, scorer=hashed_failures(50))
    batches = run.steps(6)
    assert all(len(b) == 2 for b in batches)
    dropped = [e.group for e in run.events if e.kind is EventKind.DROP]
    assert dropped and run.ledger.dropped[DropReason.TOO_FEW_REWARDS].groups == len(dropped)
    assert all(sum(not r.reward.missing for r in g.rollouts) < 2 for g in dropped)
    kept = [g for b in batches for g in b]
    assert all(sum(not r.reward.missing for r in g.rollouts) >= 2 for g in kept)
    # A rollout without a reward stays in its group: it is masked later.
    assert any(r.reward.missing for g in kept for r in g.rollouts)
    assert sorted(g.group_id for g in [*kept, *dropped]) == list(range(run.cursor))


def test_a_reward_function_that_never_works_ends_the_run() -> None:
    run = Run(scorer=hashed_failures(100))
    with pytest.raises(ValueError, match="first 2 groups.*rewards.min_valid.*boom"):
        run.steps(1)


def test_a_reward_service_that_goes_down_ends_the_run() -> None:
    """Later failures are data, but not four steps' worth of groups in a row: generation would never end."""
    state = {"down": False}

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        if state["down"]:
            return [Reward(None, error="connection refused") for _ in rollouts]
        return await score_by_tokens(rollouts)

    run = Run(scorer=scorer, group_size=3)
    assert len(run.steps(2)) == 2
    state["down"] = True
    with pytest.raises(ValueError, match="none of the last 8 groups.*connection refused.*--resume"):
        run.steps(1)


def test_one_scorer_call_per_group_with_all_its_siblings() -> None:
    calls: list[list[str]] = []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        assert all(r.state is RolloutState.SCORING for r in rollouts)
        calls.append([r.rollout_id for r in rollouts])
        return await score_by_tokens(rollouts)

    run = Run(scorer=scorer, group_size=3, **PARTIAL)
    run.steps(5)
    assert len(calls) == len({tuple(c) for c in calls}) >= 10
    assert all(call == [f"{call[0].split('-')[0]}-{i}" for i in range(3)] for call in calls)


@functools.cache
def in_order() -> list[list[Group]]:
    return Run().steps(3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_sync_does_not_depend_on_the_order_in_which_scores_arrive(seed: int) -> None:
    rng = random.Random(seed)

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        for _ in range(rng.randint(0, 30)):
            await asyncio.sleep(0)
        return await score_by_tokens(rollouts)

    for ours, theirs in zip(Run(scorer=scorer).steps(3), in_order(), strict=True):
        assert_same_groups(ours, theirs)


def test_what_arrives_together_is_handled_in_group_order_however_it_was_started(tmp_path: Path) -> None:
    """An order of one's own resumes the newest first: they begin, and end, in the reverse of the group order."""
    (tmp_path / "mine.py").write_text("def newest(view):\n    return (-view.group_id, -view.sibling)\n")
    run = Run(
        lengths=lambda seed: 4, groups_per_step=3, interrupt="token_budget", token_budget=2, max_staleness=1,
        order=f"{tmp_path / 'mine.py'}:newest",
    )  # fmt: skip
    run.steps(1)
    everyone = [f"{group}-{sibling}" for group in range(3) for sibling in range(2)]

    def told(kind: EventKind) -> list[str]:
        return [e.rollout.rollout_id for e in run.events if e.kind is kind and e.rollout]

    assert told(EventKind.RESUME) == everyone[::-1]
    assert told(EventKind.PARK) == told(EventKind.FINISH) == everyone
    assert [e.group.group_id for e in run.events if e.kind is EventKind.READY] == [0, 1, 2]


def test_scores_that_arrive_together_are_handled_in_group_order() -> None:
    """The second group is finished, and its scoring begun, long before the first."""
    all_asked = asyncio.Event()
    asked: list[int] = []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        asked.append(rollouts[0].group_id)
        if len(asked) == 3:
            all_asked.set()
        await all_asked.wait()
        return await score_by_tokens(rollouts)

    lengths = {"0-0": 30, "0-1": 30, "1-0": 5, "1-1": 5, "2-0": 9, "2-1": 15}
    run = Run(engine=FakeEngine(lengths), scorer=scorer, groups_per_step=3)
    run.steps(1)
    assert asked == [1, 2, 0]
    assert [e.group.group_id for e in run.events if e.kind is EventKind.READY] == [0, 1, 2]


def test_a_batch_is_in_group_id_order_even_if_the_later_group_is_staler() -> None:
    class LateStart(FakeEngine):
        def _decode(self, sequence):
            late = sequence.request.rollout_id.startswith("0-") and self.oldest_version == 0
            return None if late else super()._decode(sequence)

    run = Run(engine=LateStart(lambda seed: 4), interrupt="when_enough", in_flight_groups=6, max_staleness=2)
    batches = run.steps(3)
    assert ids(batches) == [[1, 2], [3, 4], [0, 5]]
    assert [g.min_version for g in batches[2]] == [2, 0]


def test_partial_runs_are_reproducible() -> None:
    first, second = Run(**PARTIAL), Run(**PARTIAL)
    for ours, theirs in zip(first.steps(8), second.steps(8), strict=True):
        assert_same_groups(ours, theirs)
    trace = [[(e.kind, e.group.group_id, e.rollout and e.rollout.sibling) for e in r.events] for r in (first, second)]
    assert trace[0] == trace[1]


# End of the stream


@pytest.mark.parametrize(
    ("num_tasks", "sizes"), [(5, [2, 2, 1]), (4, [2, 2]), (1, [1]), (0, [])], ids=["odd", "even", "one", "none"]
)
@pytest.mark.parametrize("mode", [{}, PARTIAL], ids=["sync", "partial"])
def test_end_of_stream(mode: dict, num_tasks: int, sizes: list[int]) -> None:
    run = Run(num_tasks=num_tasks, **mode)
    batches = run.steps(len(sizes) + 2)
    assert [len(b) for b in batches] == [*sizes, 0, 0]
    assert sorted(i for b in ids(batches) for i in b) == list(range(num_tasks))
    assert not run.cache.groups


def test_end_of_stream_when_the_last_group_fails() -> None:
    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(None, error="boom") if r.group_id == 2 else Reward(1.0) for r in rollouts]

    run = Run(num_tasks=3, scorer=scorer)
    assert ids(run.steps(2)) == [[0, 1], []]


def test_releases_what_leaves() -> None:
    class Releasing(FakeEngine):
        released: list[str] = []

        def release(self, rollout_ids) -> None:
            self.released.extend(rollout_ids)

    engine = Releasing(long_tail)
    run = Run(engine=engine, interrupt="when_enough", in_flight_groups=6, on_stale="drop", max_staleness=1)
    run.steps(5)
    left = [e.group for e in run.events if e.kind in (EventKind.CONSUME, EventKind.DROP)]
    assert any(e.kind is EventKind.DROP for e in run.events)
    assert engine.released == [r.rollout_id for g in left for r in g.rollouts]


def test_passes_the_tokens_so_far_budget_seed_and_stops_to_the_engine() -> None:
    class Recording(FakeEngine):
        requests = []

        async def extend(self, request):
            self.requests.append(request)
            assert request.prompt == PROMPT and request.generated_ids == so_far.get(request.rollout_id, ())
            segments = await super().extend(request)
            so_far[request.rollout_id] = request.generated_ids + tuple(int(t) for s in segments for t in s.token_ids)
            return segments

    so_far: dict[str, tuple[int, ...]] = {}
    engine = Recording(long_tail)
    run = Run(engine=engine, stop=["\n"], stop_token_ids=[9], temperature=0.7, top_k=5, **PARTIAL)
    run.steps(6)
    resumed = [r for r in engine.requests if r.generated_ids]
    assert resumed and all(r.max_new_tokens + len(r.generated_ids) == 40 for r in engine.requests)
    assert {r.stop.token_ids for r in engine.requests} == {frozenset({EOS, 9})}
    assert {r.stop.strings for r in engine.requests} == {("\n",)}
    assert {(r.sampling.temperature, r.sampling.top_k) for r in engine.requests} == {(0.7, 5)}
    by_rollout = {r.rollout_id: r.seed for r in engine.requests}
    assert by_rollout["1-1"] == rollout_seed(3, "t1", 0, 1)
    assert all(by_rollout[r.rollout_id] == r.seed for r in resumed)


def test_the_sibling_after_the_trained_ones_is_sampled_greedily() -> None:
    run = Run(lengths=lambda seed: 4, greedy_baseline=True, temperature=0.7)
    (groups,) = run.steps(1)
    temperatures = [[r.segments[0].sampling.temperature for r in group.rollouts] for group in groups]
    assert temperatures == [[0.7, 0.7, 0.0]] * 2 and all(
        r.greedy == (r.sibling == 2) for g in groups for r in g.rollouts
    )


def test_waiting_for_the_engine_does_not_poll() -> None:
    class Slow(FakeEngine):
        async def extend(self, request):
            await asyncio.sleep(0.5)
            return await super().extend(request)

    run = Run(engine=Slow(lambda seed: 3))
    asked = 0
    to_consume = run.scheduler.to_consume

    def counted(version: int, stream_ended: bool = False) -> list[int] | None:
        nonlocal asked
        asked += 1
        return to_consume(version, stream_ended)

    run.scheduler.to_consume = counted  # type: ignore[method-assign]
    assert virtual_time.run(run.step())
    assert asked <= 16, "four rollouts and two scores arrive; polling every 10 ms asks 50 times"

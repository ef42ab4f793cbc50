from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.rollout.cache import RolloutCache, groups_to_state
from rollover.types import (
    DropReason,
    Group,
    Media,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)
from unit.rollout.world import make_segment, make_task, same_rollout, same_segment, through_json

BUDGET = 10


def cache_with_one(group_size: int = 1) -> RolloutCache:
    cache = RolloutCache(BUDGET)
    cache.admit(make_task(0), Prompt((1, 2)), group_size)
    return cache


def bring_to(
    cache: RolloutCache, rollout_id: str, state: RolloutState, segments: list[Segment], reward: Reward
) -> None:
    if state is RolloutState.WAITING:
        return
    cache.start(rollout_id)
    cache.append(rollout_id, segments)
    if state is RolloutState.PARKED:
        cache.park(rollout_id)
    if state in (RolloutState.SCORING, RolloutState.READY):
        cache.finish(rollout_id, StopReason.EOS)
    if state is RolloutState.READY:
        cache.set_reward(rollout_id, reward)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 6), max_size=8))
def test_the_budget_is_cumulative(sizes: list[int]) -> None:
    cache = cache_with_one()
    used = 0
    for size in sizes:
        if used == BUDGET:
            with pytest.raises(AssertionError, match="no budget left"):
                cache.start("0-0")
            return
        if cache.rollout("0-0").state is not RolloutState.RUNNING:
            cache.start("0-0")
        if used + size > BUDGET:
            with pytest.raises(AssertionError, match="budget"):
                cache.append("0-0", [make_segment(size, 0)])
            assert cache.rollout("0-0").num_tokens == used
            return
        cache.append("0-0", [make_segment(size, 0)])
        used += size
        assert cache.remaining("0-0") == BUDGET - used
        if used < BUDGET:
            cache.park("0-0")
        else:
            with pytest.raises(AssertionError, match="out of budget"):
                cache.park("0-0")
            cache.finish("0-0", StopReason.LENGTH)


LEGAL_CALLS = {
    RolloutState.WAITING: {"start", "drop"},
    RolloutState.RUNNING: {"append", "park", "finish"},
    RolloutState.PARKED: {"start", "drop"},
    RolloutState.SCORING: {"set_reward", "drop"},
    RolloutState.READY: {"undo_reward", "consume", "drop"},
}


@pytest.mark.parametrize("call", ["start", "append", "park", "finish", "set_reward", "undo_reward", "consume", "drop"])
@pytest.mark.parametrize("state", list(LEGAL_CALLS))
def test_only_legal_transitions(state: RolloutState, call: str) -> None:
    cache = cache_with_one()
    bring_to(cache, "0-0", state, [make_segment(2, 0)], Reward(1.0))
    rollout = cache.rollout("0-0")
    assert rollout.state is state
    calls = {
        "start": lambda: cache.start("0-0"),
        "append": lambda: cache.append("0-0", [make_segment(1, 0)]),
        "park": lambda: cache.park("0-0"),
        "finish": lambda: cache.finish("0-0", StopReason.EOS),
        "set_reward": lambda: cache.set_reward("0-0", Reward(1.0)),
        "undo_reward": lambda: cache.undo_reward("0-0"),
        "consume": lambda: cache.consume(0),
        "drop": lambda: cache.drop(0, DropReason.STALE),
    }
    if call in LEGAL_CALLS[state]:
        calls[call]()
        return
    with pytest.raises(AssertionError):
        calls[call]()
    assert rollout.state is state and 0 in cache.groups


def test_paused_is_never_a_stop_reason_of_a_rollout() -> None:
    cache = cache_with_one()
    cache.start("0-0")
    with pytest.raises(AssertionError, match="PAUSED"):
        cache.finish("0-0", StopReason.PAUSED)


def test_a_group_leaves_whole() -> None:
    cache = cache_with_one(group_size=2)
    bring_to(cache, "0-0", RolloutState.READY, [make_segment(2, 0)], Reward(1.0))
    with pytest.raises(AssertionError, match="not ready"):
        cache.consume(0)
    dropped = cache.drop(0, DropReason.STALE)
    assert {r.state for r in dropped.rollouts} == {RolloutState.DROPPED} and not cache.groups
    with pytest.raises(KeyError):
        cache.rollout("0-0")


def test_groups_and_segments_are_read_only() -> None:
    cache = cache_with_one()
    bring_to(cache, "0-0", RolloutState.PARKED, [make_segment(2, 0)], Reward(1.0))
    with pytest.raises(TypeError):
        cache.groups[5] = cache.groups[0]  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        cache.rollout("0-0").segments[0].token_ids[0] = 7


# State round trip

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=4,
)
TEXT = st.text(max_size=8)
TASKS = st.builds(
    Task,
    task_id=TEXT,
    source=TEXT,
    reward=TEXT,
    messages=st.none() | st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=2).map(tuple),
    prompt=st.none() | TEXT,
    columns=st.dictionaries(TEXT, JSON, max_size=3),
    attempt=st.integers(0, 5),
)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
REWARDS = st.builds(Reward, FLOAT, st.dictionaries(TEXT, FLOAT, max_size=2)) | st.builds(Reward, st.none(), error=TEXT)
SAMPLING = st.builds(SamplingParams, st.floats(0, 2), st.floats(0.1, 1), st.integers(0, 50), st.floats(0, 0.9))


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    segments = []
    for size in draw(st.lists(st.integers(1, 4), max_size=3)):
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        segments.append(
            Segment(
                rng.integers(0, 2**31, size, dtype=np.int32),
                -100 * rng.random(size, dtype=np.float32),
                draw(st.integers(0, 1000)),
                draw(SAMPLING),
                draw(st.sampled_from([StopReason.PAUSED, StopReason.EOS, StopReason.LENGTH])),
                draw(st.booleans()),
            )
        )
    return segments


ROLLOUTS = st.tuples(st.sampled_from(list(LEGAL_CALLS)), segment_lists(), REWARDS)
MEDIA = st.builds(
    Media,
    source=TEXT,
    digest=st.sampled_from(["aa", "bb"]),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    offset=st.integers(0, 4),
    count=st.integers(1, 4),
    grid=st.sampled_from([(), (1, 2, 3)]),
)
PROMPTS = st.builds(
    Prompt,
    st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
    st.lists(MEDIA, max_size=2).map(tuple),
)
GROUPS = st.tuples(TASKS, PROMPTS, st.lists(ROLLOUTS, min_size=1, max_size=3))


def saved_form(rollout: Rollout) -> RolloutState:
    if rollout.state is RolloutState.RUNNING:
        return RolloutState.PARKED if rollout.segments else RolloutState.WAITING
    return rollout.state


@settings(max_examples=300, deadline=None)
@given(st.lists(GROUPS, max_size=4), st.sets(st.integers(0, 3)))
def test_state_round_trip_is_exact_in_every_state(groups, dropped) -> None:
    cache = RolloutCache(max_new_tokens=100)
    for task, prompt, rollouts in groups:
        group = cache.admit(task, prompt, len(rollouts))
        for rollout, (state, segments, reward) in zip(group.rollouts, rollouts, strict=True):
            # PARKED without a token is WAITING, as the cache has it.
            bring_to(cache, rollout.rollout_id, state, segments, reward)
    for group_id in dropped & set(cache.groups):
        if all(r.state is not RolloutState.RUNNING for r in cache.groups[group_id].rollouts):
            cache.drop(group_id, DropReason.STALE)

    meta, arrays = cache.state_dict()
    restored = RolloutCache(max_new_tokens=100)
    restored.load_state_dict(through_json(meta), arrays)

    assert restored.num_admitted == cache.num_admitted and list(restored.groups) == list(cache.groups)
    for group_id, group in cache.groups.items():
        copy = restored.groups[group_id]
        assert copy.prompt == group.prompt and all(rollout.prompt is copy.prompt for rollout in copy.rollouts)
        assert copy.task == group.task and copy.task.columns == group.task.columns
        assert len(copy.rollouts) == len(group.rollouts)
        for ours, theirs in zip(group.rollouts, copy.rollouts, strict=True):
            assert theirs is restored.rollout(ours.rollout_id) and theirs.state is saved_form(ours)
            running = ours.state is RolloutState.RUNNING
            assert same_rollout(ours, theirs) or (running and all(map(same_segment, ours.segments, theirs.segments)))
    again, arrays_again = restored.state_dict()
    assert again == meta
    assert arrays.keys() == arrays_again.keys()
    assert all(np.array_equal(arrays[k], arrays_again[k]) and arrays[k].dtype == arrays_again[k].dtype for k in arrays)


def test_state_arrays_are_concatenated_with_offsets() -> None:
    cache = cache_with_one(group_size=2)
    bring_to(cache, "0-0", RolloutState.PARKED, [make_segment(2, 0), make_segment(3, 1, first=2)], Reward(1.0))
    _, arrays = cache.state_dict()
    assert arrays["token_ids"].tolist() == [0, 1, 2, 3, 4] and arrays["segment_offsets"].tolist() == [0, 2, 5]
    assert arrays["prompt_ids"].tolist() == [1, 2] and arrays["prompt_offsets"].tolist() == [0, 2]
    assert arrays["logprobs"].dtype == np.float32 and arrays["token_ids"].dtype == np.int32


def test_load_refuses_a_smaller_budget_than_was_used() -> None:
    cache = cache_with_one()
    bring_to(cache, "0-0", RolloutState.PARKED, [make_segment(5, 0)], Reward(1.0))
    meta, arrays = cache.state_dict()
    RolloutCache(6).load_state_dict(meta, arrays)
    with pytest.raises(ValueError, match="rollout.max_new_tokens"):
        RolloutCache(5).load_state_dict(meta, arrays)


def test_a_group_that_is_given_back_has_its_place_in_order_again() -> None:
    cache = cache_with_one()
    cache.admit(make_task(1), Prompt((1,)), 1)
    for rollout in cache.groups[0].rollouts:
        bring_to(cache, rollout.rollout_id, RolloutState.READY, [make_segment(1, 0, StopReason.EOS)], Reward(1.0))
    cache.give_back(cache.consume(0))
    assert list(cache.groups) == [0, 1]


def test_a_loaded_state_replaces_what_was_held() -> None:
    meta, arrays = cache_with_one().state_dict()
    cache = cache_with_one()
    cache.admit(make_task(1), Prompt((1,)), 1)
    cache.load_state_dict(meta, arrays)
    assert list(cache.groups) == [0] and cache.num_admitted == 1


def test_load_refuses_an_unknown_format() -> None:
    meta, arrays = cache_with_one().state_dict()
    with pytest.raises(ValueError, match="format 99"):
        RolloutCache(BUDGET).load_state_dict({**meta, "format": 99}, arrays)


@pytest.mark.parametrize("leave", [RolloutCache.consume, lambda cache, i: cache.drop(i, DropReason.STALE)])
def test_what_episodes_keep_over_a_kill_ends_with_their_group(leave: Callable[[RolloutCache, int], Group]) -> None:
    """Trained groups stay in the replay buffer, and in every checkpoint with it."""
    cache = cache_with_one(2)
    for rollout in cache.groups[0].rollouts:
        bring_to(cache, rollout.rollout_id, RolloutState.READY, [make_segment(3, 0, StopReason.EOS)], Reward(0.5))
        cache.keep(0, rollout.sibling, "environment", {"state": "x" * 60_000})
    meta, _ = groups_to_state([leave(cache, 0)])
    assert len(json.dumps(meta)) < 10_000

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover import staleness
from rollover.config.rollout import RolloutConfig
from rollover.rollout.cache import RolloutCache
from rollover.types import Group, Prompt, Rollout
from unit.rollout.world import make_segment, make_task


def group_with(*versions: list[int]) -> Group:
    """One sibling per list; one segment per version in it."""
    cache = RolloutCache(100)
    group = cache.admit(make_task(0), Prompt((1,)), len(versions))
    for rollout, of_rollout in zip(group.rollouts, versions, strict=True):
        cache.start(rollout.rollout_id)
        cache.append(rollout.rollout_id, [make_segment(2, v) for v in of_rollout])
    return group


def test_group_staleness_is_that_of_the_oldest_token_of_all_siblings() -> None:
    group = group_with([5, 6], [3, 7], [])
    assert staleness.group_staleness(group, 8) == 5
    assert RolloutConfig(max_staleness=2).deadline(group.min_version) == 5


def test_no_tokens_no_staleness() -> None:
    group = group_with([], [])
    assert staleness.group_staleness(group, 8) is None
    assert RolloutConfig(max_staleness=2).deadline(group.min_version) == staleness.NO_DEADLINE


def test_environment_tokens_have_no_staleness() -> None:
    cache = RolloutCache(100)
    group = cache.admit(make_task(0), Prompt((1,)), 1)
    cache.start("0-0")
    cache.append("0-0", [make_segment(3, 1, trainable=False), make_segment(3, 4)])
    assert staleness.group_staleness(group, 6) == 2


def test_per_token_staleness() -> None:
    assert staleness.staleness(np.array([3, 5, 5]), 5).tolist() == [2, 0, 0]


def feasible_by_search(deadlines: list[int], version: int, groups_per_step: int) -> bool:
    """Is there an assignment of groups to the steps at version + 1, version + 2, ... that meets every deadline?"""
    horizon = range(version + 1, version + 1 + max(len(deadlines), 1))
    for steps in itertools.product(horizon, repeat=len(deadlines)):
        in_time = all(step <= deadline for step, deadline in zip(steps, deadlines, strict=True))
        if in_time and all(steps.count(step) <= groups_per_step for step in horizon):
            return True
    return False


@given(st.lists(st.integers(0, 6), max_size=5), st.integers(0, 3), st.integers(1, 3))
def test_feasibility_is_exact(deadlines: list[int], version: int, groups_per_step: int) -> None:
    assert staleness.is_feasible(Counter(deadlines), version, groups_per_step) == feasible_by_search(
        deadlines, version, groups_per_step
    )


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 6), st.integers(1, 3))
def test_urgencies_are_exactly_the_deadlines_that_make_waiting_infeasible(deadlines, version, groups_per_step) -> None:
    deadlines = [max(d, version) for d in deadlines]
    urgent = staleness.urgencies(Counter(deadlines), version, groups_per_step)
    assert bool(urgent) == (not staleness.is_feasible(Counter(deadlines), version, groups_per_step))
    # Earlier deadlines are never less urgent than later ones, and due ones are the most urgent.
    assert [urgent[d] for d in sorted(urgent)] == sorted(urgent.values())
    assert all(urgent[d] == 0 for d in urgent if d == version)
    # What is not urgent could all be left behind.
    assert staleness.is_feasible(Counter(d for d in deadlines if d not in urgent), version, groups_per_step)


@pytest.mark.parametrize(
    ("interrupt", "in_flight", "max_staleness", "on_stale", "publish_every", "bound"),
    [
        ("never", 0, 0, "", 1, 0),
        ("never", 4, 3, "", 1, 0),
        ("never", 4, 3, "", 3, 2),
        ("never", 8, 3, "", 1, 1),
        ("never", 8, 3, "", 2, 2),
        ("never", 9, 3, "", 1, 2),
        ("never", 9, 3, "", 4, 3),
        ("never", 40, 3, "drop", 1, 3),
        ("when_enough", 4, 3, "", 1, 0),
        ("when_enough", 4, 3, "", 2, 1),
        ("when_enough", 5, 3, "", 1, 3),
        ("when_enough", 40, 0, "drop", 1, 0),
    ],
)
def test_staleness_bound(interrupt, in_flight, max_staleness, on_stale, publish_every, bound) -> None:
    config = RolloutConfig(
        groups_per_step=4,
        interrupt=interrupt,
        in_flight_groups=in_flight,
        max_staleness=max_staleness,
        on_stale=on_stale,
    )
    assert config.staleness_bound(publish_every) == bound


def test_a_rollout_keeps_its_smallest_version_whatever_the_order() -> None:
    rollout = Rollout(0, 0, make_task(0))
    seen: list[int | None] = [rollout.min_version]
    for segment in (make_segment(2, 0, trainable=False), make_segment(2, 5), make_segment(1, 3), make_segment(1, 4)):
        rollout.add(segment)
        seen.append(rollout.min_version)
    assert seen == [None, None, 5, 3, 3] and rollout.versions == [5, 3, 4]

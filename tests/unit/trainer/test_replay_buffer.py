"""The replay buffer: scores by hand, what stays when it is full or stale, draws in proportion, the state."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.config import ReplayConfig
from rollover.rollout.cache import groups_to_state
from rollover.trainer.replay_buffer import KeptGroup, ReplayBuffer, signal
from samples import group, rollout, segment


def kept(group_id: int, score: float, version: int = 0, oldest_in_loss: int = 0) -> KeptGroup:
    rollouts = [rollout(group_id, i, float(i), [segment([8, 9], version=version, logprob=-i - 0.5)]) for i in (0, 1)]
    return KeptGroup(group(group_id, rollouts), score, oldest_in_loss)


def buffer(*all_kept: KeptGroup, size: int = 10, max_staleness: int = 3, seed: int = 0) -> ReplayBuffer:
    out = ReplayBuffer(ReplayConfig(size=size, max_staleness=max_staleness), seed)
    for k in all_kept:
        out.add(k)
    return out


def ids(found: list[KeptGroup]) -> list[int]:
    return [k.group.group_id for k in found]


def test_score_by_hand() -> None:
    # Rewards 1, 0, 0, 1: mean 1/2, sample standard deviation sqrt(4 * 1/4 / 3).
    assert signal([0.5, -0.5, -0.5, 0.5], np.array([[1.0], [0.0], [0.0], [1.0]])) == pytest.approx(2 / math.sqrt(3))
    # A second reward adds its own: 0, 3 has 3 / sqrt(2), and 1, 2 has 1 / sqrt(2).
    assert signal([1.0, -2.0], np.array([[0.0, 1.0], [3.0, 2.0]])) == pytest.approx(3 * 4 / math.sqrt(2))
    # A missing reward is no reward of 0.
    assert signal([1.0, 0.0, -1.0], np.array([[2.0], [np.nan], [0.0]])) == pytest.approx(2 * math.sqrt(2))
    assert signal([1.0], np.array([[2.0]])) == 0
    assert signal([1.0, 1.0, 1.0], np.full((3, 1), 0.1)) == 0


def test_what_has_no_signal_is_not_kept() -> None:
    assert len(buffer(kept(0, 0.0), kept(1, math.nan), kept(2, math.inf))) == 0


def test_stale_groups_leave() -> None:
    b = buffer(kept(0, 1.0, version=4), kept(1, 9.0, version=3), kept(2, 2.0, version=5), size=3)
    b.drop_stale(7)
    assert ids(b.kept) == [0, 2] and b.stale == 1  # 7 - 4 = 3 is allowed, 7 - 3 = 4 is not
    b.add(kept(3, 3.0, version=7))
    b.add(kept(4, 0.5, version=7))
    assert ids(b.kept) == [0, 2, 3] and b.evicted == 1, "after leaving the lowest score is still found"


def test_eviction_order_after_stale_removal() -> None:
    """A heap less its first item is none until it is made one again: 4 would be found after 10."""
    scores = [1.0, 2.0, 10.0, 3.0, 4.0, 11.0, 12.0]
    b = buffer(*(kept(i, s, version=9 * (i > 0)) for i, s in enumerate(scores)), size=7)
    b.drop_stale(9)
    for i in range(4):
        b.add(kept(20 + i, 100.0 + i, version=9))
    assert sorted(k.score for k in b.kept) == [10, 11, 12, 100, 101, 102, 103]


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(-4, 0)), min_size=1, max_size=40), st.integers(1, 6))
def test_a_full_buffer_that_ages_is_a_sorted_list(steps: list[tuple[float, int]], size: int) -> None:
    """One group a version, of some age already; against the plain definition."""
    b, plain, evicted = buffer(size=size), [], 0
    for version, (score, age) in enumerate(steps):
        b.add(kept(version, score, version=max(0, version + age)))
        plain = sorted([*plain, (score, version, max(0, version + age))])
        evicted += len(plain) > size
        plain = plain[-size:]
        b.drop_stale(version + 1)
        plain = [item for item in plain if version + 1 - item[2] <= 3]
        assert sorted((k.score, k.group.group_id, k.oldest_version) for k in b.kept) == plain
    assert b.evicted == evicted


def test_the_age_is_that_of_the_oldest_token_in_the_loss() -> None:
    segments = [segment([8], version=1), segment([9], version=2, trainable=False), segment([10], version=4)]
    rollouts = [rollout(0, 0, 1.0, segments), rollout(0, 1, 0.0, [segment([8], version=5)])]
    greedy = rollout(0, 2, 0.0, [segment([8], version=0, temperature=0.0)])
    g = group(0, [*rollouts, greedy])
    assert [KeptGroup(g, 1.0, oldest).oldest_version for oldest in (0, 1, 2, 5)] == [1, 1, 4, 5]


def test_draws_are_in_proportion_to_the_score() -> None:
    b = buffer(kept(0, 1.0), kept(1, 2.0), kept(2, 5.0))
    n = 4000
    pairs = Counter(tuple(ids(b.draw(2, version))) for version in range(n))
    # P(i, then j) = s_i / 8 * s_j / (8 - s_i).
    for (i, j), (a, c) in {(i, j): (s[i], s[j]) for s in [(1, 2, 5)] for i in range(3) for j in range(3)}.items():
        expected = 0.0 if i == j else a / 8 * c / (8 - a)
        assert pairs[i, j] / n == pytest.approx(expected, abs=4 * math.sqrt(0.25 / n))


def test_a_draw_is_without_replacement_and_takes_nothing_out() -> None:
    b = buffer(*(kept(i, 1.0 + i) for i in range(4)))
    for version in range(50):
        assert sorted(ids(b.draw(9, version))) == [0, 1, 2, 3]
        assert len(set(ids(b.draw(3, version)))) == 3
    assert len(b) == 4 and buffer().draw(2, 0) == [] and b.draw(0, 0) == []


def test_draws_depend_on_seed_and_version_alone() -> None:
    scores = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    one = buffer(*(kept(i, s) for i, s in enumerate(scores)))
    other_order = buffer(*(kept(i, s) for i, s in reversed(list(enumerate(scores)))))
    seen = [ids(one.draw(2, version)) for version in range(20)]
    assert seen == [ids(other_order.draw(2, version)) for version in range(20)]
    assert len(set(map(tuple, seen))) > 5
    reseeded = buffer(*(kept(i, s) for i, s in enumerate(scores)), seed=1)
    assert seen != [ids(reseeded.draw(2, version)) for version in range(20)]


def test_state_round_trip() -> None:
    b = buffer(*(kept(i, 1.0 + i, version=i, oldest_in_loss=i) for i in range(6)), size=5)
    b.drop_stale(5)
    meta, arrays = b.state_dict()
    again = buffer(size=5)
    again.load_state_dict(json.loads(json.dumps(meta)), arrays)
    assert [(k.score, k.oldest_in_loss) for k in again.kept] == [(k.score, k.oldest_in_loss) for k in b.kept]
    before, after = (groups_to_state([k.group for k in x.kept]) for x in (b, again))
    assert before[0] == after[0] and all(np.array_equal(before[1][name], after[1][name]) for name in before[1])
    assert (again.stale, again.evicted) == (b.stale, b.evicted) == (1, 1)
    assert [ids(again.draw(2, v)) for v in range(9)] == [ids(b.draw(2, v)) for v in range(9)]
    again.load_state_dict(meta, arrays)
    assert ids(again.kept) == ids(b.kept), "it replaces what was there"
    smaller = buffer(size=2)
    smaller.load_state_dict(meta, arrays)
    assert ids(smaller.kept) == [4, 5] and smaller.evicted == 1 + 2

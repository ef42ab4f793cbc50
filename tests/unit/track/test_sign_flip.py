"""The paired test: against enumeration and the binomial, and how often it is wrong where nothing differs."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.track.statistics import MOST_EXACT, sign_flip_p


@given(st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0]), max_size=8))
def test_it_is_the_share_of_sign_assignments_that_are_as_extreme(differences: list[float]) -> None:
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    expected = sum(abs(x) >= abs(sum(differences)) for x in sums) / len(sums)
    assert sign_flip_p(differences) == pytest.approx(expected)


def test_of_passes_it_is_the_exact_sign_test() -> None:
    better, worse = 9, 1  # McNemar's exact test: 2 P(X <= 1) of Binomial(10, 1/2)
    expected = 2 * sum(math.comb(10, i) for i in range(worse + 1)) / 2**10
    assert sign_flip_p([1.0] * better + [-1.0] * worse + [0.0] * 50) == pytest.approx(expected)
    assert sign_flip_p([]) == sign_flip_p([0.0, 0.0]) == 1


def test_sampled_p_value_is_close_and_deterministic() -> None:
    draws = random.Random(0)
    differences = [draws.choice([-1.0, 1.0, 1.0]) for _ in range(MOST_EXACT + 5)]
    num, total = len(differences), abs(sum(differences))
    exact = sum(math.comb(num, i) for i in range(num + 1) if abs(num - 2 * i) >= total) / 2**num
    assert sign_flip_p(differences) == sign_flip_p(differences) == pytest.approx(exact, abs=0.01)
    assert sign_flip_p([1.0] * 200) == pytest.approx(1 / 20_001), "never 0"


@pytest.mark.parametrize("num", [10, 30])
def test_false_positive_rate_is_five_percent(num: int) -> None:
    draws = random.Random(num)
    ps = [sign_flip_p([draws.gauss(0, 1) for _ in range(num)], seed) for seed in range(400 if num == 10 else 100)]
    assert sum(p <= 0.05 for p in ps) / len(ps) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(ps))
    shifted = [draws.gauss(1.5, 1) for _ in range(num)]
    assert sign_flip_p(shifted) < 0.01

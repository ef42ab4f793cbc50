"""maj@k against the enumeration of every subset and every way to break its tie."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.track.statistics import majority_at_k

Samples = list[tuple[str | None, bool]]


def by_enumeration(samples: Samples, k: int) -> float:
    """The mean over all subsets; in each every winner has the same chance, and each of its samples speaks for it."""
    total, subsets = Fraction(0), list(itertools.combinations(samples, k))
    for subset in subsets:
        votes = Counter(answer for answer, _ in subset if answer is not None)
        winners = [answer for answer, num in votes.items() if num == max(votes.values())]
        for winner in winners:
            passes = [passed for answer, passed in subset if answer == winner]
            total += Fraction(sum(passes), len(passes) * len(winners))
    return float(total / len(subsets))


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=9).flatmap(
        lambda samples: st.tuples(st.just(samples), st.integers(1, len(samples)))
    )
)
def test_it_is_the_mean_over_subsets_and_ties(case: tuple[Samples, int]) -> None:
    samples, k = case
    assert majority_at_k(samples, k) == pytest.approx(by_enumeration(samples, k), abs=1e-12)


def test_ties_abstentions_and_one_sample_by_hand() -> None:
    right, wrong = ("4", True), ("5", False)
    assert majority_at_k([right, right, wrong], 3) == 1
    assert majority_at_k([right, wrong], 2) == 0.5, "a tie is broken by lot"
    assert majority_at_k([right, wrong, ("6", False)], 3) == pytest.approx(1 / 3)
    assert majority_at_k([right, (None, False), (None, False)], 3) == 1, "who abstains has no vote"
    assert majority_at_k([(None, True)] * 3, 2) == 0
    samples = [right, right, wrong, ("6", False), (None, False)]
    assert majority_at_k(samples, 1) == pytest.approx(2 / 5), "the share that passes"
    assert majority_at_k(samples, 4) == pytest.approx(by_enumeration(samples, 4))


@pytest.mark.parametrize("k", [0, 3])
def test_more_than_there_are_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="is not within 1"):
        majority_at_k([("a", True), ("b", False)], k)

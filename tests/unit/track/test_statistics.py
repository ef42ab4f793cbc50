import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.track.statistics import censored_mean, mean_interval, pass_at_k, summarise_eval, wilson_interval


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(case):
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(arguments):
    with pytest.raises(ValueError, match="is not within"):
        pass_at_k(*arguments)


def test_mean_interval_by_hand_and_in_coverage():
    mean, (low, high) = mean_interval([0.0, 1.0, 2.0, 3.0])
    assert mean == 1.5 and high - mean == pytest.approx(1.959964 * math.sqrt(5 / 3 / 4)) == pytest.approx(mean - low)
    draws = random.Random(0)
    intervals = [mean_interval([draws.random() for _ in range(50)])[1] for _ in range(2000)]
    assert 0.93 < sum(low <= 0.5 <= high for low, high in intervals) / 2000 < 0.965
    assert mean_interval([2.0]) == (2.0, (-math.inf, math.inf))
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_wilson_interval_against_published_values():
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    with pytest.raises(ValueError, match="proportion"):
        wilson_interval(1, 0)


def test_mean_of_numbers_that_are_all_known_or_cut_short():
    assert censored_mean({3: 2, 9: 1}, {}) == 5
    assert math.isnan(censored_mean({}, {}))
    # Kaplan and Meier by hand: 3 of 3 pass 0, 2/3 pass 1, the one cut at 2 leaves one of one to end at 3.
    assert censored_mean({1: 1, 3: 1}, {2: 1}) == pytest.approx(1 + 2 / 3 * 2)
    assert censored_mean({1: 1}, {5: 1}) == pytest.approx(1 + 1 / 2 * 4), "nothing is added past the largest number"
    assert censored_mean({2: 1}, {2: 1}) == 2, "one cut at 2 was at risk of ending there"


def test_summary_by_source():
    summary = summarise_eval(
        [("a", "1", [1.0, 0.0]), ("a", "2", [0.5, None, 1.0]), ("b", "3", [0.0, 0.0]), ("b", "4", [None, None])],
        1.0,
        [1, 2, 3],
    )
    assert summary["mean"] == pytest.approx((0.5 + 0.75 + 0) / 3)
    assert summary["ci"][0] < summary["mean"] < summary["ci"][1]
    assert summary["pass@1"] == pytest.approx(1 / 3) and summary["pass@2"] == pytest.approx(2 / 3)
    assert "pass@3" not in summary
    assert (summary["tasks"], summary["samples"], summary["missing"]) == (3, 6, 3)
    assert summary["sources"]["a"]["mean"] == 0.625 and summary["sources"]["a"]["pass@2"] == 1
    assert summary["sources"]["b"]["mean"] == 0 and summary["sources"]["b"]["ci"] is None
    assert summary["pass@1_ci"] == pytest.approx([0.00667, 0.65999], abs=1e-4), "the normal one lies within 0 and 1"
    assert summary["pass@2_ci"] == pytest.approx(list(wilson_interval(2, 3))), "each task has 0 or 1"


def test_more_rollouts_per_task_keep_the_interval():
    few = summarise_eval([("a", str(i), [float(i % 2)]) for i in range(20)], 1.0)
    many = summarise_eval([("a", str(i), [float(i % 2)] * 50) for i in range(20)], 1.0)
    assert few["ci"] == pytest.approx(many["ci"]) and few["pass@1_ci"] == pytest.approx(many["pass@1_ci"])


def test_without_any_score_there_is_no_mean():
    assert summarise_eval([("a", "1", [None])], 1.0)["mean"] is None
    assert summarise_eval([], 1.0)["mean"] is None


def test_majority_uses_votes_and_intervals_use_tasks():
    rows = [("a", "1", [1.0, 0.0, 1.0]), ("a", "2", [0.0, 0.0, 1.0]), ("a", "3", [1.0, None, 0.0])]
    votes = {"1": ["4", "5", "4"], "2": ["7", "7", "8"], "3": ["1", "2", None]}
    summary = summarise_eval(rows[:2], 1.0, (1,), votes, (3,))
    assert summary["maj@3"] == 0.5 and summary["sources"]["a"]["maj@3_ci"] == summary["maj@3_ci"]
    assert summary["maj@3_ci"] == pytest.approx(list(wilson_interval(1, 2)))
    assert "maj@3" not in summarise_eval(rows, 1.0, (1,), votes, (3,)), "a task has two scores only"
    assert "maj@3" not in summarise_eval(rows[:2], 1.0, (1,), None, (3,))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_of_equal_tasks_has_an_interval_with_a_width(k: int):
    for passed in (0, 2, 3):
        rows = [("a", str(i), [1.0] * passed + [0.0] * (3 - passed)) for i in range(9)]
        votes = {str(i): ["1"] * passed + ["2"] * (3 - passed) for i in range(9)}
        summary = summarise_eval(rows, 1.0, (k,), votes, (3,))
        for name in (f"pass@{k}", "maj@3"):
            low, high = summary[f"{name}_ci"]
            assert [low, high] == pytest.approx(list(wilson_interval(9 * summary[name], 9)))
            assert high - low > 0.25 and low <= summary[name] <= high


def test_intervals_of_clustered_samples_have_their_coverage():
    """Tasks of very different difficulty, eight samples each: an interval over samples would be far too small."""
    draws, held, held_pass, num = random.Random(1), 0, 0, 400
    for _ in range(num):
        rows = [
            ("a", str(i), [float(draws.random() < rate) for _ in range(8)])
            for i, rate in enumerate(draws.random() ** 3 for _ in range(40))
        ]
        summary = summarise_eval(rows, 1.0, (1, 4))
        held += summary["ci"][0] <= 1 / 4 <= summary["ci"][1]  # E[u^3]
        truth = 1 - sum(math.comb(4, i) * (-1) ** i / (3 * i + 1) for i in range(5))  # 1 - E[(1 - u^3)^4]
        held_pass += summary["pass@4_ci"][0] <= truth <= summary["pass@4_ci"][1]
    assert 0.91 < held / num < 0.98 and 0.91 < held_pass / num < 0.98

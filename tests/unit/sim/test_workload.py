from __future__ import annotations

import numpy as np
import pytest

from rollover.config import PlanConfig
from rollover.sim.workload import Workload


def drawn(group_size: int = 4, longest: int = 10**6, observed=(), **plan) -> np.ndarray:
    workload = Workload(PlanConfig.model_validate(plan), group_size, longest, observed)
    return np.array([workload.lengths(task) for task in range(8192)])


@pytest.mark.parametrize("shape", ["lognormal", "pareto"])
def test_median_and_99th_percentile_are_those_asked_for(shape: str) -> None:
    lengths = drawn(lengths=shape, median_tokens=64, p99_tokens=512)
    assert np.median(lengths) == pytest.approx(64, rel=0.05)
    assert np.quantile(lengths, 0.99) == pytest.approx(512, rel=0.15)


def test_a_pareto_tail_is_heavier() -> None:
    assert drawn(lengths="pareto").max() > 3 * drawn(lengths="lognormal").max()


def test_bimodal_has_its_share_of_long_answers() -> None:
    lengths = drawn(lengths="bimodal", median_tokens=50, p99_tokens=5000, long_share=0.2)
    assert np.mean(lengths > 1000) == pytest.approx(0.2, abs=0.02)
    assert not np.any((lengths > 300) & (lengths < 1000))


def test_siblings_are_correlated_as_asked() -> None:
    for wanted in (0.0, 0.6):
        logs = np.log(drawn(sibling_correlation=wanted, median_tokens=6400, p99_tokens=51200))
        assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(wanted, abs=0.05)


def test_observed_groups_come_back() -> None:
    lengths = drawn(group_size=3, observed=[[5, 6], [900, 901, 902]])
    assert {tuple(sorted(set(row) | {0})) for row in lengths.tolist()} <= {
        tuple(sorted({0, *part}))
        for part in ({5}, {6}, {5, 6}, {900}, {901}, {902}, {900, 901}, {901, 902}, {900, 902}, {900, 901, 902})
    }


def test_a_task_has_the_same_lengths_whoever_asks_and_when() -> None:
    one, other = (Workload(PlanConfig(), 4, 1000) for _ in range(2))
    far = one.lengths(5000)
    assert [one.lengths(i) for i in (3, 1500, 3)] == [other.lengths(i) for i in (3, 1500, 3)]
    assert other.lengths(5000) == far and max(map(max, [far])) <= 1000
    assert Workload(PlanConfig(seed=1), 4, 1000).lengths(3) != one.lengths(3)


def test_a_99th_percentile_below_the_median_is_refused() -> None:
    with pytest.raises(ValueError, match="plan.p99_tokens = 10 must be above plan.median_tokens = 64"):
        Workload(PlanConfig(p99_tokens=10), 4, 100)

"""The numbers of a metrics row that are computed from a step's batch and the engine's counters."""

from __future__ import annotations

import math

import pytest

from local_trainer import build_batch
from rollover.config import AlgorithmConfig
from rollover.run.batch_metrics import reward_metrics, rollout_metrics, speed_metrics, staleness_metrics, waste_metrics
from rollover.track.health import Health
from rollover.track.metrics import aggregate, validate
from rollover.trainer.batch import Batch
from rollover.types import Group
from samples import group, rollout, segment


def groups() -> list[Group]:
    """At trainer version 7. Group 0 was READY at 7, group 1 at 6."""
    mixed = [segment([1] * 6, version=4), segment([2] * 3, version=9, trainable=False), segment([3] * 4, version=7)]
    return [
        group(0, [rollout(0, 0, 1.0, mixed), rollout(0, 1, 0.0, [segment([4] * 5, version=7)])]),
        group(1, [rollout(1, 0, 1.0, [segment([5] * 5, version=6)]), rollout(1, 1, None, [segment([6], version=0)])]),
    ]


def test_staleness_of_tokens_and_of_rollouts() -> None:
    metrics = staleness_metrics(build_batch(groups(), AlgorithmConfig()), 7, {0: 7, 1: 6})
    ages = [3] * 6 + [0] * 4 + [0] * 5 + [1] * 5  # neither environment tokens nor those without a reward
    assert metrics["staleness/max"] == 3 and metrics["staleness/mean"] == pytest.approx(sum(ages) / 20)
    assert [metrics[f"staleness/p{q}"] for q in (50, 95, 99)] == [1, 3, 3]
    assert metrics["staleness/rollout_mean"] == pytest.approx((3 + 0 + 1) / 3)
    assert metrics["staleness/rollout_p95"] == 3
    assert metrics["staleness/in_flight_mean"] == pytest.approx(18 / 20)
    assert metrics["staleness/in_queue_mean"] == pytest.approx(5 / 20)
    validate(metrics)


def test_without_a_history_there_is_no_split() -> None:
    batch = build_batch(groups(), AlgorithmConfig())
    for known in ({}, {0: 7}):
        metrics = staleness_metrics(batch, 7, known)
        assert metrics["staleness/max"] == 3 and not any("_mean" in k and "in_" in k for k in metrics)
    nothing = staleness_metrics(Batch([]), 7, {})
    assert nothing["staleness/max"] == nothing["staleness/p99"] == 0


def test_versions_in_a_rollout() -> None:
    metrics = rollout_metrics(groups())
    assert metrics["rollouts/versions_mean"] == pytest.approx(5 / 4) and metrics["rollouts/partial_share"] == 1 / 4


def scored(group_id: int, *scores: float | None) -> Group:
    return group(group_id, [rollout(group_id, i, score, [segment([1])]) for i, score in enumerate(scores)])


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([scored(0, 1.0), scored(1, 1.0)], math.nan),
        ([scored(0, 1.0, None), scored(1, None, None)], math.nan),
        ([scored(0, 1.0), scored(1, 1.0, 0.0)], 0.0),
        ([scored(0, 1.0), scored(1, 1.0, 1.0), scored(2, 1.0, 0.0, None)], 0.5),
    ],
    ids=["one rollout each", "one reward each", "one and two", "one of two"],
)
def test_group_without_two_rewards_has_no_zero_variance(groups: list[Group], share: float) -> None:
    assert reward_metrics(groups)["groups/zero_variance"] == pytest.approx(share, nan_ok=True)
    assert not [w for step in range(1, 20) for w in Health().look({"step": step, **reward_metrics(groups)})]


ENGINE = {"engine/prefill_tokens": 50.0, "engine/reprefill_tokens": 150.0}
ROW = {
    "tokens/step_generated": 400.0,
    "tokens/step_trained": 300.0,
    "tokens/generated": 1000.0,
    "tokens/dropped": 100.0,
    "waste/dropped_tokens": 40.0,
    "time/generate_s": 8.0,
    "time/train_s": 1.0,
    "time/step_s": 10.0,
}


def test_waste_in_tokens_and_seconds() -> None:
    metrics = waste_metrics(ENGINE | {"engine/prefill_s": 2.0}, ROW)
    assert metrics["waste/reprefilled_tokens"] == 150 and metrics["waste/reprefilled_share"] == 150 / 600
    assert metrics["waste/reprefilled_s"] == pytest.approx(1.5), "three quarters of the prefill"
    assert metrics["waste/dropped_share"] == 0.1
    assert metrics["waste/dropped_s"] == pytest.approx(40 / speed_metrics(ROW)["speed/generated_tokens_per_s"])
    validate(metrics | ROW)
    assert aggregate([ROW | metrics, ROW | metrics])["waste/reprefilled_share"] == 0.25


def test_without_a_measured_speed_there_is_no_estimate() -> None:
    assert "waste/reprefilled_s" not in waste_metrics(ENGINE, ROW), "an engine that cannot time its prefill"
    nothing = waste_metrics({"engine/prefill_tokens": 0.0, "engine/reprefill_tokens": 0.0},
                            ROW | {"tokens/step_generated": 0.0, "tokens/generated": 0.0})  # fmt: skip
    assert nothing == {"waste/reprefilled_tokens": 0, "tokens/step_processed": 0}
    assert all(math.isfinite(v) for v in nothing.values())

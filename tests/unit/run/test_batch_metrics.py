"""The numbers of a metrics row that are computed from a step's batch, its roles and the engine's counters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from local_trainer import build_batch
from rollover import Played, ready_episodes
from rollover.algorithms.grouping import Grouping
from rollover.config import AlgorithmConfig, Config, ReplayConfig, WorkflowConfig
from rollover.run.batch_metrics import (
    mask_metrics,
    reward_metrics,
    role_metrics,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
    turn_metrics,
    waste_metrics,
)
from rollover.track.health import Health
from rollover.track.metrics import aggregate, validate
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.types import Group, Reward, StopReason, Task
from samples import group, rollout, segment
from unit.rollout.world import make_segment


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


TASK = Task("t0", "s", "r", prompt="x")


def of_roles(*episodes: dict[str, float | None]) -> Group:
    """Of the score of each role; solvers have two contexts of 2 tokens, others one."""

    def played(role: str, score: float | None) -> Played:
        contexts = [((5,), [make_segment(2, 0, StopReason.EOS)])] * (2 if role == "solver" else 1)
        return Played(contexts, Reward(score, error=None if score is not None else "e"), role)

    return ready_episodes(0, TASK, [[played(*item) for item in episode.items()] for episode in episodes])


def figures(of: Group, **more: Any) -> dict[str, float]:
    """Of a step that trains this group."""
    algorithm = AlgorithmConfig(**{"advantage": "dr_grpo", **more})
    return role_metrics([of], build_batch([of], algorithm), Grouping(WorkflowConfig()))


def test_each_role_has_metrics_and_counts_a_trajectory_once() -> None:
    of = of_roles({"solver": 3.0, "judge": 1.0}, {"solver": 1.0, "judge": 1.0}, {"solver": 2.0, "judge": None})
    metrics = figures(of)
    assert metrics == pytest.approx(
        {
            "roles/solver/reward_mean": 2.0, "roles/solver/reward_std": (2 / 3) ** 0.5,
            "roles/solver/advantage_mean": 0.0, "roles/solver/advantage_std": (2 / 3) ** 0.5,
            "roles/solver/advantage_zero_share": 1 / 3,
            "roles/judge/reward_mean": 1.0, "roles/judge/reward_std": 0.0,
            "roles/judge/advantage_mean": 0.0, "roles/judge/advantage_std": 0.0,
            "roles/judge/advantage_zero_share": 1.0,
        }
    )  # fmt: skip
    validate(metrics)
    rewards = reward_metrics([of])
    assert rewards["reward/mean"] == pytest.approx(8 / 5) and rewards["reward/missing"] == 1


def test_source_named_like_a_role_has_its_own_metrics() -> None:
    """The task's source is "s": its mean is over both roles."""
    of = of_roles({"s": 3.0, "judge": 1.0}, {"s": 1.0, "judge": 1.0})
    row = reward_metrics([of]) | figures(of)
    assert row["reward/s/mean"] == 1.5 and row["roles/s/reward_mean"] == 2.0


def test_score_without_comparison_counts_for_its_role() -> None:
    """The judge's only score: its tokens leave the loss, and it is in the role's mean as it is in reward/mean."""
    of = of_roles({"solver": 3.0, "judge": 1.0}, {"solver": 1.0, "judge": None})
    metrics = figures(of)
    assert metrics["roles/judge/reward_mean"] == 1.0 and math.isnan(metrics["roles/judge/advantage_mean"])
    assert reward_metrics([of])["reward/mean"] == pytest.approx((2 * metrics["roles/solver/reward_mean"] + 1.0) / 3)


def test_one_role_has_none() -> None:
    assert figures(of_roles({"solver": 1.0}, {"solver": 0.0})) == {}


def builder(**roles: dict[str, Any]) -> BatchBuilder:
    config = Config.model_validate({"workflow": {"function": "a.py:b", "roles": roles}})
    return BatchBuilder(config, ReplayBuffer(ReplayConfig(), 0))


def test_role_missing_in_the_first_step_is_refused() -> None:
    of = of_roles({"solver": 1.0}, {"solver": 0.0})
    with pytest.raises(ValueError, match=r"workflow.roles.judge: no trajectory .*remove \[workflow.roles.judge\]"):
        builder(solver={}, judge={}).build([of], 0)
    assert builder(solver={}, judge={}).build([of], 1).samples, "later it may be one that seldom plays"


def test_a_step_of_roles_that_are_not_trained_says_so() -> None:
    of = of_roles({"solver": 1.0, "judge": 1.0}, {"solver": 0.0, "judge": None})
    with pytest.raises(ValueError, match=r"4 are of a role .*trained = true.*1 have no reward"):
        builder(solver={"trained": False}, judge={}, title={}).build([of], 1)
    batch = builder(solver={}, judge={"trained": False}).build([of], 0)
    assert mask_metrics(batch) == {"train/masked_rollouts": 2, "train/masked_tokens": 4}


def test_untrained_role_is_in_no_metric_of_trained_ones() -> None:
    of = of_roles({"solver": 1.0, "title": 9.0}, {"solver": 3.0, "title": None})
    grouping = Grouping(WorkflowConfig.model_validate({"roles": {"solver": {}, "title": {"trained": False}}}))
    found = reward_metrics([of], grouping)
    assert found["reward/mean"] == found["reward/s/mean"] == 2.0 and found["reward/missing"] == 0
    differ = of_roles({"solver": 1.0, "title": 0.0}, {"solver": 1.0, "title": 2.0})
    assert reward_metrics([differ], grouping)["groups/zero_variance"] == 1.0


@pytest.mark.parametrize(
    ("episodes", "share"),
    [
        ([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}], 1.0),  # scores of different roles are not compared
        ([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}], 0.0),
        ([{"a": 1.0, "b": 0.0}, {"b": 0.0}], 1.0),  # a has nothing to be compared with
        ([{"solver": 1.0}, {"a": 0.0}], None),  # nor has either, two contexts or not
    ],
)
def test_a_group_has_no_variance_where_no_role_has_one(episodes: list[dict], share: float | None) -> None:
    found = reward_metrics([of_roles(*episodes)])["groups/zero_variance"]
    assert found == share if share is not None else math.isnan(found)


def test_the_share_of_turns_that_continued_a_rollout() -> None:
    """Of three turns and of two, apart and merged; of those alone there are none to count."""
    turn = make_segment(2, 0, StopReason.EOS)
    written = replace(make_segment(1, 0, StopReason.PAUSED), trainable=False)

    def played(*lengths: int) -> Played:
        """A context of so many turns each."""
        return Played([((5,), [turn, *[written, turn] * (n - 1)]) for n in lengths], Reward(1.0))

    def figures(*episodes: Played) -> dict[str, float]:
        found = turn_metrics([ready_episodes(0, TASK, [[one] for one in episodes])])
        validate(found)
        return found

    assert figures(played(3), played(2)) == {"turns/mean": 2.5, "turns/max": 3, "turns/merged_share": 1.0}
    assert figures(played(1, 1, 1), played(1, 1))["turns/merged_share"] == 0.0
    assert figures(played(2, 1), played(1))["turns/merged_share"] == 0.5
    assert figures(played(1), played(1)) == {"turns/mean": 1.0, "turns/max": 1}

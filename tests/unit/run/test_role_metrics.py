"""Figures of roles, where a batch has more than one; and roles that no trajectory has."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from local_trainer import build_batch
from rollover import Played, ready_episodes
from rollover.algorithms.grouping import Grouping
from rollover.config import AlgorithmConfig, Config, ReplayConfig, WorkflowConfig
from rollover.run.batch_metrics import mask_metrics, reward_metrics, role_metrics, turn_metrics
from rollover.track.metrics import validate
from rollover.trainer.batch import BatchBuilder
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.types import Group, Reward, StopReason, Task
from unit.rollout.world import make_segment

TASK = Task("t0", "s", "r", prompt="x")


def group(*episodes: dict[str, float | None]) -> Group:
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
    of = group({"solver": 3.0, "judge": 1.0}, {"solver": 1.0, "judge": 1.0}, {"solver": 2.0, "judge": None})
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
    of = group({"s": 3.0, "judge": 1.0}, {"s": 1.0, "judge": 1.0})
    row = reward_metrics([of]) | figures(of)
    assert row["reward/s/mean"] == 1.5 and row["roles/s/reward_mean"] == 2.0


def test_score_without_comparison_counts_for_its_role() -> None:
    """The judge's only score: its tokens leave the loss, and it is in the role's mean as it is in reward/mean."""
    of = group({"solver": 3.0, "judge": 1.0}, {"solver": 1.0, "judge": None})
    metrics = figures(of)
    assert metrics["roles/judge/reward_mean"] == 1.0 and math.isnan(metrics["roles/judge/advantage_mean"])
    assert reward_metrics([of])["reward/mean"] == pytest.approx((2 * metrics["roles/solver/reward_mean"] + 1.0) / 3)


def test_one_role_has_none() -> None:
    assert figures(group({"solver": 1.0}, {"solver": 0.0})) == {}


def builder(**roles: dict[str, Any]) -> BatchBuilder:
    config = Config.model_validate({"workflow": {"function": "a.py:b", "roles": roles}})
    return BatchBuilder(config, ReplayBuffer(ReplayConfig(), 0))


def test_role_missing_in_the_first_step_is_refused() -> None:
    of = group({"solver": 1.0}, {"solver": 0.0})
    with pytest.raises(ValueError, match=r"workflow.roles.judge: no trajectory .*remove \[workflow.roles.judge\]"):
        builder(solver={}, judge={}).build([of], 0)
    assert builder(solver={}, judge={}).build([of], 1).samples, "later it may be one that seldom plays"


def test_a_step_of_roles_that_are_not_trained_says_so() -> None:
    of = group({"solver": 1.0, "judge": 1.0}, {"solver": 0.0, "judge": None})
    with pytest.raises(ValueError, match=r"4 are of a role .*trained = true.*1 have no reward"):
        builder(solver={"trained": False}, judge={}, title={}).build([of], 1)
    batch = builder(solver={}, judge={"trained": False}).build([of], 0)
    assert mask_metrics(batch) == {"train/masked_rollouts": 2, "train/masked_tokens": 4}


def test_untrained_role_is_in_no_metric_of_trained_ones() -> None:
    of = group({"solver": 1.0, "title": 9.0}, {"solver": 3.0, "title": None})
    grouping = Grouping(WorkflowConfig.model_validate({"roles": {"solver": {}, "title": {"trained": False}}}))
    found = reward_metrics([of], grouping)
    assert found["reward/mean"] == found["reward/s/mean"] == 2.0 and found["reward/missing"] == 0
    differ = group({"solver": 1.0, "title": 0.0}, {"solver": 1.0, "title": 2.0})
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
    found = reward_metrics([group(*episodes)])["groups/zero_variance"]
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

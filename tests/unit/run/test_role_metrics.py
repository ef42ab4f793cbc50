"""Figures of roles, where a batch has more than one; and roles that no trajectory has."""

from __future__ import annotations

from typing import Any

import pytest

from rollover import Played, ready_episodes
from rollover.config import AlgorithmConfig, Config, ReplayConfig
from rollover.run.batch_metrics import mask_metrics, reward_metrics, role_metrics
from rollover.trainer.batch import build_batch
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.trainer.step_batch import StepBatchBuilder
from rollover.types import Group, Reward, StopReason, Task
from unit.rollout.world import make_segment

TASK = Task("t0", "s", "r", prompt="x")


def group(*episodes: dict[str, float | None]) -> Group:
    """Of the score of each role; solvers have two contexts of 2 tokens, others one."""

    def played(role: str, score: float | None) -> Played:
        contexts = [((5,), [make_segment(2, 0, StopReason.EOS)])] * (2 if role == "solver" else 1)
        return Played(contexts, Reward(score, error=None if score is not None else "e"), role)

    return ready_episodes(0, TASK, [[played(*item) for item in episode.items()] for episode in episodes])


def test_each_role_has_its_own_figures_and_a_trajectory_counts_once() -> None:
    of = group({"solver": 3.0, "judge": 1.0}, {"solver": 1.0, "judge": 1.0}, {"solver": 2.0, "judge": None})
    batch = build_batch([of], AlgorithmConfig(advantage="dr_grpo"))
    metrics = role_metrics(batch)
    assert metrics == pytest.approx(
        {
            "reward/solver/mean": 2.0, "reward/solver/std": (2 / 3) ** 0.5,
            "advantage/solver/mean": 0.0, "advantage/solver/std": (2 / 3) ** 0.5, "advantage/solver/zero_share": 1 / 3,
            "reward/judge/mean": 1.0, "reward/judge/std": 0.0,
            "advantage/judge/mean": 0.0, "advantage/judge/std": 0.0, "advantage/judge/zero_share": 1.0,
        }
    )  # fmt: skip
    rewards = reward_metrics([of])
    assert rewards["reward/mean"] == pytest.approx(8 / 5) and rewards["reward/missing"] == 1


def test_one_role_has_none() -> None:
    assert role_metrics(build_batch([group({"solver": 1.0}, {"solver": 0.0})], AlgorithmConfig())) == {}


def builder(**roles: dict[str, Any]) -> StepBatchBuilder:
    config = Config.model_validate({"workflow": {"roles": roles}})
    return StepBatchBuilder(config, ReplayBuffer(ReplayConfig(), 0))


def test_a_role_that_no_trajectory_of_the_first_step_has_is_refused() -> None:
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


def test_rewards_of_a_role_that_is_not_trained_are_in_no_figure_of_trained_ones() -> None:
    of = group({"solver": 1.0, "title": 9.0}, {"solver": 3.0, "title": None})
    found = reward_metrics([of], {"title"})
    assert found["reward/mean"] == found["reward/s/mean"] == 2.0 and found["reward/missing"] == 0
    assert reward_metrics([group({"a": 1.0, "title": 0.0}, {"a": 1.0, "title": 2.0})], {"title"})[
        "groups/zero_variance"
    ]

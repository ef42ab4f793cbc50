"""Groups to samples: order, masks, baselines, missing rewards."""

from __future__ import annotations

import numpy as np
import pytest
from samples import group, rollout, segment

from rollover.config import AlgorithmConfig
from rollover.train.batch import ADVANTAGES, build_batch


def test_streams_of_a_rollout_with_several_origins() -> None:
    segments = [
        segment([10, 11], version=3, logprob=-1.0),
        segment([20, 21, 22], version=4, trainable=False),
        segment([], version=4),
        segment([12], version=5, logprob=-2.0),
    ]
    batch = build_batch(
        [group(0, [rollout(0, 0, 1.0, segments), rollout(0, 1, 0.0, [segment([9])])])],
        AlgorithmConfig(advantage="dr_grpo"),
    )
    first = batch.samples[0]
    assert first.token_ids.tolist() == [10, 11, 20, 21, 22, 12] and first.token_ids.dtype == np.int32
    assert first.mask.tolist() == [True, True, False, False, False, True]
    assert first.versions.tolist() == [3, 3, 4, 4, 4, 5]
    assert first.behavior_logprobs.tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, -2.0]
    assert first.advantages[first.mask].tolist() == [0.5, 0.5, 0.5]
    assert batch.samples[1].advantages.tolist() == [-0.5]
    assert batch.num_loss_tokens == 4


def test_order_is_group_id_then_sibling() -> None:
    groups = [group(g, [rollout(g, i, float(i), [segment([8])]) for i in range(2)]) for g in (9, 2, 5)]
    batch = build_batch(groups, AlgorithmConfig())
    assert [s.rollout_id for s in batch.samples] == ["2-0", "2-1", "5-0", "5-1", "9-0", "9-1"]


def test_missing_rewards_are_masked_and_leave_the_baseline_alone() -> None:
    scores = [1.0, None, 0.0, 0.5]
    batch = build_batch(
        [group(0, [rollout(0, i, s, [segment([8, 9])]) for i, s in enumerate(scores)])],
        AlgorithmConfig(advantage="dr_grpo"),
    )
    assert [s.mask.any() for s in batch.samples] == [True, False, True, True]
    assert [float(s.advantages[0]) for s in batch.samples] == [0.5, 0.0, -0.5, 0.0]


def test_greedy_tokens_are_never_trained_but_count_in_the_baseline() -> None:
    rollouts = [rollout(0, i, 1.0 - i, [segment([8], temperature=t)]) for i, t in enumerate((0.0, 0.7))]
    greedy, sampled = build_batch([group(0, rollouts)], AlgorithmConfig(advantage="dr_grpo")).samples
    assert not greedy.mask.any() and greedy.temperature > 0
    assert sampled.mask.all() and sampled.temperature == pytest.approx(0.7)
    assert sampled.advantages.tolist() == [-0.5]


def test_a_rollout_without_tokens_counts_in_the_baseline_only() -> None:
    rollouts = [rollout(0, 0, 1.0, [segment([8])]), rollout(0, 1, 0.0, [segment([])])]
    (only,) = build_batch([group(0, rollouts)], AlgorithmConfig(advantage="dr_grpo")).samples
    assert only.rollout_id == "0-0" and only.advantages.tolist() == [0.5]


def test_every_configured_estimator_exists_and_is_used() -> None:
    rollouts = [rollout(0, i, s, [segment([8])]) for i, s in enumerate((3.0, 0.0, 0.0))]
    expected = {"grpo": 2 / (3**0.5 + 1e-4), "dr_grpo": 2.0, "rloo": 3.0}
    assert expected.keys() == ADVANTAGES.keys()
    for name, value in expected.items():
        config = AlgorithmConfig.model_validate({"advantage": name})
        first = build_batch([group(0, rollouts)], config).samples[0]
        assert float(first.advantages[0]) == pytest.approx(value, rel=1e-5)
    population = AlgorithmConfig(advantage="grpo", advantage_std="population")
    got = float(build_batch([group(0, rollouts)], population).samples[0].advantages[0])
    assert got == pytest.approx(2 / (2**0.5 + 1e-4), rel=1e-5)


def test_tokens_older_than_the_bound_are_context_only() -> None:
    """on_stale = "mask": they leave the loss, their rollout stays in the baseline."""
    old = rollout(0, 0, 1.0, [segment([10, 11], version=1)])
    mixed = rollout(0, 1, 0.0, [segment([12], version=1), segment([13, 14], version=4)])
    first, second = build_batch([group(0, [old, mixed])], AlgorithmConfig(advantage="dr_grpo"), 3).samples
    assert not first.mask.any() and second.mask.tolist() == [False, True, True]
    assert second.advantages[second.mask].tolist() == [-0.5, -0.5]
    assert second.token_ids.tolist() == [12, 13, 14]

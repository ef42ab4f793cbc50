"""Shaping: what is added to scores where they are trained, and that it is nowhere else."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from local_trainer import build_batch
from rollover.algorithms.filters import first_match, group_filters
from rollover.algorithms.shaping import Moments, Shaping, overlong
from rollover.config import AlgorithmConfig, Config, FiltersConfig, RewardsConfig
from rollover.run.batch_metrics import reward_metrics
from rollover.tasks.reroll import has_failed
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.types import Group, Rollout, StopReason
from samples import group, rollout, segment

LIMIT = 10
DR_GRPO = AlgorithmConfig(advantage="dr_grpo")


def of(
    score: float | None,
    num_tokens: int = 1,
    sibling: int = 0,
    group_id: int = 0,
    shaping: dict[str, float] | None = None,
) -> Rollout:
    made = rollout(group_id, sibling, score, [segment([8] * num_tokens)])
    assert made.reward is not None
    made.reward = replace(made.reward, shaping=shaping or {})
    return made


def build(groups: list[Group], algorithm: AlgorithmConfig = DR_GRPO, version: int = 0, **rewards: object) -> Batch:
    shaping = Shaping(RewardsConfig.model_validate(rewards), LIMIT)
    return build_batch(groups, algorithm, shaping=shaping, version=version)


def advantages(batch: Batch) -> list[float]:
    return [float(s.advantages[0]) for s in batch.samples]


def test_overlong_is_equation_13_of_dapo() -> None:
    """R = 0 up to L_max - L_cache, then ((L_max - L_cache) - |y|) / L_cache, then -1."""
    assert [overlong(n, 10, 4, 1.0) for n in (1, 6, 7, 8, 9, 10, 12)] == [0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert overlong(9, 10, 4, 0.5) == -0.375
    assert math.copysign(1, overlong(1, 10, 4, 1.0)) == 1, "no -0.0"


def test_it_is_added_to_what_is_trained_and_to_nothing_else() -> None:
    rollouts = [of(1.0, 10, 0), of(1.0, 1, 1), of(1.0, 8, 2), of(1.0, 1, 3)]
    g = group(0, rollouts)
    batch = build([g], overlong_buffer_tokens=4)
    mean = -1.5 / 4
    assert advantages(batch) == pytest.approx([-1 - mean, -mean, -0.5 - mean, -mean])
    assert batch.credited.shaped.metrics == pytest.approx({
        "shaping/overlong/mean": mean, "shaping/overlong/share": 0.5, "shaping/reward_mean": 1 + mean,
        "shaping/reward_std": float(np.std([0, 1, 0.5, 1])),
    })  # fmt: skip
    row = reward_metrics([g])
    assert row["reward/mean"] == 1.0 and row["reward/std"] == 0.0 and row["groups/zero_variance"] == 1.0
    filters = group_filters(FiltersConfig(pass_rate_below=1.0))
    assert first_match(g, filters) == ("pass_rate", "pass rate 1 is not below 1"), "all have passed"
    assert not has_failed(g, 0.0) and [r.reward.score for r in rollouts if r.reward] == [1.0] * 4
    assert build([g]).credited.shaped.metrics == {} and advantages(build([g])) == [0.0] * 4


def test_a_rollout_that_repeats_itself_is_punished() -> None:
    rollouts = [of(0.5, 1, 0), of(0.5, 1, 1)]
    rollouts[0].stop_reason = StopReason.REPETITION
    batch = build([group(0, rollouts)], repetition_penalty=0.5)
    assert advantages(batch) == [-0.25, 0.25]
    assert batch.credited.shaped.metrics["shaping/repetition/mean"] == -0.25


def test_a_function_of_shaping_is_added_and_can_be_weighed() -> None:
    rollouts = [of(1.0, 1, i, shaping={"format": value}) for i, value in enumerate((0.0, -0.5, 0.0))]
    batch = build([group(0, rollouts)])
    assert advantages(batch) == pytest.approx([1 / 6, -1 / 3, 1 / 6])
    weights = {"score": 0.0, "format": 2.0}
    algorithm = AlgorithmConfig(advantage="sum_then_normalize", advantage_std="none", reward_weights=weights)
    assert advantages(build([group(0, rollouts)], algorithm)) == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_clipping_is_the_last() -> None:
    batch = build([group(0, [of(s, 1, i) for i, s in enumerate((5.0, 0.5, -7.0))])], clip_range=[-1.0, 1.0])
    assert advantages(batch) == pytest.approx([1 - 1 / 6, 0.5 - 1 / 6, -1 - 1 / 6])
    assert batch.credited.shaped.metrics["shaping/clipped_share"] == pytest.approx(2 / 3)


def test_missing_rewards_stay_missing() -> None:
    batch = build([group(0, [of(None, 10, 0), of(1.0, 1, 1), of(0.0, 1, 2)])], overlong_buffer_tokens=4)
    assert [s.mask.any() for s in batch.samples] == [False, True, True]
    assert batch.credited.shaped.metrics["shaping/overlong/share"] == 0.0


def test_the_greedy_baseline_is_shaped_as_its_siblings_are() -> None:
    greedy, sampled = of(1.0, 10, 0), of(1.0, 1, 1)
    greedy.greedy = True
    batch = build([group(0, [greedy, sampled])], AlgorithmConfig(advantage="remax"), overlong_buffer_tokens=4)
    assert advantages(batch) == [1.0], "1 - (1 - 1)"
    assert batch.credited.shaped.metrics["shaping/reward_mean"] == 1.0, "of what is trained"


# Running statistics


def test_moments_are_those_of_all_values() -> None:
    draw, values, moments = np.random.default_rng(0), [], Moments()
    for size in (1, 3, 0, 7, 64):
        some = draw.normal(3, 2, size).tolist()
        values += some
        moments = moments.merged_with(Moments.from_values(some))
    assert moments.count == len(values) and moments.mean == pytest.approx(statistics.fmean(values))
    assert moments.deviation == pytest.approx(statistics.stdev(values))
    assert Moments.from_values([2.0]).deviation == Moments.from_values([2.0, 2.0]).deviation == 1.0, (
        "nothing to divide by"
    )


@pytest.mark.parametrize("kind", ["scale", "whiten"])
def test_rewards_are_divided_by_the_running_deviation(kind: str) -> None:
    shaping = Shaping(RewardsConfig.model_validate({"running_norm": kind}), LIMIT)
    seen = []
    for version, scores in enumerate(([1.0, 3.0], [10.0, 2.0], [4.0, 4.0])):
        seen += scores
        groups = [group(0, [of(s, 1, i) for i, s in enumerate(scores)])]
        batch = build_batch(groups, DR_GRPO, shaping=shaping, version=version)
        std, mean = statistics.stdev(seen), statistics.fmean(seen)
        assert advantages(batch) == pytest.approx([(s - statistics.fmean(scores)) / std for s in scores])
        shift = mean if kind == "whiten" else 0.0
        assert batch.credited.shaped.metrics["shaping/reward_mean"] == pytest.approx(
            (statistics.fmean(scores) - shift) / std
        )
        assert batch.credited.shaped.metrics["shaping/running_mean"] == pytest.approx(mean)


def test_rebuilt_step_uses_statistics_before_it() -> None:
    """Its batch may be built twice (replay), and a lost step is trained again."""

    def built(shaping: Shaping, version: int) -> list[float]:
        scores = [float(version), version * 2.0 + 1]
        groups = [group(0, [of(s, 1, i) for i, s in enumerate(scores)])]
        return advantages(build_batch(groups, DR_GRPO, shaping=shaping, version=version))

    rewards = RewardsConfig(running_norm="scale")
    shaping = Shaping(rewards, LIMIT)
    first = [built(shaping, version) for version in range(5)]
    assert first[4] == built(shaping, 4)
    saved = shaping.state_dict()
    assert [built(shaping, version) for version in (2, 3, 4)] == first[2:], "rolled back"
    assert shaping.state_dict() == saved
    resumed, fresh = Shaping(rewards, LIMIT), Shaping(rewards, LIMIT)
    resumed.load_state_dict(saved)
    fresh.load_state_dict({})
    assert built(resumed, 5) == built(shaping, 5) != built(fresh, 5)


def test_replayed_groups_are_not_counted_twice() -> None:
    shaping = Shaping(RewardsConfig(running_norm="scale"), LIMIT)
    groups = [group(g, [of(float(i + g), 1, i, g) for i in range(2)]) for g in range(2)]
    batch = build_batch(groups, DR_GRPO, shaping=shaping, replayed={1: 0})
    assert batch.credited.shaped.metrics["shaping/running_mean"] == 0.5
    assert set(batch.credited.shaped.rewards) == {r.rollout_id for g in groups for r in g.rollouts}


def test_a_step_is_built_as_the_configuration_says() -> None:
    config = Config.model_validate({
        "tasks": {"sources": [{"kind": "reasoning_gym", "name": "chain_sum"}]}, "rollout": {"max_new_tokens": LIMIT},
        "rewards": {"overlong_buffer_tokens": 4, "overlong_penalty": 2.0}, "algorithm": {"advantage": "dr_grpo"},
    })  # fmt: skip
    builder = BatchBuilder(config, ReplayBuffer(config.replay, 0))
    batch = builder.build([group(0, [of(1.0, 10, 0), of(1.0, 1, 1)])], 0)
    assert advantages(batch) == [-1.0, 1.0]

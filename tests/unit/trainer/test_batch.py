"""Groups to samples: order, masks, baselines, missing rewards."""

from __future__ import annotations

import numpy as np
import pytest

from local_trainer import build_batch
from rollover.algorithms.credit import Credit
from rollover.algorithms.filters import mask_overlong, mask_truncated
from rollover.config import AlgorithmConfig, WorkflowConfig
from rollover.run.batch_metrics import mask_metrics
from rollover.trainer.batch import make_batch
from rollover.types import Reward, StopReason
from samples import group, rollout, segment


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


def test_a_number_that_is_no_token_id_is_not_cut_down_to_one() -> None:
    far = segment([8, 9])
    object.__setattr__(far, "token_ids", np.array([8, 2**32 + 9]))
    with pytest.raises(ValueError, match="rollout 0-0: 4294967305 is not a token id"):
        build_batch([group(0, [rollout(0, 0, 1.0, [far])])], AlgorithmConfig())
    with pytest.raises(ValueError, match="the prompt of rollout 0-0: 4294967305 is not a token id"):
        build_batch([group(0, [rollout(0, 0, 1.0, [segment([8])])], (2**32 + 9,))], AlgorithmConfig())


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


def test_greedy_rollouts_are_untrained_remax_baselines() -> None:
    temperatures = (0.7, 0.7, 0.0)
    rollouts = [rollout(0, i, [3.0, 1.0, 0.5][i], [segment([8], temperature=t)]) for i, t in enumerate(temperatures)]
    for name, expected in {"dr_grpo": [1.0, -1.0], "remax": [2.5, 0.5]}.items():
        samples = build_batch([group(0, rollouts)], AlgorithmConfig(advantage=name)).samples
        assert [s.rollout_id for s in samples] == ["0-0", "0-1"] and all(s.mask.all() for s in samples)
        assert [float(s.advantages[0]) for s in samples] == expected


def test_rewards_are_weighted_by_name() -> None:
    def scored(sibling: int, score: float, style: float):
        out = rollout(0, sibling, score, [segment([8])])
        out.reward = Reward(score, {"style": style})
        return out

    rollouts = [scored(0, 1.0, 0.0), scored(1, 0.0, 4.0)]
    weights = {"score": 1.0, "style": 0.5}
    for name in ("sum_then_normalize", "gdpo"):
        plain = {} if name == "gdpo" else {"advantage_std": "none"}
        config = AlgorithmConfig.model_validate({"advantage": name, "reward_weights": weights, **plain})
        first, second = (float(s.advantages[0]) for s in build_batch([group(0, rollouts)], config).samples)
        # The sum (1 against 2) says the second is better; each on its own scale (1 - 0.5 against -1 + 0.5), the first.
        assert (first > 0 > second) == (name == "gdpo")
    with pytest.raises(ValueError, match="names 'length', which the reward .* it has score, style"):
        config = AlgorithmConfig(advantage="gdpo", reward_weights={"length": 1.0})
        build_batch([group(0, rollouts)], config)


def test_gae_puts_the_reward_at_the_last_loss_token() -> None:
    segments = [segment([8, 9]), segment([10], trainable=False), segment([11, 12]), segment([13], trainable=False)]
    (only,) = build_batch([group(0, [rollout(0, 0, 2.0, segments)])], AlgorithmConfig(advantage="gae")).samples
    assert only.advantages.tolist() == [0, 0, 0, 0, 2.0, 0]


def test_an_estimator_of_ones_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def double(rewards_N, group_N): return 2 * rewards_N\ndef one(r, g): return r[:1]"
    )
    rollouts = [rollout(0, i, s, [segment([8])]) for i, s in enumerate((3.0, None))]
    samples = build_batch([group(0, rollouts)], AlgorithmConfig(advantage="mine.py:double")).samples
    assert [s.advantages.tolist() for s in samples] == [[6.0], [0.0]]
    with pytest.raises(ValueError, match="must return one finite advantage for each"):
        build_batch([group(0, rollouts)], AlgorithmConfig(advantage="mine.py:one"))


def test_a_rollout_without_tokens_counts_in_the_baseline_only() -> None:
    rollouts = [rollout(0, 0, 1.0, [segment([8])]), rollout(0, 1, 0.0, [segment([])])]
    (only,) = build_batch([group(0, rollouts)], AlgorithmConfig(advantage="dr_grpo")).samples
    assert only.rollout_id == "0-0" and only.advantages.tolist() == [0.5]


def test_the_batch_of_reinforce_plus_plus_is_one_of_tokens() -> None:
    """A long answer weighs more, in either variant."""
    lengths = [[8] * 4, [8], [8]]
    rollouts = [rollout(0, i, s, [segment(t)]) for i, (s, t) in enumerate(zip((3.0, 0.0, 0.0), lengths, strict=True))]
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        got = [
            float(s.advantages[0]) for s in build_batch([group(0, rollouts)], AlgorithmConfig(advantage=name)).samples
        ]
        assert got == pytest.approx([1 / 2.4**0.5, -2 / 2.4**0.5, -2 / 2.4**0.5], rel=1e-3), name


def test_a_reward_below_zero_ends_no_run() -> None:
    """rewards.repetition_penalty makes them of rewards that never are."""
    rollouts = [rollout(0, i, s, [segment([8])]) for i, s in enumerate((1.0, 0.0, -0.5))]
    samples = build_batch([group(0, rollouts)], AlgorithmConfig(advantage="max_rl")).samples
    got = [float(s.advantages[0]) for s in samples]
    assert got == pytest.approx([(1 - 1 / 6) / (2 / 3), (0 - 1 / 6) / (2 / 3), -1.0])


def test_token_statistics_exclude_stale_tokens() -> None:
    old = rollout(0, 0, 3.0, [segment([10] * 9, version=1), segment([11], version=4)])
    others = [rollout(0, i, 0.0, [segment([12], version=4)]) for i in (1, 2)]
    for name in ("reinforce_plus_plus", "opo"):
        bounded, plain = (
            build_batch([group(0, [old, *others])], AlgorithmConfig(advantage=name), v).samples[0] for v in (3, 0)
        )
        assert float(bounded.advantages[-1]) != pytest.approx(float(plain.advantages[-1]), rel=0.1)
    assert float(bounded.advantages[-1]) == pytest.approx(2.0)  # one token each: 3 - 1


def test_tokens_older_than_the_bound_are_context_only() -> None:
    """on_stale = "mask": they leave the loss, their rollout stays in the baseline."""
    old = rollout(0, 0, 1.0, [segment([10, 11], version=1)])
    mixed = rollout(0, 1, 0.0, [segment([12], version=1), segment([13, 14], version=4)])
    first, second = build_batch([group(0, [old, mixed])], AlgorithmConfig(advantage="dr_grpo"), 3).samples
    assert not first.mask.any() and second.mask.tolist() == [False, True, True]
    assert second.advantages[second.mask].tolist() == [-0.5, -0.5]
    assert second.token_ids.tolist() == [12, 13, 14]


def test_advantages_may_be_read_and_set_after_scoring(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hooks.py").write_text(
        "seen = []\n"
        "def double(rollouts, advantages): advantages.mul_(2); seen.append([r.reward.score for r in rollouts])\n"
        "def other(rollouts, advantages): return [float(r.sibling) for r in rollouts]\n"
        "def short(rollouts, advantages): return advantages[:1]\n"
    )
    rollouts = [rollout(0, i, s, [segment([8])]) for i, s in enumerate((3.0, 1.0))]

    def advantages(name: str) -> list[float]:
        config = AlgorithmConfig(advantage="dr_grpo", after_scoring=f"hooks.py:{name}")
        return [float(s.advantages[0]) for s in build_batch([group(0, rollouts)], config).samples]

    assert advantages("double") == [2.0, -2.0] and advantages("other") == [0.0, 1.0]
    with pytest.raises(ValueError, match="after_scoring = 'hooks.py:short' .* of the shape .1. for 2"):
        advantages("short")


@pytest.mark.parametrize("key", ["advantage", "after_scoring"])
def test_own_functions_are_found_before_there_is_a_batch(tmp_path, monkeypatch, key: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def twice(rewards_N, group_N): return 2 * rewards_N\n")
    with pytest.raises(ValueError, match="own.py has no function 'twise'; did you mean twice"):
        Credit(AlgorithmConfig.model_validate({key: "own.py:twise"}), WorkflowConfig())
    credit = Credit(AlgorithmConfig(advantage="own.py:twice"), WorkflowConfig())
    (tmp_path / "own.py").write_text("def twice(rewards_N, group_N): return 0 * rewards_N  # edited while it runs\n")
    (only,) = make_batch([group(0, [rollout(0, 0, 3.0, [segment([8])])])], credit).samples
    assert only.advantages.tolist() == [6.0]


def cut_off(scores: tuple[float, ...], cut: set[int]) -> list:
    rollouts = [rollout(0, i, s, [segment([8] * (i + 1))]) for i, s in enumerate(scores)]
    for i in cut:
        rollouts[i].stop_reason = StopReason.LENGTH
        rollouts[i].reward = Reward(scores[i], {"style": 9.0})
    for i in set(range(len(scores))) - cut:
        rollouts[i].reward = Reward(scores[i], {"style": float(i)})
    return rollouts


def test_masked_rollouts_count_in_baseline_by_default() -> None:
    rollouts = cut_off((3.0, 1.0, 2.0), {0})
    config = AlgorithmConfig(advantage="dr_grpo")
    masked = build_batch([group(0, rollouts)], config, masks=[mask_truncated()])
    assert [s.mask.any() for s in masked.samples] == [False, True, True]
    assert [float(s.advantages[0]) for s in masked.samples[1:]] == [-1.0, 0.0]
    without = build_batch([group(0, rollouts)], config, masks=[mask_truncated(in_baseline=False)])
    assert [s.mask.any() for s in without.samples] == [False, True, True]
    assert [float(s.advantages[0]) for s in without.samples] == [0.0, -0.5, 0.5]
    assert masked.num_loss_tokens == without.num_loss_tokens == 5
    assert mask_metrics(without) == {"train/masked_rollouts": 1, "train/masked_tokens": 1}
    both = build_batch([group(0, rollouts)], config, masks=[mask_truncated(), mask_overlong(2)])
    assert mask_metrics(both) == {"train/masked_rollouts": 2, "train/masked_tokens": 4}
    assert mask_metrics(build_batch([group(0, rollouts)], config)) == {
        "train/masked_rollouts": 0, "train/masked_tokens": 0,
    }  # fmt: skip


def test_masked_rollout_out_of_baseline_has_no_reward() -> None:
    rollouts = cut_off((3.0, 1.0, 2.0), {0})
    config = AlgorithmConfig(advantage="gdpo", reward_weights={"style": 1.0, "score": 0.0})
    batch = build_batch([group(0, rollouts)], config, masks=[mask_truncated(in_baseline=False)])
    alone = build_batch([group(0, rollouts[1:])], config).samples
    assert [s.advantages[0] for s in batch.samples[1:]] == [s.advantages[0] for s in alone]


def test_a_greedy_baseline_that_was_cut_off_stays_the_baseline() -> None:
    rollouts = [rollout(0, i, s, [segment([8], temperature=1.0 - i)]) for i, s in enumerate((3.0, 1.0))]
    rollouts[1].stop_reason = StopReason.LENGTH
    batch = build_batch(
        [group(0, rollouts)], AlgorithmConfig(advantage="remax"), masks=[mask_truncated(in_baseline=False)]
    )
    assert [s.advantages.tolist() for s in batch.samples] == [[2.0]] and not batch.masked.rollouts

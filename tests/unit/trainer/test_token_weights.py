"""Advantages and weights of tokens that depend on the rest of their step, through [algorithm]."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_trainer import plain_log_softmax, plain_model, rewarded, trainer, weights

from rollover.algorithms.advantage import optimal_token_baseline, reinforce_plus_plus_tokens
from rollover.algorithms.correction import importance_weights
from rollover.algorithms.loss import high_entropy_mask
from rollover.config import AlgorithmConfig
from rollover.config.load import ConfigError, load_config
from rollover.trainer.backend import Stream
from rollover.trainer.batch import Batch
from rollover.trainer.streams import STATISTICS, high_entropy_stream, mean_weight, with_stream
from rollover.trainer.token_advantages import estimate_tokens
from rollover.trainer.trainer import split_groups
from rollover.types import Sample
from samples import random_samples

SAMPLES = random_samples(1)
REWARDED = rewarded(SAMPLES)


def test_statistics_are_those_of_the_whole_distribution() -> None:
    backend, model = trainer().backend, plain_model()
    found = backend.compute_statistics(SAMPLES)
    logprobs = backend.compute_logprobs(SAMPLES)
    for s in SAMPLES:
        p_TV = plain_log_softmax(model, s).exp().detach()
        np.testing.assert_array_equal(found[s.rollout_id][:, 0], logprobs[s.rollout_id])
        np.testing.assert_allclose(found[s.rollout_id][:, 1], -(p_TV * p_TV.log()).sum(-1), atol=1e-4)
        np.testing.assert_allclose(found[s.rollout_id][:, 2], p_TV.square().sum(-1), rtol=1e-4)


def with_statistics(samples: list[Sample], statistics: Stream) -> list[Sample]:
    for column, name in enumerate(STATISTICS):
        samples = with_stream(samples, name, {key: values[:, column] for key, values in statistics.items()})
    return samples


# Importance weights divided by their mean


@pytest.mark.parametrize(
    ("mode", "minibatches"), [("token_truncate", 1), ("token_truncate", 3), ("token_mask", 3), ("sequence_truncate", 3)]
)
def test_normalized_weights_have_the_mean_1_over_the_step(mode: str, minibatches: int) -> None:
    common = {"correction": mode, "correction_cap": 1.3}
    t = trainer({**common, "correction_normalize": True}, minibatches_per_step=minibatches)
    start = t.backend.compute_logprobs(SAMPLES)
    of_all = []
    for s in SAMPLES:
        pair = (torch.from_numpy(x)[None] for x in (start[s.rollout_id], s.behavior_logprobs[s.mask]))
        own = importance_weights(*pair, torch.ones(1, int(s.mask.sum())), mode=mode, cap=1.3)[0]  # type: ignore[arg-type]
        of_all += own[:1].tolist() if mode.startswith("sequence") else own.tolist()
    mean = float(np.mean(of_all))
    metrics = t.train_step(Batch(SAMPLES))
    assert metrics["importance/normalizer"] == pytest.approx(mean, rel=1e-5) and abs(mean - 1) > 0.01
    # The loss is linear in the weights: as if all advantages were 1 / mean times theirs.
    scaled = [s.with_streams(advantages=s.advantages / np.float32(mean)) for s in SAMPLES]
    expected = trainer(common, minibatches_per_step=minibatches)
    wanted = expected.train_step(Batch(scaled))
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights(t), weights(expected), atol=2e-6, rtol=1e-5)


def test_mean_weight_uses_proximal_and_unrejected_tokens() -> None:
    s = dataclasses.replace(SAMPLES[0], mask=np.ones_like(SAMPLES[0].mask))
    start = s.behavior_logprobs + np.float32(0.2)
    s = s.with_streams(proximal_logprobs=start, start_logprobs=start)
    plain = AlgorithmConfig(correction_cap=9.0)
    assert mean_weight(plain, [s], 5) == pytest.approx(np.exp(0.2), rel=1e-5)
    between = AlgorithmConfig(correction_cap=9.0, proximal="interpolated")
    ages = 5 - s.versions.astype(float)
    assert (ages > 1).all() and mean_weight(between, [s], 5) == pytest.approx(
        float(np.mean(np.exp(0.2 * (1 - 1 / ages)))), rel=1e-5
    )
    nothing = AlgorithmConfig(correction="token_mask", correction_cap=1.1)
    assert mean_weight(nothing, [s], 5) == 1.0  # no weight is left to divide


# The tokens of highest entropy


@pytest.mark.parametrize(("loss", "minibatches"), [("clip", 1), ("gspo", 3), ("dro", 3)])
def test_the_share_is_of_each_minibatch_whatever_its_packing(minibatches: int, loss: str) -> None:
    common = {"loss": loss, "kl_coef": 0.3}
    packed = [
        trainer({**common, "top_entropy_share": 0.3}, minibatches_per_step=minibatches, micro_batch_tokens=tokens)
        for tokens in (40, 10_000)
    ]
    losses = [t.train_step(Batch(SAMPLES))["loss"] for t in packed]
    torch.testing.assert_close(weights(packed[0]), weights(packed[1]), atol=2e-6, rtol=1e-5)
    plain = trainer(common, minibatches_per_step=minibatches)
    assert abs(plain.train_step(Batch(SAMPLES))["loss"] - losses[0]) > 1e-4
    entropies = {k: v[:, 1] for k, v in trainer({}).backend.compute_statistics(SAMPLES).items()}
    for part in split_groups(SAMPLES, minibatches):
        kept = high_entropy_stream(with_stream(part, "statistics_entropy", entropies), 0.3)
        entropy = torch.from_numpy(np.concatenate([entropies[s.rollout_id] for s in part]))[None]
        wanted = high_entropy_mask(entropy, torch.ones_like(entropy), share=0.3)
        np.testing.assert_array_equal(np.concatenate([kept[s.rollout_id] for s in part]), wanted[0].float())
        assert 0.25 < float(wanted.float().mean()) < 0.5


def test_tokens_of_low_entropy_have_no_policy_gradient() -> None:
    """As if their advantages were 0, where those of the clip are nothing but factors; denominators count all."""
    t, expected = trainer({"top_entropy_share": 0.2}), trainer({})
    entropies = {k: v[:, 1] for k, v in t.backend.compute_statistics(SAMPLES).items()}
    kept = high_entropy_stream(with_stream(SAMPLES, "statistics_entropy", entropies), 0.2)
    cut = []
    for s in SAMPLES:
        advantages = s.advantages.copy()
        advantages[s.mask] *= kept[s.rollout_id]
        cut.append(s.with_streams(advantages=advantages))
    metrics, wanted = t.train_step(Batch(SAMPLES)), expected.train_step(Batch(cut))
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-4, abs=1e-6) and metrics["grad_norm"] > 0
    torch.testing.assert_close(weights(t), weights(expected), atol=2e-6, rtol=1e-5)


def test_rejected_tokens_leave_entropy_share_and_mean() -> None:
    own = {"top_entropy_share": 0.3, "correction_normalize": True}
    rejecting, by_hand = trainer({"rejection": {"token_k2": 0.2}, **own}), trainer(own)
    start = by_hand.backend.compute_logprobs(SAMPLES)
    left = []
    for s in SAMPLES:
        mask = s.mask.copy()
        mask[s.mask] = (start[s.rollout_id] - s.behavior_logprobs[s.mask]) ** 2 / 2 <= 0.2
        left.append(dataclasses.replace(s, mask=mask))
    got, wanted = rejecting.train_step(Batch(SAMPLES)), by_hand.train_step(Batch(left))
    assert got["off_policy/rejected_share"] > 0
    assert got["importance/normalizer"] == pytest.approx(wanted["importance/normalizer"], rel=1e-5)
    torch.testing.assert_close(weights(rejecting), weights(by_hand), atol=2e-6, rtol=1e-5)


# Estimators over tokens


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_reinforce_plus_plus_over_tokens_discounts_them(gamma: float) -> None:
    config = AlgorithmConfig(advantage="reinforce_plus_plus_tokens", gamma=gamma)
    made = estimate_tokens(config, REWARDED)
    width = max(len(s.mask) for s in SAMPLES)
    rewards_BT, mask_BT = torch.zeros(len(SAMPLES), width), torch.zeros(len(SAMPLES), width)
    for row, s in enumerate(REWARDED):
        rewards_BT[row, : len(s.mask)] = torch.from_numpy(s.advantages)
        mask_BT[row, : len(s.mask)] = torch.from_numpy(s.mask)
    wanted, _ = reinforce_plus_plus_tokens(rewards_BT, mask_BT, gamma=gamma)
    for row, s in zip(wanted, made, strict=True):
        np.testing.assert_array_equal(s.advantages, row[: len(s.mask)])
    spread = max(float(np.ptp(s.advantages[s.mask])) for s in made)
    assert (spread > 0.1) == (gamma < 1)
    t = trainer({"advantage": "reinforce_plus_plus_tokens", "gamma": gamma})
    expected = trainer({})
    t.train_step(Batch(REWARDED))
    expected.train_step(Batch(made))
    torch.testing.assert_close(weights(t), weights(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_a_step_with_optimal_token_baselines(name: str, correction: str) -> None:
    options = {"advantage": name, "correction": correction}
    t, samples = trainer(options), REWARDED
    statistics = t.backend.compute_statistics(samples)
    width = max(len(s.mask) for s in samples)
    streams = torch.zeros(6, len(samples), width)
    for row, s in enumerate(samples):
        streams[0, row, : len(s.mask)] = torch.from_numpy(s.advantages)
        streams[1, row, : len(s.mask)] = torch.from_numpy(s.mask)
        streams[2, row, np.flatnonzero(s.mask)] = torch.from_numpy(statistics[s.rollout_id][:, 0])
        streams[3, row, np.flatnonzero(s.mask)] = torch.from_numpy(statistics[s.rollout_id][:, 2])
        streams[4, row, : len(s.mask)] = torch.from_numpy(s.behavior_logprobs)
    rewards, mask, logprobs, squares, behavior, _ = streams
    rho = None
    if correction != "none":
        rho = importance_weights(logprobs, behavior, mask, mode="token_truncate", cap=2.0)
    wanted = optimal_token_baseline(
        rewards, mask, torch.tensor([s.group_id for s in samples]), logprobs, squares, weights_BT=rho,
        align="positions" if name.startswith("optimal") else "loss_tokens",
    )  # fmt: skip
    made = estimate_tokens(t.algorithm, with_statistics(samples, statistics))
    for row, s in zip(wanted, made, strict=True):
        np.testing.assert_allclose(s.advantages, row[: len(s.mask)], atol=1e-6)
    expected = trainer({"correction": correction})
    t.train_step(Batch(samples))
    expected.train_step(Batch(made))
    torch.testing.assert_close(weights(t), weights(expected), atol=2e-6, rtol=1e-5)


def test_roles_of_a_group_have_baselines_of_their_own() -> None:
    samples = [dataclasses.replace(s, role="ab"[i % 2]) for i, s in enumerate(REWARDED)]
    t = trainer({"advantage": "optimal_token_baseline"})
    statistics = t.backend.compute_statistics(samples)
    samples = with_statistics(samples, statistics)
    made = estimate_tokens(t.algorithm, samples)
    alone = [s for s in samples if s.role == "a"]
    for one in estimate_tokens(t.algorithm, alone):
        (same,) = [s for s in made if s.rollout_id == one.rollout_id]
        np.testing.assert_allclose(one.advantages, same.advantages, atol=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"algorithm.top_entropy_share": "0.2", "train.streaming_min_groups": "2"}, "depends on all tokens of the"),
        ({"algorithm.correction_normalize": "true", "train.streaming_min_groups": "2"}, "depends on all tokens of the"),
        ({"algorithm.advantage": "optimal_token_baseline", "train.streaming_min_groups": "2"}, "depend on all groups"),
        ({"algorithm.correction_normalize": "true", "algorithm.loss": "vespo"}, "not a factor that a mean"),
        ({"algorithm.advantage": "optimal_token_baseline", "workflow.group_by": "a.py:b"}, "of a group and role"),
        ({"algorithm.advantage": "reinforce_plus_plus_tokens", "replay.size": "4"}, "has estimated its tokens"),
        ({"algorithm.advantage": "optimal_token_baseline", "workflow.credit": "turn_returns"}, "begin with their"),
        ({"algorithm.advantage": "tir_optimal_token_baseline", "rollout.group_size": "1"}, "at least 2 sibling"),
        ({"backend.type": "tinker", "algorithm.top_entropy_share": "0.2"}, "of which no entropy can be made"),
        ({"backend.type": "tinker", "algorithm.advantage": "optimal_token_baseline"}, "nothing else of their dist"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config([], list(values.items()), require_sources=False)

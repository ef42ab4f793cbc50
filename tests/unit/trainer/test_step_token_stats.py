"""What a step tells of each token is what the closed form gives, computed from the logits of the model before the step:
the importance weight before its bounds, the weight that the loss took, entropy, advantage and mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import plain_log_softmax, plain_logprobs, plain_model, recorded, rewarded, trainer, weights

from rollover.config import CriticConfig
from rollover.track.token_stats import TokenStats
from rollover.trainer.batch import Batch
from rollover.trainer.trainer import Trainer
from rollover.types import Sample
from samples import random_samples


def told(algorithm: dict[str, Any], **options: Any) -> Trainer:
    """A trainer after a step of the samples."""
    of = trainer(algorithm, critic=CriticConfig(), tells_tokens=True, **options)
    of.train_step(Batch(SAMPLES))
    return of


def near(samples: list[Sample]) -> list[Sample]:
    """The samples, sampled by a policy close to the tiny model's, so that some ratios are in bounds and some are not;
    an advantage of either sign."""
    rng = np.random.default_rng(5)
    logprobs = trainer({}).backend.compute_logprobs(samples)
    out = []
    for i, s in enumerate(samples):
        behavior = s.behavior_logprobs.copy()
        behavior[s.mask] = logprobs[s.rollout_id] + 0.4 * rng.standard_normal(int(s.mask.sum())).astype(np.float32)
        advantages = np.full(len(s.mask), (-1) ** i * (0.5 + i), np.float32)
        out.append(s.with_streams(behavior_logprobs=behavior, advantages=advantages))
    return out


SAMPLES = near(random_samples(3))


def by_logits(s: Sample, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs, entropies) of the loss tokens, without any of our own code."""
    logs = plain_log_softmax(model, s).detach()
    return plain_logprobs(model, s).detach().numpy(), -(logs.exp() * logs).sum(-1).numpy()


@pytest.fixture(scope="module")
def plain() -> Any:
    return plain_model()


def clipped(ratio: np.ndarray, advantage: float, low: float, high: float) -> np.ndarray:
    """The gradient that PPO's clip leaves, as a share of the advantage."""
    outside = (ratio > 1 + high) if advantage > 0 else (ratio < 1 - low)
    return np.where(outside, 0.0, ratio)


CAP = 1.2
# The algorithm, and the weight of a sample's tokens by their importance weights [M] and the sample's advantage.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "no correction": ({"correction": "none", "allow_uncorrected": True}, lambda w, a: 1 + 0 * w),
    "truncated": ({"correction": "token_truncate", "correction_cap": CAP}, lambda w, a: np.minimum(w, CAP)),
    "masked": ({"correction": "token_mask", "correction_cap": CAP}, lambda w, a: np.where(w <= CAP, w, 0.0)),
    "sequence": (
        {"correction": "sequence_truncate", "correction_cap": CAP},
        lambda w, a: np.minimum(np.prod(w), CAP) + 0 * w,
    ),
    "clipped": (
        {"proximal": "behavior", "correction": "none", "clip_low": 0.1, "clip_high": 0.2},
        lambda w, a: clipped(w, a, 0.1, 0.2),
    ),
    "decoupled": ({"loss": "decoupled", "correction_cap": CAP}, lambda w, a: np.minimum(w, CAP)),
    "reinforce": (
        {"loss": "reinforce", "correction": "token_truncate", "correction_cap": CAP},
        lambda w, a: np.minimum(w, CAP),
    ),
    "cispo": (
        {"loss": "cispo", "proximal": "behavior", "correction": "none", "clip_low": 0.1, "clip_high": 0.2},
        lambda w, a: np.clip(w, 0.9, 1.2),
    ),
    "far sequences are masked": (
        {"proximal": "step_start", "correction": "none", "off_policy_mask_above": 0.02, "allow_uncorrected": True},
        lambda w, a: np.where((a >= 0) | (-np.log(w).mean() <= 0.02), 1.0, 0.0) + 0 * w,
    ),
    "with an entropy bonus and a KL, which are no part of it": (
        {"correction": "token_truncate", "correction_cap": CAP, "entropy_coef": 0.1, "kl_coef": 0.2},
        lambda w, a: np.minimum(w, CAP),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_of_each_token_what_the_closed_form_gives(name: str, plain: Any) -> None:
    algorithm, weight_of = CASES[name]
    of = told(algorithm)
    seen = set[float]()
    for s in SAMPLES:
        stats, (logprobs, entropies) = of.token_stats[s.rollout_id], by_logits(s, plain)
        ratios = np.exp(logprobs - s.behavior_logprobs[s.mask])
        assert np.array_equal(stats.mask, s.mask) and not stats.rejected.any()
        assert np.array_equal(stats.advantages, s.advantages[s.mask])
        assert stats.importance_weights == pytest.approx(ratios, rel=2e-4)
        assert stats.entropies == pytest.approx(entropies, rel=2e-4, abs=1e-5)
        wanted = weight_of(ratios, float(s.advantages[0]))
        assert stats.loss_weights == pytest.approx(wanted, rel=5e-4, abs=1e-6), s.rollout_id
        seen |= set(np.round(wanted, 3).tolist())
    assert len(seen) > 1 or name == "no correction", "the case must bind somewhere"


def test_rejected_tokens_have_weight_zero_and_start_ratio(plain: Any) -> None:
    of = told({"rejection": {"token_k2": 0.05}, "correction": "token_truncate", "correction_cap": CAP})
    rejected = 0
    for s in SAMPLES:
        stats, (logprobs, _) = of.token_stats[s.rollout_id], by_logits(s, plain)
        d = logprobs - s.behavior_logprobs[s.mask]
        assert np.array_equal(stats.mask, s.mask) and np.array_equal(stats.rejected, d**2 / 2 > 0.05)
        assert stats.importance_weights == pytest.approx(np.exp(d), rel=2e-4)
        assert stats.loss_weights == pytest.approx(np.where(stats.rejected, 0, np.minimum(np.exp(d), CAP)), rel=5e-4)
        assert np.isnan(stats.entropies[stats.rejected]).all() and not np.isnan(stats.entropies[~stats.rejected]).any()
        rejected += int(stats.rejected.sum())
    assert 0 < rejected < sum(int(s.mask.sum()) for s in SAMPLES)


def same(a: TokenStats, b: TokenStats) -> bool:
    names = [of.name for of in dataclasses.fields(TokenStats)]
    return all(np.array_equal(getattr(a, n), getattr(b, n), equal_nan=n not in ("mask", "rejected")) for n in names)


def test_of_several_passes_the_first_is_told(plain: Any) -> None:
    """Of two epochs that before any update, and of the second minibatch that after the first one's."""
    algorithm = {"correction": "token_truncate", "correction_cap": CAP}
    once, twice = told(algorithm), told(algorithm, epochs_per_step=2)
    assert all(same(once.token_stats[s.rollout_id], twice.token_stats[s.rollout_id]) for s in SAMPLES)
    parts = told(algorithm, minibatches_per_step=3)
    first, others = [s for s in SAMPLES if s.group_id == 0], [s for s in SAMPLES if s.group_id > 0]
    for s in first:
        assert parts.token_stats[s.rollout_id].entropies == pytest.approx(by_logits(s, plain)[1], rel=2e-4, abs=1e-5)
    moved = [np.abs(parts.token_stats[s.rollout_id].entropies - by_logits(s, plain)[1]).max() for s in others]
    assert min(moved) > 1e-4


def test_what_is_not_computed_has_its_mask_and_advantages_alone() -> None:
    """A rollout whose advantages are all 0 (train.skip_zero_advantage)."""
    zero = [s.with_streams(advantages=0 * s.advantages) if s.group_id == 1 else s for s in SAMPLES]
    of = trainer({"correction": "token_truncate"}, tells_tokens=True)
    of.train_step(Batch(zero))
    for s in zero:
        stats = of.token_stats[s.rollout_id]
        assert np.array_equal(stats.mask, s.mask)
        assert np.isnan(stats.importance_weights).all() == np.isnan(stats.entropies).all() == (s.group_id == 1)


def test_gathered_group_by_group_it_is_the_same() -> None:
    """train.streaming_min_groups: the gradient of a group is there before the others are."""
    algorithm = {"correction": "token_truncate", "correction_cap": CAP, "rejection": {"token_k2": 0.2}}
    whole, parts = told(algorithm), trainer(algorithm, tells_tokens=True)
    for group in (0, 1):
        parts.accumulate([s for s in SAMPLES if s.group_id == group])
    parts.train_step(Batch(SAMPLES))
    for s in SAMPLES:
        a, b = whole.token_stats[s.rollout_id], parts.token_stats[s.rollout_id]
        assert np.array_equal(a.rejected, b.rejected)
        for name in ("importance_weights", "loss_weights", "entropies"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-4, nan_ok=True)


def test_token_stats_are_optional_and_change_no_weight() -> None:
    algorithm = {"correction": "token_truncate", "correction_cap": CAP, "kl_coef": 0.1, "entropy_coef": 0.1}
    telling, silent = (trainer(algorithm, tells_tokens=tells) for tells in (True, False))
    assert telling.train_step(Batch(SAMPLES)) == silent.train_step(Batch(SAMPLES))
    assert telling.token_stats and not silent.token_stats and torch.equal(weights(telling), weights(silent))


def test_a_critic_gives_each_token_the_advantage_that_is_told() -> None:
    of = trainer({"advantage": "gae", "gamma": 0.9}, critic=CriticConfig(), tells_tokens=True)
    passes = recorded(of)
    of.train_step(Batch(rewarded(SAMPLES, [1.0])))
    seen = {s.rollout_id: s.advantages[s.mask] for part in passes for s in part}
    assert all(np.array_equal(of.token_stats[i].advantages, advantages) for i, advantages in seen.items())
    assert len(seen) == len(SAMPLES) and any(np.ptp(advantages) > 0 for advantages in seen.values())

"""algorithm.rejection rewrites the masks: what is left out is as if it were context, in the whole step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import rewarded, trainer, weights

from rollover.algorithms.correction import rejection_mask
from rollover.config import AlgorithmConfig
from rollover.trainer.batch import Batch
from rollover.trainer.streams import with_stream, without_rejected
from rollover.types import Sample
from samples import random_samples

SAMPLES = random_samples(1)
HIGH = 0.2
# Everything that a token enters: ratios of sequences, denominators of rows and groups, KL, entropy.
ALGORITHMS = [
    {"loss": "clip", "aggregation": "token-mean", "entropy_coef": 0.1},
    {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
    {"loss": "gmpo", "aggregation": "prompt-mean"},
    {"loss": "reinforce", "aggregation": "seq-mean-token-sum-norm"},
    {"loss": "clip", "aggregation": "seq-mean-token-sum", "kl_coef": 0.3, "correction": "sequence_truncate"},
    {"loss": "clip", "proximal": "snapshot"},
    {"loss": "clip", "proximal": "interpolated"},
    {"loss": "clip", "proximal": "behavior"},
]


def masked_by_hand(level: str) -> list[Sample]:
    """The samples with rejected tokens taken out of the masks, by the untrained model."""
    known = trainer({}).backend.compute_logprobs(SAMPLES)
    out = []
    for s in SAMPLES:
        args = (torch.from_numpy(x)[None] for x in (known[s.rollout_id], s.behavior_logprobs[s.mask]))
        every = torch.ones(1, int(s.mask.sum()), dtype=torch.bool)
        mask = s.mask.copy()
        mask[s.mask] = rejection_mask(*args, every, kind="k2", level=level, high=HIGH)[0].numpy()  # type: ignore[arg-type]
        out.append(dataclasses.replace(s, mask=mask))
    return out


@pytest.mark.parametrize(
    ("algorithm", "minibatches", "level"),
    [
        *((algorithm, 3, "token") for algorithm in ALGORITHMS),
        (ALGORITHMS[0], 1, "sequence_mean"),
        (ALGORITHMS[1], 1, "token"),
        (ALGORITHMS[4], 3, "sequence_mean"),
    ],
    ids=str,
)
def test_a_step_is_that_of_samples_with_such_masks(algorithm: dict[str, Any], minibatches: int, level: str) -> None:
    left = masked_by_hand(level)
    before, after = (sum(int(s.mask.sum()) for s in samples) for samples in (SAMPLES, left))
    if algorithm.get("proximal") == "interpolated":
        # Fresh tokens: it is the behavior policy, so that nothing is rejected.
        left, after = SAMPLES, before
    expected = trainer(algorithm, minibatches_per_step=minibatches)
    wanted = expected.train_step(Batch(left))
    t = trainer({**algorithm, "rejection": {f"{level}_k2": HIGH}}, minibatches_per_step=minibatches)
    got = t.train_step(Batch(SAMPLES))
    torch.testing.assert_close(weights(t), weights(expected), atol=2e-6, rtol=1e-5)
    assert got.pop("off_policy/rejected_share") == pytest.approx(1 - after / before)
    assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert 0 < after < before or after == before and algorithm.get("proximal") == "interpolated"


def test_all_of_several_rejections_have_to_hold() -> None:
    """Each looks at all tokens of the step, and what any of them rejects is left out."""
    bounds = {"token_k2": 0.3, "sequence_mean_k1": [-0.05, 0.4], "token_k1": 0.6}
    samples = with_stream(SAMPLES, "proximal_logprobs", trainer({}).backend.compute_logprobs(SAMPLES))

    def left(rejection: dict[str, Any]) -> np.ndarray:
        config = AlgorithmConfig(rejection=rejection)
        return np.concatenate([without_rejected(config, s, 0).mask for s in samples])

    kept, alone = left(bounds), [left({name: bound}) for name, bound in bounds.items()]
    assert len({mask.sum() for mask in alone}) == 3
    np.testing.assert_array_equal(kept, np.logical_and.reduce(alone))
    assert 0 < kept.sum() < min(mask.sum() for mask in alone)


def test_bounds_of_k1_may_differ() -> None:
    """-d is log behavior / start: what the policy has come to find less probable is above 0."""
    s = dataclasses.replace(SAMPLES[0], mask=np.ones_like(SAMPLES[0].mask))
    start = s.behavior_logprobs + np.linspace(-1.0, 1.0, len(s.mask)).astype(np.float32)
    config = AlgorithmConfig(rejection={"token_k1": [-0.2, 0.9]})
    kept = without_rejected(config, s.with_streams(proximal_logprobs=start), 0).mask
    k1 = s.behavior_logprobs - start
    np.testing.assert_array_equal(kept, (k1 >= -0.2) & (k1 <= 0.9))
    assert 0 < kept.sum() < len(k1)


def test_a_gradient_that_comes_in_parts_rejects_the_same_tokens() -> None:
    algorithm = {"rejection": {"token_k2": HIGH}, "aggregation": "seq-mean-token-mean"}
    whole, parts = trainer(algorithm), trainer(algorithm)
    for _ in range(2):
        wanted = whole.train_step(Batch(SAMPLES))
        parts.accumulate([s for s in SAMPLES if s.group_id == 1])
        assert parts.train_step(Batch(SAMPLES)) == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(weights(parts), weights(whole), atol=2e-6, rtol=1e-5)
    assert wanted["off_policy/rejected_share"] > 0


def test_critic_learns_from_unrejected_tokens() -> None:
    t = trainer({"advantage": "gae", "rejection": {"token_k2": HIGH}})
    metrics = t.train_step(Batch(rewarded(SAMPLES, [3.0])))
    assert metrics["off_policy/rejected_share"] > 0
    assert metrics["critic/loss"] == pytest.approx(4.5)  # (3 - 0)^2 / 2 at every token: no reward is lost


@pytest.mark.parametrize("minibatches", [1, 3])
def test_rejecting_all_tokens_raises(minibatches: int) -> None:
    t = trainer({"rejection": {"sequence_max_k2": 1e-9}}, minibatches_per_step=minibatches)
    before = weights(t)
    with pytest.raises(ValueError, match="step 1 has no token in its loss: algorithm.rejection leaves out all") as e:
        t.train_step(Batch(SAMPLES))
    assert "sequence_max_k2 = 1e-09" in str(e.value) and "rollout.max_staleness" in str(e.value)
    assert torch.equal(weights(t), before) and t.policy_version == 0 and not t.in_update


def test_fully_rejected_minibatch_keeps_others() -> None:
    """One group was sampled by a policy that is far away."""
    first = SAMPLES[0].group_id
    far = [s.with_streams(behavior_logprobs=s.behavior_logprobs - 9 * (s.group_id == first)) for s in SAMPLES]
    t = trainer({"rejection": {"sequence_mean_k2": 30.0}}, minibatches_per_step=3)
    before = weights(t)
    share = sum(int(s.mask.sum()) for s in far if s.group_id == first) / Batch(far).num_loss_tokens
    metrics = t.train_step(Batch(far))
    assert metrics["off_policy/rejected_share"] == pytest.approx(share) and not torch.equal(weights(t), before)


def test_accumulation_may_start_with_rejected_parts() -> None:
    t = trainer({"rejection": {"sequence_max_k2": 1e-9}})
    t.accumulate([s for s in SAMPLES if s.group_id == 1])
    with pytest.raises(ValueError, match="step 1 has no token in its loss"):
        t.train_step(Batch(SAMPLES))

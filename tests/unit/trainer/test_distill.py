"""[distill]: advantages from a teacher's log-probs, by hand and in a training step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_trainer
import torch
from tiny_trainer import recorded, restored, weights

import tiny
from rollover.config import DistillConfig, LoraConfig
from rollover.trainer.backend import TEACHER, Stream
from rollover.trainer.batch import Batch
from rollover.trainer.distill import Divergence, discounted_sums, teacher_inputs, with_teacher_advantages
from rollover.trainer.trainer import Trainer
from rollover.types import Sample
from samples import random_samples

SAMPLES = random_samples(3)
MODEL = {"teacher": "other"}


def trainer(distill: dict[str, Any], *, teacher_seed: int | None = None, **options: Any) -> Trainer:
    """`teacher_seed`: of another model of random weights; the policy's is 0."""
    teacher = None
    if teacher_seed is not None:
        teacher = tiny.loaded(seed=teacher_seed, dtype=options.get("dtype", torch.float32))
    algorithm = options.pop("algorithm", {})
    return tiny_trainer.trainer(algorithm, distill=DistillConfig.model_validate(distill), teacher=teacher, **options)


def trained(made: Trainer, samples: list[Sample]) -> tuple[dict[str, float], dict[str, Sample]]:
    """A step of `samples`: its metrics, and the samples that the backend was given."""
    passes = recorded(made)
    return made.train_step(Batch(samples)), {s.rollout_id: s for part in passes for s in part}


def advantages(sample: Sample) -> np.ndarray:
    """Of its loss tokens."""
    return sample.advantages[sample.mask]


def log_ratios(made: Trainer, samples: list[Sample] = SAMPLES) -> Stream:
    """log teacher/policy of the loss tokens, under the weights as they are."""
    teacher, policy = (
        made.backend.compute_logprobs(teacher_inputs(made.distill, samples), TEACHER),
        made.backend.compute_logprobs(samples),
    )
    return {rollout_id: teacher[rollout_id] - policy[rollout_id] for rollout_id in policy}


def test_a_later_token_counts_relative_to_the_own_one() -> None:
    d = np.array([1.0, -2.0, 4.0], np.float32)
    assert discounted_sums(d, 0.0).tolist() == [1.0, -2.0, 4.0]
    assert discounted_sums(d, 0.5).tolist() == [1.0 - 1.0 + 1.0, -2.0 + 2.0, 4.0]
    assert discounted_sums(d, 1.0).tolist() == [3.0, 2.0, 4.0]
    assert discounted_sums(d[:0], 0.5).tolist() == []
    many = discounted_sums(np.ones(100_000, np.float32), 0.9)
    assert np.isfinite(many).all() and many[0] == pytest.approx(10.0), "no power of a position"


def test_by_hand() -> None:
    """Environment tokens between are no steps, the clip comes before the sum, and the coefficient after it."""
    sample = tiny_trainer.sample("0-0", [5], range(5), [1, 0, 0, 1, 1], advantages=0.25)
    mask = sample.mask
    sample = sample.with_loss_stream("teacher_logprobs", np.array([-1.0, -9.0, -0.5], np.float32))
    sample = sample.with_loss_stream("start_logprobs", np.array([-1.5, -1.0, -1.5], np.float32))
    # d = 0.5, -8 (clipped to -2), 1
    sums = Divergence()
    of = DistillConfig(teacher="other", coef=10.0, discount=0.5, clip=2.0)
    (made,) = with_teacher_advantages(of, [sample], "start_logprobs", sums)
    assert made.advantages.tolist() == [10 * (0.5 + 0.5 * (-2 + 0.5)), 0.0, 0.0, 10 * (-2 + 0.5), 10.0]
    kl = math.exp(-1.5) * -0.5 + math.exp(-1.0) * 8 + math.exp(-1.5) * -1  # times policy/behavior: behavior is 1 here
    expected = {"distill/kl": pytest.approx(kl / 3), "distill/clipped_share": pytest.approx(1 / 3)}
    assert sums.metrics() == expected
    (added,) = with_teacher_advantages(of.model_copy(update={"mix": "add"}), [sample], "start_logprobs", sums)
    assert added.advantages[mask].tolist() == [0.25 - 2.5, 0.25 - 15.0, 10.25]
    (whole,) = with_teacher_advantages(of.model_copy(update={"clip": 0.0}), [sample], "start_logprobs", sums)
    assert whole.advantages[mask].tolist() == [10 * (0.5 + 0.5 * (-8 + 0.5)), 10 * (-8 + 0.5), 10.0]
    assert sample.advantages.tolist() == [0.25] * 5, "the sample itself stays"
    with pytest.raises(ValueError, match="rollout 0-0: a log-prob .* is not finite"):
        wrong = sample.with_loss_stream("teacher_logprobs", np.array([-1.0, np.nan, 0.0], np.float32))
        with_teacher_advantages(of, [wrong], "start_logprobs", sums)


def test_distill_gradient_without_discount_is_kl_gradient() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    teacher = torch.randn(6, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    one = replace(SAMPLES[0], token_ids=np.zeros(1, np.int32), mask=np.ones(1, bool), streams={})
    of, loss = DistillConfig(teacher="other", clip=0.0), torch.zeros(())
    for token in range(6):
        of_teacher, of_policy = (x.detach()[token : token + 1].numpy() for x in (teacher, policy))
        streams = {"teacher_logprobs": of_teacher, "start_logprobs": of_policy, "behavior_logprobs": of_policy}
        one = one.with_streams(advantages=np.zeros(1, np.float32), **streams)
        (made,) = with_teacher_advantages(of, [one], "start_logprobs", Divergence())
        loss = loss - policy[token].exp().detach() * float(made.advantages[0]) * policy[token]
    kl = (policy.exp() * (policy - teacher)).sum()
    (ours,), (exact,) = torch.autograd.grad(loss, logits, retain_graph=True), torch.autograd.grad(kl, logits)
    torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("teacher", "seed", "dtype"),
    [("initial", None, torch.float32), ("other", 0, torch.float32), ("other", 0, torch.bfloat16)],
)
def test_a_teacher_that_is_the_student_changes_nothing(teacher: str, seed: int | None, dtype: torch.dtype) -> None:
    made = trainer({"teacher": teacher}, dtype=dtype, teacher_seed=seed)
    before = weights(made)
    metrics = made.train_step(Batch(SAMPLES))
    assert metrics["grad_norm"] == 0.0 and metrics["distill/kl"] == 0.0 and metrics["loss"] == 0.0
    assert torch.equal(weights(made), before)


@pytest.mark.parametrize(
    ("algorithm", "minibatches"),
    [
        ({}, 3),
        ({"proximal": "behavior"}, 3),
        ({"proximal": "interpolated"}, 1),
        ({"proximal": "snapshot"}, 3),
        ({"loss": "reinforce"}, 1),
    ],
    ids=str,
)
def test_distill_advantages_use_policy_at_step_start(algorithm: dict[str, Any], minibatches: int) -> None:
    """Whatever the proximal policy is, however stale the tokens are, and in every minibatch."""
    made = trainer(
        {"teacher": "other", "discount": 0.5, "coef": 2.0, "clip": 1.0}, teacher_seed=1, max_staleness=2,
        algorithm=algorithm, minibatches_per_step=minibatches,
    )  # fmt: skip
    for _ in range(2):
        made.train_step(Batch(SAMPLES))
    samples = [s.with_streams(versions=np.full_like(s.versions, i % 3)) for i, s in enumerate(SAMPLES)]
    d, policy = log_ratios(made, samples), made.backend.compute_logprobs(samples)
    ratios = {s.rollout_id: np.exp(policy[s.rollout_id] - s.behavior_logprobs[s.mask]) for s in samples}
    metrics, seen = trained(made, samples)
    assert seen.keys() == d.keys()
    for rollout_id, values in d.items():
        expected = 2.0 * discounted_sums(values.clip(-1.0, 1.0), 0.5)
        np.testing.assert_allclose(advantages(seen[rollout_id]), expected, atol=1e-4)
    everything, weight = np.concatenate(list(d.values())), np.concatenate([ratios[key] for key in d])
    assert metrics["distill/kl"] == pytest.approx(-(weight.clip(max=2) * everything).mean(), abs=1e-4)
    assert metrics["distill/clipped_share"] == pytest.approx((np.abs(everything) > 1).mean(), abs=0.03)
    assert metrics["grad_norm"] > 0 and 0 < made.seconds["time/teacher_s"] < 60


def test_privileged_prompt_matches_closed_form() -> None:
    """The teacher scores the same tokens after its own prompt, and that alone is what differs."""
    made = trainer({"teacher": "initial"})
    told = np.array([7, 8, 9, 10, 11], np.int32)
    samples = [replace(s, teacher_prompt_ids=told) for s in SAMPLES]
    other = made.backend.compute_logprobs([replace(s, prompt_ids=told) for s in SAMPLES])
    own = made.backend.compute_logprobs(SAMPLES)
    _, seen = trained(made, samples)
    for rollout_id, values in own.items():
        np.testing.assert_allclose(advantages(seen[rollout_id]), (other[rollout_id] - values).clip(-10, 10), atol=1e-5)
    assert any(np.abs(advantages(s)).max() > 0.01 for s in seen.values())


def test_rejected_tokens_leave_discounted_sums() -> None:
    algorithm = {"rejection": {"token_k3": 0.5}}
    made = trainer({"teacher": "other", "discount": 1.0, "clip": 0.0}, teacher_seed=1, algorithm=algorithm)
    d = log_ratios(made)
    metrics, seen = trained(made, SAMPLES)
    assert 0 < metrics["off_policy/rejected_share"] < 1
    originals = {s.rollout_id: s for s in SAMPLES}
    for rollout_id, sample in seen.items():
        kept = sample.mask[originals[rollout_id].mask]
        np.testing.assert_allclose(advantages(sample), discounted_sums(d[rollout_id][kept], 1.0), atol=1e-4)


def test_streamed_groups_get_the_same_advantages() -> None:
    whole, streamed = (trainer({"teacher": "other", "discount": 0.5}, teacher_seed=1) for _ in range(2))
    streamed.accumulate([s for s in SAMPLES if s.group_id == 1])
    streamed.discard_accumulated()
    streamed.accumulate([s for s in SAMPLES if s.group_id == 2])
    expected, found = whole.train_step(Batch(SAMPLES)), streamed.train_step(Batch(SAMPLES))
    for key in ("loss", "grad_norm", "distill/kl", "distill/clipped_share", "ratio/max"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    again = streamed.train_step(Batch(SAMPLES)), whole.train_step(Batch(SAMPLES))
    assert again[0]["distill/kl"] == pytest.approx(again[1]["distill/kl"], rel=1e-3), "sums are of one step"


def test_teacher_advantages_add_to_critic_advantages() -> None:
    critic = {"advantage": "gae"}
    plain, both = trainer({}, algorithm=critic), trainer({**MODEL, "mix": "add"}, algorithm=critic, teacher_seed=1)
    d = log_ratios(both)
    _, without = trained(plain, SAMPLES)
    _, found = trained(both, SAMPLES)
    for rollout_id, values in without.items():
        expected = advantages(values) + d[rollout_id].clip(-10, 10)
        np.testing.assert_allclose(advantages(found[rollout_id]), expected, atol=1e-4)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["all weights", "LoRA"])
def test_refreshed_teacher_resumes_from_checkpoint(lora: LoraConfig | None) -> None:
    distill = {"teacher": "policy", "refresh_steps": 3, "mix": "add"}
    made, scores = trainer(distill, lora=lora), {}
    for version in range(8):
        scores[version] = made.backend.compute_logprobs(SAMPLES)
        taught = made.backend.compute_logprobs(SAMPLES, TEACHER)
        for rollout_id, values in scores[version // 3 * 3].items():
            np.testing.assert_array_equal(taught[rollout_id], values)
        if version == 4:
            again = restored(made, trainer(distill, lora=lora))
        made.train_step(Batch(SAMPLES))
    for _ in range(4, 8):
        again.train_step(Batch(SAMPLES))
    ours, theirs = made.backend.save_state()[0], again.backend.save_state()[0]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_initial_teacher_keeps_initial_weights_only() -> None:
    initial, current = trainer({"teacher": "initial"}), trainer({"teacher": "policy", "refresh_steps": 1})
    first = initial.backend.compute_logprobs(SAMPLES)
    told = [replace(s, teacher_prompt_ids=np.array([9, 9], np.int32)) for s in SAMPLES]
    for made in (initial, current):
        for _ in range(2):
            made.train_step(Batch(told))
    for rollout_id, values in initial.backend.compute_logprobs(SAMPLES, TEACHER).items():
        np.testing.assert_array_equal(values, first[rollout_id])
    now = current.backend.compute_logprobs(SAMPLES)
    for rollout_id, values in current.backend.compute_logprobs(SAMPLES, TEACHER).items():
        np.testing.assert_array_equal(values, now[rollout_id])
    assert not tiny.local(current).kept.state()


@pytest.mark.parametrize(
    ("distill", "setting"),
    [
        ({"teacher": "initial"}, r'distill.teacher = "initial"'),
        ({"teacher": "policy", "refresh_steps": 2}, "distill.refresh_steps > 1"),
    ],
)
def test_a_checkpoint_without_the_teachers_weights_is_refused(distill: dict[str, Any], setting: str) -> None:
    with pytest.raises(ValueError, match=f"--resume with .*{setting}.*: the checkpoint holds no such weights"):
        restored(trainer({}), trainer(distill))


def test_a_teachers_passes_are_counted() -> None:
    plain, taught = trainer({}), trainer(MODEL, teacher_seed=1)
    plain.train_step(Batch(SAMPLES))
    plain.backend.compute_logprobs(SAMPLES)
    two_passes_more = plain.backend.flops
    plain.backend.compute_logprobs(SAMPLES)
    taught.train_step(Batch(SAMPLES))
    assert taught.backend.flops == pytest.approx(plain.backend.flops) and plain.backend.flops > two_passes_more


def test_without_a_teacher_there_is_none() -> None:
    made = trainer({})
    with pytest.raises(ValueError, match="there is no teacher: .* distill.teacher"):
        made.backend.compute_logprobs(SAMPLES, TEACHER)
    assert not any("distill" in key or "teacher" in key for key in made.train_step(Batch(SAMPLES)))

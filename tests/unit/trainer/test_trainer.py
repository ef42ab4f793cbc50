"""The trainer on a tiny Llama: invariances, exactness of the first micro-batch, state, files, and that it learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import gradient, plain_logprobs, plain_model, recorded, restored, trainer, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from local_trainer import build_batch
from rollover.config import AlgorithmConfig
from rollover.trainer import passes
from rollover.trainer.batch import Batch
from rollover.trainer.objective import Counts
from rollover.trainer.passes import PackedBatch, micro_batches, pack
from rollover.trainer.streams import with_stream
from rollover.types import Sample
from samples import group, random_samples, rollout, segment
from virtual_time import at_once

AGGREGATIONS = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]
SAMPLES = random_samples(1)


def gradients(samples: list[Sample], *, micro_batch_tokens: int, **algorithm: Any) -> tuple[float, torch.Tensor]:
    return gradient(trainer(algorithm, micro_batch_tokens=micro_batch_tokens), samples, micro_batch_tokens)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_logprobs_equal_the_plain_model(budget: int) -> None:
    t = trainer(micro_batch_tokens=budget)
    got = t.backend.compute_logprobs(SAMPLES)
    for sample in SAMPLES:
        expected = plain_logprobs(plain_model(), sample).detach()
        np.testing.assert_allclose(got[sample.rollout_id], expected, atol=2e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_is_independent_of_micro_batch_split(aggregation: str) -> None:
    """DESIGN test 9: alone, some together, all together."""
    alone = gradients(SAMPLES, micro_batch_tokens=1, aggregation=aggregation)
    for budget in (40, 10_000):
        loss, gradient = gradients(SAMPLES, micro_batch_tokens=budget, aggregation=aggregation)
        assert loss == pytest.approx(alone[0], rel=1e-5, abs=1e-6)
        assert float((gradient - alone[1]).norm() / alone[1].norm()) < 1e-5


def test_gradient_equals_autograd_through_the_plain_model() -> None:
    """token-mean of -w A log pi at the proximal policy: weights, masks, advantages and temperatures all in."""
    cap = 1.5
    _, got = gradients(SAMPLES, micro_batch_tokens=40, correction="token_truncate", correction_cap=cap)
    model, total = plain_model(), torch.zeros(())
    for s in SAMPLES:
        logprobs = plain_logprobs(model, s)
        ratio = (logprobs.detach() - torch.from_numpy(s.behavior_logprobs[s.mask])).exp()
        total = total - (ratio.clamp(max=cap) * torch.from_numpy(s.advantages[s.mask]) * logprobs).sum()
    (total / sum(int(s.mask.sum()) for s in SAMPLES)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float((got - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("aggregation", "dtype"),
    [
        ("token-mean", torch.float32),
        ("seq-mean-token-mean", torch.bfloat16),
        ("seq-mean-token-sum-norm", torch.float32),
        ("prompt-mean", torch.float32),
    ],
)
def test_a_gradient_that_comes_in_parts_is_the_same(aggregation: str, dtype: torch.dtype) -> None:
    """Whole groups in any order, some of them only with the step; a second step is as if nothing had been."""
    of = {i: [s for s in SAMPLES if s.group_id == i] for i in {s.group_id for s in SAMPLES}}
    algorithm = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}
    runs = []
    for order in ([], [0], [2, 0], [0, 1, 2]):
        t = trainer(algorithm, dtype=dtype, learning_rate=1e-3)
        metrics = []
        for _ in range(2):
            for group_id in order:
                t.accumulate(of[group_id])
            metrics.append(t.train_step(Batch(SAMPLES)))
        runs.append((metrics, torch.cat([p.detach().flatten() for p in tiny.local(t).optimizer.masters])))
    start = torch.cat([p.detach().flatten() for p in tiny.local(trainer(dtype=dtype)).optimizer.masters])
    tolerance = 1e-4 if dtype is torch.float32 else 0.03
    for metrics, masters in runs[1:]:
        assert float((masters - runs[0][1]).norm()) < tolerance * float((runs[0][1] - start).norm())
        for got, expected in zip(metrics, runs[0][0], strict=True):
            assert got == pytest.approx(expected, rel=1e-3 if dtype is torch.float32 else 0.05, abs=1e-3)


def test_accumulated_samples_are_not_computed_again() -> None:
    t = trainer(micro_batch_tokens=1)
    passes = recorded(t)
    t.accumulate([s for s in SAMPLES if s.group_id == 1])
    assert all(s.group_id == 1 for part in passes for s in part)
    t.train_step(Batch(SAMPLES))
    assert sorted(s.rollout_id for part in passes for s in part) == sorted(s.rollout_id for s in SAMPLES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_first_micro_batches_have_ratio_exactly_one(dtype: torch.dtype, checkpointing: bool) -> None:
    """The proximal pass, when there is one, gives the bits of the current log-probs at equal weights."""
    t = trainer(dtype=dtype, gradient_checkpointing=checkpointing)
    proximal = t.backend.compute_logprobs(SAMPLES)
    counts = Counts.from_samples(SAMPLES)
    for samples in (SAMPLES, with_stream(SAMPLES, "proximal_logprobs", proximal)):
        for micro in micro_batches(samples, 40):
            sums = t.backend.forward_backward(micro, counts).totals()
            assert sums["max/ratio"] == 1.0
            assert sums["sum/ratio"] == sums["count/tokens"]
            assert sums["sum/clipped"] == 0.0
    assert t.train_step(Batch(SAMPLES))["ratio/max"] == 1.0


def test_the_proximal_pass_packs_rows_as_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows together round differently; at learning rate 0 the ratio is exactly 1 in every minibatch."""
    t = trainer(dtype=torch.bfloat16, micro_batch_tokens=60, minibatches_per_step=3, learning_rate=0.0)
    rows: dict[bool, list[list[int]]] = {False: [], True: []}

    def spy(*args: Any) -> PackedBatch:
        packed = pack(*args)
        rows[torch.is_grad_enabled()].append(packed.input_ids_N.tolist())
        return packed

    monkeypatch.setattr(passes, "pack", spy)
    samples = random_samples(5, 6, 6)  # 2 groups a minibatch, which the budget does not divide
    metrics = t.train_step(Batch(samples))
    first = len(list(micro_batches(samples[:12], 60)))
    assert rows[False] == rows[True][first:] and len(rows[False]) >= 4
    across = [[s.rollout_id for s in m] for m in micro_batches(samples[12:], 60)]
    apart = [[s.rollout_id for s in m] for part in (samples[12:24], samples[24:]) for m in micro_batches(part, 60)]
    assert across != apart, "or this test could not see the difference"
    assert metrics["ratio/max"] == 1.0 and metrics["ratio/mean"] == 1.0


def test_clip_bounds_come_from_the_config() -> None:
    """In the second minibatch ratios differ from 1; each bound clips its own side."""

    def clipped(low: float, high: float) -> float:
        t = trainer({"clip_low": low, "clip_high": high}, minibatches_per_step=2, micro_batch_tokens=10_000)
        return t.train_step(Batch(random_samples(1, 2, 6)))["clip_fraction"]

    lower, upper, both = clipped(1e-4, 1e6), clipped(1 - 1e-9, 1e-4), clipped(1e-4, 1e-4)
    assert clipped(1 - 1e-9, 1e6) == 0.0
    assert lower > 0 and upper > 0 and both == pytest.approx(lower + upper)


def test_on_policy_metrics_and_names() -> None:
    t = trainer()
    known = t.backend.compute_logprobs(SAMPLES)
    samples = []
    for s in SAMPLES:
        behavior = s.behavior_logprobs.copy()
        behavior[s.mask] = known[s.rollout_id]
        samples.append(s.with_streams(behavior_logprobs=behavior))
    metrics = t.train_step(Batch(samples))
    found = {k: metrics[k] for k in metrics if k.split("/")[0] in ("mismatch", "importance", "ratio")}
    for policy in ("proximal", "behavior"):
        assert found.pop(f"mismatch/{policy}_ppl") > 1
    ones = {"ratio/mean", "ratio/max", "mismatch/ppl_ratio"}
    ones |= {f"importance/{k}" for k in ("mean", "max", "weight_mean", "ess", "ess_token_ratio", "ess_sequence_ratio")}
    assert found == {k: 1.0 if k in ones else 0.0 for k in found} and ones < found.keys()
    assert {"mismatch/kl", "mismatch/k3", "mismatch/chi2_sequence", "importance/capped_share"} < found.keys()
    assert metrics["learning_rate"] == 1e-2 and metrics["train/skipped_steps"] == 0.0
    assert metrics["grad_norm"] > 0 and 0 < metrics["entropy"] < np.log(102) + 1e-3
    assert metrics.keys() >= {"loss", "clip_fraction"} and all(isinstance(v, float) for v in metrics.values())


def test_importance_metrics_are_before_the_cap() -> None:
    t = trainer({"correction": "token_truncate", "correction_cap": 1.5})
    known = t.backend.compute_logprobs(SAMPLES)
    ratios = np.concatenate([np.exp(known[s.rollout_id] - s.behavior_logprobs[s.mask]) for s in SAMPLES])
    metrics = t.train_step(Batch(SAMPLES))
    assert metrics["importance/mean"] == pytest.approx(ratios.mean(), rel=1e-4)
    assert metrics["importance/max"] == pytest.approx(ratios.max(), rel=1e-4) and ratios.max() > 1.5
    assert metrics["importance/capped_share"] == pytest.approx((ratios > 1.5).mean())


def test_checkpointing_gives_the_same_gradient() -> None:
    plain, saving = (trainer(gradient_checkpointing=on) for on in (False, True))
    torch.testing.assert_close(gradient(plain, SAMPLES)[1], gradient(saving, SAMPLES)[1], atol=1e-7, rtol=1e-5)
    for t, on in ((plain, False), (saving, True)):
        assert any(m.gradient_checkpointing and m.training for m in tiny.local(t).model.model.layers) == on


def test_masked_samples_change_nothing() -> None:
    gone = dataclasses.replace(SAMPLES[4], mask=np.zeros_like(SAMPLES[4].mask))
    without = gradients([s for s in SAMPLES if s is not SAMPLES[4]], micro_batch_tokens=40)
    masked = gradients([gone if s is SAMPLES[4] else s for s in SAMPLES], micro_batch_tokens=40)
    assert masked[0] == without[0] and torch.equal(masked[1], without[1])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_skipping_zero_advantages_changes_no_update(aggregation: str) -> None:
    """Also where a whole minibatch has none: the momentum goes on."""
    quiet = [s.with_streams(advantages=np.zeros_like(s.advantages)) for s in SAMPLES]
    some = [q if s.group_id == 1 or i % 2 else s for i, (s, q) in enumerate(zip(SAMPLES, quiet, strict=True))]
    runs, skipped = [], []
    for skip in (False, True):
        t = trainer({"aggregation": aggregation}, skip_zero_advantage=skip, minibatches_per_step=3)
        skipped.append([t.train_step(Batch(batch))["train/zero_advantage_tokens"] for batch in (SAMPLES, some, quiet)])
        runs.append(weights(t))
    torch.testing.assert_close(runs[0], runs[1], atol=2e-6, rtol=1e-5)
    assert skipped[0] == [0, 0, 0]
    assert skipped[1][0] == 0 < skipped[1][1] < skipped[1][2] == sum(int(s.mask.sum()) for s in SAMPLES)


def test_a_step_without_any_loss_token_changes_no_weight() -> None:
    t = trainer(weight_decay=0.1)
    before = weights(t)
    metrics = t.train_step(Batch([dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in SAMPLES]))
    assert torch.equal(weights(t), before)
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0 and t.policy_version == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_training_is_identical(dtype: torch.dtype) -> None:
    options: dict[str, Any] = dict(dtype=dtype, minibatches_per_step=2, schedule="linear")
    batches = [Batch(random_samples(i)) for i in range(4)]
    t = trainer(**options)
    for batch in batches[:2]:
        t.train_step(batch)
    resumed = restored(t, trainer(loaded=tiny.loaded(seed=9), **options))
    assert resumed.policy_version == 2
    assert [resumed.train_step(batch) for batch in batches[2:]] == [t.train_step(batch) for batch in batches[2:]]
    assert torch.equal(weights(resumed), weights(t))
    assert t.policy_version == resumed.policy_version == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_publish_and_saved_folder_are_the_trained_model(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    t = trainer(dtype=dtype, learning_rate=1e-3, loaded=tiny.loaded(tie_word_embeddings=tied))
    t.train_step(Batch(SAMPLES))
    published = dict(at_once(t.backend.publish()))
    other = tiny.model(seed=5, dtype=dtype, tie_word_embeddings=tied)
    assert published.keys() == dict(other.named_parameters()).keys()
    assert ("lm_head.weight" in published) != tied
    assert {v.dtype for v in published.values()} == {dtype}
    assert dict(at_once(t.backend.publish())).keys() == published.keys()

    t.backend.save_model(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.dtype == dtype and saved.config._attn_implementation != "rollover"
    assert {n: p.shape for n, p in saved.named_parameters()} == {n: p.shape for n, p in published.items()}
    assert all(torch.equal(p, published[n]) for n, p in saved.named_parameters())
    ids = AutoTokenizer.from_pretrained(tmp_path)("1+1=2", add_special_tokens=False)["input_ids"]
    assert ids == tiny.tokenizer()("1+1=2", add_special_tokens=False)["input_ids"]
    # The folder computes what the trainer computes, at large positions too.
    long = dataclasses.replace(SAMPLES[0], prompt_ids=np.full(900, 7, dtype=np.int32), temperature=1.0)
    trained = t.backend.compute_logprobs([long])["0-0"]
    expected = plain_logprobs(saved, long).float().detach()
    np.testing.assert_allclose(expected, trained, atol=1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_token_of_the_environment_has_no_gradient(trainable: bool) -> None:
    """Nothing follows the last tokens: which ones they are, and whatever their streams say, changes no gradient, unless
    a policy sampled them."""

    def gradient_of(last: list[int], logprob: float) -> torch.Tensor:
        of_env = dataclasses.replace(segment(last, trainable=trainable), logprobs=np.full(2, logprob, np.float32))
        ending = [segment([11, 12, 13]), segment([21, 22], trainable=False), segment([14, 15]), of_env]
        others = [rollout(0, i, float(i), [segment([10 + i, 20, 30])]) for i in (1, 2)]
        made = group(0, [rollout(0, 0, 5.0, ending), *others])
        samples = build_batch([made], AlgorithmConfig()).samples
        return gradients(samples, micro_batch_tokens=1000)[1]

    one, other = gradient_of([31, 32], -1.0 if trainable else 0.0), gradient_of([41, 42], -2.0)
    assert one.abs().sum() > 0
    assert torch.equal(one, other) == (not trainable)


def test_how_far_a_step_is_can_be_seen_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = trainer(micro_batch_tokens=30), []
    backend = tiny.local(made)
    forward_backward = backend.optim_step

    def watched(*args: object, **options: object) -> dict[str, float]:
        seen.append(made.computed.tokens())
        return forward_backward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "optim_step", watched)
    samples = random_samples(0)
    for _ in range(2):
        made.train_step(Batch(samples))
    total = sum(int(s.mask.sum()) for s in samples)
    assert seen == [(total, total)] * 2

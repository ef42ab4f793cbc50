"""The loss of a micro-batch against its parts, and what a training step keeps for it: proximal, reference, critic."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import recorded, trainer

import tiny
from rollover.algorithms import correction
from rollover.algorithms.token_batch import TokenBatch
from rollover.config import AlgorithmConfig
from rollover.trainer.batch import Batch
from rollover.trainer.objective import Counts, Objective, rate_scale
from rollover.types import Sample
from samples import random_samples

SAMPLES = random_samples(1)


def streams(seed: int = 0) -> TokenBatch:
    """Random streams of two rows: current, proximal and behavior policy apart."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(2, 5, generator=generator)

    proximal = noise(1.0) - 3
    values = {
        "logprobs": proximal + noise(0.2),
        "entropy": noise(1.0).abs(),
        "proximal_logprobs": proximal,
        "behavior_logprobs": proximal + noise(0.4),
        "advantages": torch.tensor([1.5, -0.5])[:, None].expand(2, 5),
        "versions": torch.tensor([[3, 3, 4, 4, 0], [0, 2, 2, 5, 5]]),
        "staleness": 5 - torch.tensor([[3, 3, 4, 4, 0], [0, 2, 2, 5, 5]]),
    }
    mask_BT = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    return dataclasses.replace(TokenBatch.of(mask_BT, **values), sequences=["0-0", "1-0"])


COUNTS = Counts(tokens=8, sequence_tokens={"0-0": 4, "1-0": 4}, group_tokens={0: 4, 1: 4})


def loss_of(given: TokenBatch, **algorithm: Any) -> tuple[float, dict[str, float]]:
    loss, sums = Objective(AlgorithmConfig.model_validate(algorithm), 16)(given, COUNTS)
    return float(loss), {k: float(v) for k, v in sums.items()}


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "icepop", "sequence_mask", "segment_truncate"])
def test_the_weight_of_every_mode_multiplies_the_loss(mode: str) -> None:
    """REINFORCE holds no ratio: its weight is current/behavior, whatever the proximal policy (verl's bypass mode)."""
    given = streams()
    got, sums = loss_of(given, loss="reinforce", correction=mode, correction_cap=1.3, correction_floor=0.5)
    weights = correction.importance_weights(
        given.logprobs_BT, given.behavior_logprobs_BT, given.mask_BT, mode=mode, cap=1.3, floor=0.5,
        versions_BT=given.versions_BT,
    )  # fmt: skip
    expected = -(weights * given.logprobs_BT * given.advantages_BT)[given.mask_BT].sum() / 8
    assert got == pytest.approx(float(expected), rel=1e-5)
    assert sums["sum/weight"] == pytest.approx(float(weights.sum()), rel=1e-5)


@pytest.mark.parametrize(("floor", "expected"), [(0.0, [0.25, 0.625, 1.25]), (0.5, [0.5, 0.625, 1.25])])
def test_the_floor_raises_the_weights_and_counts_what_is_below_it(floor: float, expected: list[float]) -> None:
    """Weights outside the loss are proximal / behavior: 0.25, 0.625 and 2.5, held at the cap of 1.25. Without a floor
    what is below 1 / cap = 0.8 is counted, with one what is below that."""
    ratio = torch.tensor([[0.25, 0.625, 2.5]])
    ones, none = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.int32)
    given = TokenBatch.of(
        ones.bool(), logprobs=-ones, entropy=ones, proximal_logprobs=-ones, behavior_logprobs=-ones - ratio.log(),
        advantages=ones, versions=none,
    )  # fmt: skip
    config = AlgorithmConfig(loss="clip", correction="token_truncate", correction_cap=1.25, correction_floor=floor)
    loss, sums = Objective(config, 16)(given, Counts(3, {"0-0": 3}, {0: 3}))
    assert float(loss) == pytest.approx(-sum(expected) / 3)
    assert float(sums["sum/weight"]) == pytest.approx(sum(expected))
    assert float(sums["sum/below"]) == (1 if floor else 2)


def test_kl_to_the_reference_and_the_entropy_bonus_are_added() -> None:
    given = streams().with_streams(reference_logprobs=streams(1).stream("proximal_logprobs"))
    plain, _ = loss_of(given, correction="none")
    d = given.logprobs_BT - given.stream("reference_logprobs")
    k3 = (torch.exp(-d) + d - 1)[given.mask_BT].sum() / 8
    with_kl, sums = loss_of(given, correction="none", kl_coef=0.1, kl_kind="k3")
    assert with_kl - plain == pytest.approx(0.1 * float(k3), rel=1e-4)
    assert sums["sum/reference_kl"] == pytest.approx(8 * float(k3), rel=1e-5)
    ratio = torch.exp(given.logprobs_BT - given.behavior_logprobs_BT)
    corrected, _ = loss_of(given, correction="none", kl_coef=0.1, kl_bias_correction=True)
    expected = (ratio * (torch.exp(-d) + d - 1))[given.mask_BT].sum() / 8
    assert corrected - plain == pytest.approx(0.1 * float(expected), rel=1e-4)
    bonus, _ = loss_of(given, correction="none", entropy_coef=0.2)
    assert bonus - plain == pytest.approx(-0.2 * float(given.entropy_BT[given.mask_BT].sum()) / 8, rel=1e-4)


def test_proximal_choices() -> None:
    given = streams()
    naive, _ = loss_of(given, proximal="behavior", correction="none")
    assert naive == loss_of(given.with_streams(proximal_logprobs=given.behavior_logprobs_BT), correction="none")[0]
    between = correction.interpolated_proximal(
        given.behavior_logprobs_BT, given.logprobs_BT, given.stream("staleness"), mask_BT=given.mask_BT
    )
    got, _ = loss_of(given, proximal="interpolated")
    assert got == loss_of(given.with_streams(proximal_logprobs=between))[0] != loss_of(given)[0]


def test_options_of_the_loss_are_checked_before_the_run(tmp_path, monkeypatch) -> None:
    assert loss_of(streams(), loss="sapo", loss_options={"tau_positive": 2.0})[0] != loss_of(streams(), loss="sapo")[0]
    with pytest.raises(ValueError, match="algorithm.loss = 'sapo'.*tau is not an option.*tau_positive"):
        loss_of(streams(), loss="sapo", loss_options={"tau": 2.0})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def double(t, *, clip_high): return -clip_high * t.logprobs_BT * t.advantages_BT, t.mask_BT & False"
    )
    own, _ = loss_of(streams(), loss="mine.py:double", clip_high=2.0, correction="none")
    assert own == pytest.approx(2 * loss_of(streams(), loss="reinforce", correction="none")[0])


@pytest.mark.parametrize("parameters", ["*, clip_high", "clip_low=0.1, clip_high=5.0"])
def test_options_that_an_own_loss_names_come_from_the_configuration(tmp_path, monkeypatch, parameters: str) -> None:
    """However the parameter is written: every option of [algorithm] is one."""
    monkeypatch.chdir(tmp_path)
    lines = f"""
def loss(t, {parameters}): return -clip_high * t.logprobs_BT * t.advantages_BT, t.mask_BT & False
def penalty(t, kl_coef=9.0, entropy_coef=9.0, beta=1.0):
    return -(kl_coef + entropy_coef) * beta * t.logprobs_BT * t.advantages_BT, t.mask_BT & False
"""
    (tmp_path / "mine.py").write_text(lines)
    own, _ = loss_of(streams(), loss="mine.py:loss", clip_high=2.0, correction="none")
    plain, _ = loss_of(streams(), loss="reinforce", correction="none")
    assert own == pytest.approx(2 * plain)
    bonus, _ = loss_of(streams(), loss="reinforce", correction="none", entropy_coef=0.5)
    own, _ = loss_of(streams(), loss="mine.py:penalty", entropy_coef=0.5, loss_options={"beta": 3.0}, correction="none")
    assert own == pytest.approx(0.5 * 3.0 * plain + bonus - plain)
    own, _ = loss_of(streams(), loss="mine.py:penalty", loss_options={"kl_coef": 4.0}, correction="none")
    assert own == pytest.approx(4.0 * plain), "loss_options is nearer"


def test_effective_sample_size_scales_the_rate() -> None:
    objective = Objective(AlgorithmConfig(ess_step_scaling=True), 16)
    _, sums = objective(streams(), COUNTS)
    given = streams()
    ratio_B = torch.exp(((given.stream("proximal_logprobs") - given.behavior_logprobs_BT) * given.mask_BT).sum(-1))
    share = float(ratio_B.sum() ** 2 / (2 * (ratio_B**2).sum()))
    assert rate_scale({k: float(v) for k, v in sums.items()}) == pytest.approx(share**0.5, rel=1e-5)
    assert rate_scale({}) == 1.0
    scaled, plain = trainer({"ess_step_scaling": True}), trainer({})
    rates = [t.train_step(Batch(SAMPLES))["learning_rate"] for t in (scaled, plain)]
    assert 0 < rates[0] < rates[1] == 1e-2


# What a step keeps


def at_versions(samples: list[Sample], *versions: int) -> list[Sample]:
    """The tokens of each sample, in equal parts under these versions."""
    return [s.with_streams(versions=np.sort(np.resize(np.array(versions, np.int32), len(s.versions)))) for s in samples]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshot_proximal_is_of_the_weights_that_sampled_each_token(dtype: torch.dtype) -> None:
    t = trainer({"proximal": "snapshot"}, dtype=dtype, max_staleness=2)
    under = {}
    for version in range(3):
        under[version] = t.backend.compute_logprobs(SAMPLES)
        if version < 2:
            t.train_step(Batch(at_versions(SAMPLES, version)))
    mixed = at_versions(SAMPLES, 0, 1, 2)
    passes = recorded(t)
    for version, expected in under.items():
        again = t.backend.compute_logprobs(SAMPLES, version)
        assert all(np.array_equal(again[rollout_id], values) for rollout_id, values in expected.items())
    with pytest.raises(ValueError, match="weights of policy version 3 are not kept"):
        t.backend.compute_logprobs(SAMPLES, 3)
    ratio = t.train_step(Batch(mixed))["ratio/max"]
    got = {s.rollout_id: s.in_loss("proximal_logprobs") for part in passes for s in part}
    for s in mixed:
        versions = s.versions[s.mask]
        expected = np.array([under[v][s.rollout_id][i] for i, v in enumerate(versions)])
        np.testing.assert_array_equal(got[s.rollout_id], expected)
    assert not np.allclose(under[0][SAMPLES[0].rollout_id], under[2][SAMPLES[0].rollout_id])
    assert ratio > 1.001  # current/proximal, though it is the first minibatch
    assert {k for k in tiny.local(t).kept.state() if k.endswith("norm.weight") and "layers" not in k} == {
        f"kept/version-{v}/model.norm.weight" for v in (1, 2, 3)
    }


def test_reference_is_the_initial_policy() -> None:
    t = trainer({"kl_coef": 0.5})
    first, second = (t.train_step(Batch(SAMPLES))["kl/reference"] for _ in range(2))
    assert first == 0.0 and second > 1e-4


def test_zero_advantages_still_count_where_other_terms_need_them() -> None:
    flat = [s.with_streams(advantages=np.zeros_like(s.advantages)) for s in SAMPLES]
    assert trainer({}).train_step(Batch(flat))["grad_norm"] == 0.0
    metrics = trainer({"entropy_coef": 0.1}).train_step(Batch(flat))
    assert metrics["grad_norm"] > 0 and metrics["train/zero_advantage_tokens"] == 0


def test_the_off_policy_mask_works_on_chunked_logprobs() -> None:
    """Through the whole trainer, in several micro-batches: sequences that are far away and bad are left out."""
    t = trainer({"off_policy_mask_above": 0.5})
    known = t.backend.compute_logprobs(SAMPLES)
    samples, masked = [], 0
    for i, s in enumerate(SAMPLES):
        behavior = s.behavior_logprobs.copy()
        behavior[s.mask] = known[s.rollout_id] + (1.0 if i % 2 else 0.1)
        samples.append(s.with_streams(behavior_logprobs=behavior))
        masked += int(s.mask.sum()) * bool(i % 2 and s.advantages[0] < 0)
    tokens = sum(int(s.mask.sum()) for s in SAMPLES)
    assert 0 < masked < tokens
    assert t.train_step(Batch(samples))["off_policy/masked_share"] == pytest.approx(masked / tokens)


# Stale tokens


def test_the_bias_corrected_kl_of_stale_tokens_has_the_gradient_of_the_kl() -> None:
    """Enumerated over six tokens, drawn from a behavior policy that is neither the current nor the proximal one."""
    generator = torch.Generator().manual_seed(0)
    logits, proximal, behavior, reference = (torch.randn(6, generator=generator) for _ in range(4))
    logits.requires_grad_(True)
    wanted = torch.autograd.grad(
        (logits.softmax(-1) * (logits.log_softmax(-1) - reference.log_softmax(-1))).sum(), logits, retain_graph=True
    )[0]

    def drawn(policy: torch.Tensor) -> torch.Tensor:
        """[1, 6]: one row that holds every token once."""
        return policy.log_softmax(-1)[None]

    def expected(token: int, **algorithm: Any) -> torch.Tensor:
        """The gradient of the loss of one token, times its probability under the behavior policy."""
        mask = torch.zeros(1, 6).bool()
        mask[0, token] = True
        none = torch.zeros(1, 6)
        given = TokenBatch.of(
            mask, logprobs=drawn(logits), entropy=none, proximal_logprobs=drawn(proximal), advantages=none,
            behavior_logprobs=drawn(behavior), reference_logprobs=drawn(reference), versions=none, staleness=none + 2,
        )  # fmt: skip
        config = AlgorithmConfig.model_validate({"kl_coef": 1.0, "aggregation": "token-sum", **algorithm})
        loss, _ = Objective(config, 16)(given, Counts(1, {"0-0": 1}, {0: 1}))
        return behavior.softmax(-1)[token] * torch.autograd.grad(loss, logits, retain_graph=True)[0]

    for kind in ("k1", "k3"):
        for policy in ("step_start", "behavior", "interpolated", "snapshot"):
            options = {"kl_kind": kind, "kl_bias_correction": True, "proximal": policy}
            got = torch.stack([expected(token, **options) for token in range(6)]).sum(0)
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    plain = torch.stack([expected(token, kl_kind="k3") for token in range(6)]).sum(0)
    assert float((plain - wanted).norm() / wanted.norm()) > 0.1


def test_gmpo_weighs_a_row_by_the_geometric_mean_of_its_tokens_weights() -> None:
    given = streams()
    weights = correction.importance_weights(
        given.stream("proximal_logprobs"), given.behavior_logprobs_BT, given.mask_BT, mode="token_truncate", cap=1.3
    )
    row_B = [w[m].log().mean().exp() for w, m in zip(weights, given.mask_BT, strict=True)]
    options = {"loss": "gmpo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4, "clip_high": 0.4}
    rows = []
    for keep in (0, 1):
        mask = given.mask_BT & (torch.arange(2) == keep)[:, None]
        plain, _ = loss_of(
            dataclasses.replace(TokenBatch.of(mask, **given.streams), sequences=given.sequences),
            correction="none",
            **options,
        )
        rows.append(plain * float(row_B[keep]))
    got, _ = loss_of(given, correction="token_truncate", correction_cap=1.3, **options)
    assert got == pytest.approx(sum(rows), rel=1e-5)


def test_a_loss_of_ones_own_keeps_its_terms_at_advantage_0(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def loss(t): return -t.logprobs_BT * t.advantages_BT + t.logprobs_BT**2, t.mask_BT & False"
    )
    flat = [s.with_streams(advantages=np.zeros_like(s.advantages)) for s in SAMPLES]
    runs = [
        trainer({"loss": "mine.py:loss"}, skip_zero_advantage=skip).train_step(Batch(flat)) for skip in (True, False)
    ]
    assert runs[0]["grad_norm"] == runs[1]["grad_norm"] > 1 and runs[0]["train/zero_advantage_tokens"] == 0

"""Several epochs over the groups of a step: beside a plain loop, what each update is proximal to, draws, early stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import plain_logprobs, plain_model, recorded, trainer, weights

import tiny
from rollover.config import Config
from rollover.trainer.batch import Batch
from rollover.trainer.streams import SAMPLE_STREAMS
from rollover.types import Sample
from samples import random_samples

SAMPLES = random_samples(2, num_groups=4, size=2)
SEVERAL: dict[str, Any] = {"minibatches_per_step": 2, "epochs_per_step": 2}


def groups(updates: list[list[Sample]]) -> list[list[int]]:
    return [list(dict.fromkeys(s.group_id for s in samples)) for samples in updates]


def plain_step(model: Any, optimizer: torch.optim.Optimizer, parts: list[list[Sample]]) -> list[float]:
    """PPO's clip at 0.2 against the log-probs at the start, times proximal/behavior up to 2, a mean over tokens.

    Returns the gradient norm of each update.
    """
    norms = []
    with torch.no_grad():
        start = {s.rollout_id: plain_logprobs(model, s) for part in parts for s in part}
    for part in parts:
        total = torch.zeros(())
        for s in part:
            old, behavior = start[s.rollout_id], torch.from_numpy(s.behavior_logprobs[s.mask])
            ratio = (plain_logprobs(model, s) - old).exp()
            gain = torch.minimum(ratio * s.advantages[0], ratio.clamp(0.8, 1.2) * s.advantages[0])
            total = total - ((old - behavior).exp().clamp(max=2.0) * gain).sum()
        (total / sum(int(s.mask.sum()) for s in part)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("reshuffle", [True, False])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_two_epochs_of_two_minibatches_are_those_of_a_plain_loop(budget: int, reshuffle: bool) -> None:
    t = trainer(learning_rate=1e-3, micro_batch_tokens=budget, reshuffle=reshuffle, **SEVERAL)
    model = plain_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0, fused=True)
    for _ in range(2):
        updates = recorded(t)
        metrics = t.train_step(Batch(SAMPLES))
        assert metrics["train/updates"] == 4 and tiny.local(t).optimizer.step_count == 4 * t.policy_version
        first, second, *others = groups(updates)
        assert [first, second] == [[0, 1], [2, 3]] and sorted(sum(others, [])) == [0, 1, 2, 3]
        assert reshuffle or others == [first, second]
        norms = plain_step(model, adamw, updates)
        assert metrics["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-3)
        assert metrics["grad_norm_max"] == pytest.approx(max(norms), rel=1e-3) and max(norms) > min(norms)
    assert t.policy_version == 2
    theirs = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(t), theirs, atol=1e-6, rtol=1e-6)
    assert float((theirs - weights(trainer())).abs().max()) > 1e-3


def test_minibatch_shuffle_depends_on_seed_and_version() -> None:
    """Every epoch holds each group once, and a minibatch keeps their order."""
    samples, found = random_samples(0, num_groups=8, size=1), {}
    for seed in (0, 1):
        t = trainer(minibatches_per_step=4, epochs_per_step=3, micro_batch_tokens=10_000)
        t.seed = seed
        for version in range(2):
            updates = recorded(t)
            t.train_step(Batch(samples))
            epochs = [groups(updates)[i : i + 4] for i in (0, 4, 8)]
            assert epochs[0] == [[0, 1], [2, 3], [4, 5], [6, 7]]
            assert all(sorted(sum(epoch, [])) == list(range(8)) for epoch in epochs)
            assert all(part == sorted(part) for epoch in epochs for part in epoch)
            found |= {(seed, version, i): str(epoch) for i, epoch in enumerate(epochs[1:])}
    assert len(set(found.values())) == 8


def test_zero_advantage_sample_counts_but_is_not_computed() -> None:
    silent = [s.with_streams(advantages=np.zeros_like(s.advantages)) if s.group_id == 3 else s for s in SAMPLES]
    t = trainer(**SEVERAL)
    updates = recorded(t)
    metrics = t.train_step(Batch(silent))
    assert {s.group_id for samples in updates for s in samples} == {0, 1, 2}
    assert metrics["train/zero_advantage_tokens"] == sum(s.mask.sum() for s in silent if s.group_id == 3)


# What each update is proximal to


@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_update_is_proximal_to_the_start_of_the_step(minibatches: int) -> None:
    start = trainer().backend.compute_logprobs(SAMPLES)
    t = trainer(minibatches_per_step=minibatches, epochs_per_step=3)
    updates = recorded(t)
    metrics = t.train_step(Batch(SAMPLES))
    assert len(updates) == 3 * minibatches and all("proximal_logprobs" not in s.streams for s in updates[0])
    for samples in updates[1:]:
        for s in samples:
            np.testing.assert_allclose(s.in_loss("proximal_logprobs"), start[s.rollout_id], atol=1e-5)
    assert metrics["ratio/max"] > 1.01


@pytest.mark.parametrize("rejection", [{}, {"token_k2": 1e9}], ids=str)
def test_snapshots_are_proximal_in_every_epoch(rejection: dict[str, float]) -> None:
    """Tokens of version 0 to the weights of version 0, those of version 1 to the weights at the start of the step."""
    t = trainer({"proximal": "snapshot", "rejection": rejection}, max_staleness=2, **SEVERAL)
    version_name = {0: t.backend.compute_logprobs(SAMPLES)}
    t.train_step(Batch(SAMPLES))
    version_name[1] = t.backend.compute_logprobs(SAMPLES)
    mixed = [s.with_streams(versions=np.arange(len(s.token_ids), dtype=np.int32) % 2) for s in SAMPLES]
    updates = recorded(t)
    t.train_step(Batch(mixed))
    assert len(updates) == 4
    for samples in updates:
        for s in samples:
            versions = s.versions[s.mask]
            expected = np.where(versions == 0, version_name[0][s.rollout_id], version_name[1][s.rollout_id])
            np.testing.assert_allclose(s.in_loss("proximal_logprobs"), expected, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm", [{"proximal": "behavior"}, {"proximal": "interpolated"}, {"loss": "reinforce"}], ids=str
)
def test_what_needs_no_proximal_pass_needs_none_in_any_epoch(algorithm: dict[str, Any]) -> None:
    t = trainer(algorithm, **SEVERAL)
    updates = recorded(t)
    t.backend.compute_logprobs = None  # type: ignore[method-assign, assignment]
    t.train_step(Batch(SAMPLES))
    assert len(updates) == 4 and all("proximal_logprobs" not in s.streams for samples in updates for s in samples)


@pytest.mark.parametrize("algorithm", [{"rejection": {"token_k3": 2.0}}, {"kl_coef": 0.1}], ids=str)
def test_rejection_and_reference_are_of_the_start_in_every_epoch(algorithm: dict[str, Any]) -> None:
    t = trainer(algorithm, **SEVERAL)
    updates = recorded(t)
    t.train_step(Batch(SAMPLES))
    masks: dict[str, bytes] = {}
    for samples in updates:
        for s in samples:
            assert masks.setdefault(s.rollout_id, s.mask.tobytes()) == s.mask.tobytes()
            assert all(stream.shape == s.mask.shape for stream in s.streams.values())


# Early stop


def mean_kl(start: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]) -> float:
    change = np.concatenate([now[k] - start[k] for k in now]).astype(np.float64)
    return float((np.exp(change) - 1 - change).mean())


def test_updates_end_before_the_first_whose_kl_is_too_large() -> None:
    common: dict[str, Any] = {"learning_rate": 3e-3, "schedule": "linear", "reshuffle": False, **SEVERAL}
    free = trainer(**common)
    start = free.backend.compute_logprobs(SAMPLES)
    kls, made = [], []
    original = free.backend.optim_step

    def spy(*args: Any, **options: Any) -> dict[str, float]:
        part = SAMPLES[:4] if len(kls) % 2 == 0 else SAMPLES[4:]
        kls.append(mean_kl(start, free.backend.compute_logprobs(part)))
        found = original(*args, **options)
        made.append(weights(free))
        return found

    free.backend.optim_step = spy  # type: ignore[method-assign]
    free.train_step(Batch(SAMPLES))
    assert kls[0] == 0 and 0 < kls[1] < kls[2], kls

    stopped = trainer(max_kl=(kls[1] + kls[2]) / 2, **common)
    metrics = stopped.train_step(Batch(SAMPLES))
    assert metrics["train/updates"] == 2 and metrics["kl/step_start"] == pytest.approx(kls[2], rel=1e-3)
    torch.testing.assert_close(weights(stopped), made[1], atol=1e-7, rtol=1e-6)
    assert metrics["learning_rate"] == pytest.approx(3e-3 * (1 - 1 / 40)), "of the last update that was made"
    assert stopped.policy_version == 1 and not stopped.in_update
    assert tiny.local(stopped).optimizer.step_count == 4, "in the schedule they count"
    assert not tiny.local(stopped).optimizer.gradients()

    loose = trainer(max_kl=2 * max(kls), **common)
    metrics = loose.train_step(Batch(SAMPLES))
    assert metrics["train/updates"] == 4 and metrics["kl/step_start"] == pytest.approx(max(kls), rel=1e-3)
    torch.testing.assert_close(weights(loose), made[-1], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("algorithm", [{}, {"proximal": "behavior"}, {"proximal": "snapshot"}, {"loss": "reinforce"}])
def test_max_kl_keeps_first_update(algorithm: dict[str, Any]) -> None:
    options: dict[str, Any] = {"learning_rate": 1e-3, "max_staleness": 2}
    plain, t = trainer(algorithm, **options), trainer(algorithm, epochs_per_step=3, max_kl=1e-9, **options)
    expected = plain.train_step(Batch(SAMPLES))
    metrics = t.train_step(Batch(SAMPLES))
    assert metrics["train/updates"] == 1 and metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    start, now = trainer().backend.compute_logprobs(SAMPLES), plain.backend.compute_logprobs(SAMPLES)
    assert metrics["kl/step_start"] == pytest.approx(mean_kl(start, now), rel=1e-3)
    torch.testing.assert_close(weights(t), weights(plain), atol=1e-7, rtol=1e-6)
    assert "kl/step_start" not in expected


def test_a_backend_that_does_not_count_the_kl_says_so() -> None:
    t = trainer(epochs_per_step=2, max_kl=1.0)
    original = t.backend.forward_backward
    t.backend.forward_backward = lambda samples, counts: original(  # type: ignore[method-assign]
        [s.only((*SAMPLE_STREAMS, "proximal_logprobs")) for s in samples], counts
    )
    with pytest.raises(ValueError, match="train.max_kl: the backend's .* stream start_logprobs"):
        t.train_step(Batch(SAMPLES))


# State and rules


def config(algorithm: dict[str, Any] | None = None, **train: Any) -> Config:
    return Config.model_validate({"train": train, "algorithm": algorithm or {}})


@pytest.mark.parametrize(
    ("train", "several", "one"),
    [
        ({"epochs_per_step": 2}, "train.epochs_per_step = 2 with", "Set train.epochs_per_step = 1,"),
        (
            {"epochs_per_step": 2, "minibatches_per_step": 4},
            "train.minibatches_per_step = 4 and train.epochs_per_step = 2 with",
            "Set train.minibatches_per_step = 1 and train.epochs_per_step = 1,",
        ),
    ],
)
def test_uncorrected_loss_with_epochs_is_refused(train: dict[str, Any], several: str, one: str) -> None:
    forgetting = {"loss": "reinforce", "correction": "none"}
    with pytest.raises(ValueError) as refused:
        config(forgetting, **train)
    assert several in str(refused.value) and one in str(refused.value)
    config({**forgetting, "allow_uncorrected": True}, **train)
    config({"loss": "reinforce"}, **train)
    config({"proximal": "behavior"}, **train)

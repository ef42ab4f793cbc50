"""Several epochs over the groups of a step: beside a plain loop, what each update is proximal to, draws, early stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, Config, TrainConfig
from rollover.trainer.batch import Batch
from rollover.trainer.objective import Counts, Tally
from rollover.trainer.streams import SAMPLE_STREAMS
from rollover.trainer.trainer import Trainer, split_groups, updates_of
from rollover.types import Sample
from samples import random_samples

SAMPLES = random_samples(2, num_groups=4, size=2)
SEVERAL: dict[str, Any] = {"minibatches_per_step": 2, "epochs_per_step": 2}


def trainer(
    algorithm: Mapping[str, Any] | None = None, *, seed: int = 0, max_staleness: int = 2, **train: Any
) -> Trainer:
    values = {"learning_rate": 1e-3, "num_steps": 10, "micro_batch_tokens": 40, "adam_eps": 1e-3, **train}
    of = TrainConfig.model_validate(values)
    t = local_trainer(
        tiny.loaded(), of, AlgorithmConfig.model_validate(algorithm or {}), dtype=torch.float32, max_new_tokens=16,
        max_staleness=max_staleness,
    )  # fmt: skip
    t.seed = seed
    return t


def recorded(t: Trainer) -> list[list[Sample]]:
    """What each update of the trainer is made of."""
    found: list[list[Sample]] = []
    original = t.backend.forward_backward

    def spy(samples: list[Sample], counts: Counts) -> Tally:
        found.append(samples)
        return original(samples, counts)

    t.backend.forward_backward = spy  # type: ignore[method-assign]
    return found


def groups(updates: list[list[Sample]]) -> list[list[int]]:
    return [list(dict.fromkeys(s.group_id for s in samples)) for samples in updates]


def weights(t: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in tiny.local(t).model.parameters()]


def plain_logprobs(model: Any, s: Sample) -> torch.Tensor:
    ids = torch.tensor(np.concatenate([s.prompt_ids, s.token_ids]), dtype=torch.long)
    logits = model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1] / s.temperature
    return torch.log_softmax(logits, -1).gather(1, ids[len(s.prompt_ids) :, None])[:, 0][torch.from_numpy(s.mask)]


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
    t = trainer(micro_batch_tokens=budget, reshuffle=reshuffle, **SEVERAL)
    model = tiny.model()
    model.set_attn_implementation("sdpa")
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
    start = tiny.model()
    for (name, ours), theirs in zip(tiny.local(t).model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        moved = [float((a - b).abs().max()) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert max(moved) > 1e-3


def test_the_draws_depend_on_seed_version_and_epoch_alone() -> None:
    samples = random_samples(0, num_groups=8, size=1)
    first = split_groups(samples, 4)
    config = TrainConfig(minibatches_per_step=4, epochs_per_step=4)

    def drawn(key: str) -> list[list[int]]:
        parts = [u.samples for u in updates_of(first, config, key, lambda s: True)]
        assert parts[:4] == first and len(parts) == 16
        return [[s.group_id for s in part] for part in parts[4:]]

    assert drawn("0/minibatches/3") == drawn("0/minibatches/3")
    assert len({str(drawn(key)) for key in ("0/minibatches/3", "1/minibatches/3", "0/minibatches/4")}) == 3
    epochs = [drawn("0/minibatches/3")[i : i + 4] for i in (0, 4, 8)]
    assert all(sorted(sum(epoch, [])) == list(range(8)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 3, "each epoch is drawn anew"
    assert all(part == sorted(part) for epoch in epochs for part in epoch), "in a minibatch groups stay in order"


def test_minibatch_shuffle_depends_on_seed_and_version() -> None:
    samples = random_samples(0, num_groups=8, size=1)
    found = {}
    for seed in (0, 1):
        t = trainer(seed=seed, minibatches_per_step=4, epochs_per_step=2)
        for version in range(2):
            updates = recorded(t)
            t.train_step(Batch(samples))
            found[seed, version] = str(groups(updates)[4:8])
    assert len(set(found.values())) == 4


def test_zero_advantage_sample_counts_but_is_not_computed() -> None:
    silent = [s.with_streams(advantages=np.zeros_like(s.advantages)) if s.group_id == 3 else s for s in SAMPLES]
    t = trainer(**SEVERAL)
    updates = recorded(t)
    metrics = t.train_step(Batch(silent))
    assert {s.group_id for samples in updates for s in samples} == {0, 1, 2}
    assert metrics["train/zero_advantage_tokens"] == sum(s.mask.sum() for s in silent if s.group_id == 3)
    skipping, computing = (trainer(skip_zero_advantage=skip, **SEVERAL) for skip in (True, False))
    for one in (skipping, computing):
        one.train_step(Batch(silent))
    for a, b in zip(weights(skipping), weights(computing), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


# What each update is proximal to


@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_update_is_proximal_to_the_start_of_the_step(minibatches: int) -> None:
    start = trainer().backend.compute_logprobs(SAMPLES)
    t = trainer(minibatches_per_step=minibatches, epochs_per_step=3, learning_rate=0.01)
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
    t = trainer({"proximal": "snapshot", "rejection": rejection}, learning_rate=0.01, **SEVERAL)
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
    t = trainer(algorithm, learning_rate=0.01, **SEVERAL)
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
    for a, b in zip(weights(stopped), made[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)
    assert metrics["learning_rate"] == pytest.approx(3e-3 * (1 - 1 / 40)), "of the last update that was made"
    assert stopped.policy_version == 1 and not stopped.in_update
    assert tiny.local(stopped).optimizer.step_count == 4, "in the schedule they count"
    assert not tiny.local(stopped).optimizer.gradients()

    loose = trainer(max_kl=2 * max(kls), **common)
    metrics = loose.train_step(Batch(SAMPLES))
    assert metrics["train/updates"] == 4 and metrics["kl/step_start"] == pytest.approx(max(kls), rel=1e-3)
    for a, b in zip(weights(loose), made[-1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("algorithm", [{}, {"proximal": "behavior"}, {"proximal": "snapshot"}, {"loss": "reinforce"}])
def test_max_kl_keeps_first_update(
    algorithm: dict[str, Any],
) -> None:
    plain, t = trainer(algorithm), trainer(algorithm, epochs_per_step=3, max_kl=1e-9)
    expected = plain.train_step(Batch(SAMPLES))
    metrics = t.train_step(Batch(SAMPLES))
    assert metrics["train/updates"] == 1 and metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    start, now = trainer().backend.compute_logprobs(SAMPLES), plain.backend.compute_logprobs(SAMPLES)
    assert metrics["kl/step_start"] == pytest.approx(mean_kl(start, now), rel=1e-3)
    for a, b in zip(weights(t), weights(plain), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)
    assert "kl/step_start" not in expected


def test_critic_epochs_use_returns_of_step_start() -> None:
    algorithm = {"advantage": "gae"}
    free, stopped, once = (
        trainer(algorithm, epochs_per_step=epochs, max_kl=max_kl) for epochs, max_kl in ((2, 0.0), (2, 1e-9), (1, 0.0))
    )
    updates = recorded(free)
    assert free.train_step(Batch(SAMPLES))["train/updates"] == 2
    for name in ("values", "returns"):
        for first, second in zip(*updates, strict=True):
            np.testing.assert_array_equal(first.in_loss(name), second.in_loss(name))
    assert stopped.train_step(Batch(SAMPLES))["train/updates"] == 1
    once.train_step(Batch(SAMPLES))

    def of_critic(t: Trainer) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in t.backend.save_state()[0].items() if name.startswith("critic/")}

    found, expected, other = of_critic(stopped), of_critic(once), of_critic(free)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=1e-6)
    assert any(not torch.equal(other[name], tensor) for name, tensor in found.items())


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
    ("train", "said"),
    [
        ({"reshuffle": False, "epochs_per_step": 2}, "train.reshuffle has no effect unless train.epochs_per_step and"),
        ({"reshuffle": False, "minibatches_per_step": 2}, "train.reshuffle has no effect"),
        ({"max_kl": 0.1}, "train.max_kl has no effect unless train.epochs_per_step or train.minibatches_per_step is"),
        ({"epochs_per_step": 2, "streaming_min_groups": 2}, "with train.epochs_per_step = 2: a gradient that is comp"),
        ({"epochs_per_step": 0}, "train.epochs_per_step"),
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused(train: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        config(**train)


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

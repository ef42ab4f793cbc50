"""The backend over a Tinker-compatible service, against a service on this machine: the contract, and the local backend
beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from contract import trainer_contract
from rollover.config import Config
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import Engine, ServiceError
from rollover.models.load import LoadedModel
from rollover.trainer.backend import TEACHER, TrainerBackend
from rollover.trainer.batch import Batch
from rollover.trainer.reward_kl import RewardKL
from rollover.trainer.trainer import Trainer, build_trainer
from samples import random_samples
from tinker_service import DROP, KEY, FakeTinker, serving

pytest.importorskip("tinker", reason="the SDK of Tinker is not installed (the extra tinker)")
SAMPLES = [replace(s, temperature=1.0) for s in random_samples(3)]


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[FakeTinker, str]]:
    with pytest.MonkeyPatch.context() as patch, serving() as served:
        patch.setenv("TINKER_API_KEY", KEY)
        yield served


def config(url: str = "", **tables: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"lora": {"rank": 4}},
        "rollout": {"max_new_tokens": 16, "groups_per_step": 3},
        "train": {"learning_rate": 1e-2, "num_steps": 10},
        "backend": {"type": "tinker", "base_model": "tiny", "url": url, "chunk_tokens": 4, "timeout_s": 30},
    }
    for table, changes in tables.items():
        before = {} if changes == {"type": "local"} else values.get(table, {})
        values[table] = {**before, **changes}
    return Config.model_validate(values)


def outline() -> LoadedModel:
    with torch.device("meta"):
        return LoadedModel(tiny.model(), tiny.tokenizer(), "tiny")


def beside(tables: dict[str, dict[str, Any]]) -> Trainer:
    """A trainer with these tables whose backend is the local one."""
    local = {"model": {"dtype": "float32", "lora": {"rank": 4}}, "backend": {"type": "local"}}
    torch.manual_seed(0)
    return build_trainer(config(**tables, **local), tiny.loaded())


Built = Callable[[Config], Trainer]


@pytest.fixture
def built() -> Iterator[Built]:
    """Makes trainers, whose sessions end with the test."""
    engines: list[Engine] = []

    def build(of: Config) -> Trainer:
        loaded = outline()
        engines.append(build_engine(EngineSetup(of, lambda: loaded, 1)))
        return build_trainer(of, loaded, engines[-1])

    yield build
    for engine in engines:
        asyncio.run(engine.close())


@pytest.mark.parametrize("check", trainer_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check, service: tuple[FakeTinker, str], built: Built) -> None:
    def make() -> TrainerBackend:
        return built(config(service[1])).backend

    asyncio.run(check(trainer_contract.Subject(make, SAMPLES, weights_stay=True)))


def test_reward_kl_equals_local_backend(service: tuple[FakeTinker, str], built: Built) -> None:
    algorithm = {"kl_coef": 0.1, "kl_in": "reward"}
    theirs = built(config(service[1], algorithm=algorithm))
    ours = beside({"algorithm": algorithm})
    for _ in range(2):
        expected, found = (RewardKL(of.backend, of.algorithm).penalties(SAMPLES) for of in (ours, theirs))
        assert found.kl == pytest.approx(expected.kl, abs=1e-5) and found.tokens.keys() == expected.tokens.keys()
        for key, penalty in expected.tokens.items():
            np.testing.assert_allclose(found.tokens[key], penalty, atol=1e-5)
        for of in (ours, theirs):
            of.train_step(Batch(SAMPLES))
    assert expected.kl > 1e-4


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"loss": "cispo"},
        {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
        {"kl_coef": 0.1},
        {"rejection": {"token_k3": 2.0}, "ess_step_scaling": True},
    ],
)
def test_losses_and_weights_equal_local_backend(
    algorithm: dict[str, Any], service: tuple[FakeTinker, str], built: Built
) -> None:
    train = {"minibatches_per_step": 3, "schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.05}
    theirs = built(config(service[1], algorithm=algorithm, train=train))
    ours = beside({"algorithm": algorithm, "train": {**train, "micro_batch_tokens": 60}})
    num_steps = 4
    for step in range(num_steps):
        expected, found = ours.train_step(Batch(SAMPLES)), theirs.train_step(Batch(SAMPLES))
        assert expected.keys() - found.keys() == {"entropy"}
        # From equal weights sums differ in their last bits. Adam makes more of it where a gradient is near 0: at most
        # the learning rate at each update.
        rel, most = (2e-4, 1e-5) if step == 0 else (5e-3, 1e-3)
        for name in expected.keys() & found.keys():
            assert found[name] == pytest.approx(expected[name], rel=rel, abs=most), name
        for rollout_id, stats in ours.token_stats.items():
            told = theirs.token_stats[rollout_id]
            assert np.array_equal(told.rejected, stats.rejected) and np.isnan(told.entropies).all()
            np.testing.assert_allclose(told.importance_weights, stats.importance_weights, rtol=1e-2)
            np.testing.assert_allclose(told.loss_weights, stats.loss_weights, rtol=1e-2)
    before, after = (trainer.backend.compute_logprobs(SAMPLES) for trainer in (ours, theirs))
    for rollout_id, values in before.items():
        np.testing.assert_allclose(after[rollout_id], values, atol=5e-3)  # after 12 updates of Adam


def test_epochs_and_early_stop_equal_local_backend(service: tuple[FakeTinker, str], built: Built) -> None:
    train = {"minibatches_per_step": 3, "epochs_per_step": 2, "max_kl": 0.02, "schedule": "linear"}
    theirs = built(config(service[1], train=train))
    ours = beside({"train": train})
    made = []
    for _ in range(3):
        expected, found = ours.train_step(Batch(SAMPLES)), theirs.train_step(Batch(SAMPLES))
        made.append(found["train/updates"])
        for name in ("train/updates", "learning_rate"):
            assert found[name] == expected[name], name
        for name in ("kl/step_start", "loss", "ratio/max"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert any(1 < num < 6 for num in made), made


def test_service_failures_are_retried(service: tuple[FakeTinker, str], built: Built) -> None:
    fake, url = service
    plain, troubled = (built(config(url)) for _ in range(2))
    expected = plain.train_step(Batch(SAMPLES))
    fake.faults = {"forward_backward": [503, DROP], "optim_step": [429], "retrieve_future": [500, DROP]}
    fake.failing = ["out of memory"]  # the result of the first forward pass
    found = troubled.train_step(Batch(SAMPLES))
    assert not any(fake.faults.values()) and not fake.failing
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), "nothing was done twice"


def test_teacher_logprobs_retry_with_one_sampler(service: tuple[FakeTinker, str], built: Built) -> None:
    fake, url = service
    backend = built(config(url, distill={"teacher": "initial", "privileged": "prompts:told"})).backend
    expected = backend.compute_logprobs(SAMPLES, TEACHER)
    opened = len(fake.named("create_sampling_session"))
    fake.failing_scores = ["server", "server"]
    found = backend.compute_logprobs(SAMPLES, TEACHER)
    assert not fake.failing_scores
    assert len(fake.named("create_sampling_session")) == opened, "the sampler is opened once"
    for rollout_id, values in expected.items():
        np.testing.assert_array_equal(found[rollout_id], values)
    fake.failing_scores = ["user"]
    with pytest.raises(ServiceError, match=r"failed at log-probs of tiny: .*out of memory"):
        backend.compute_logprobs(SAMPLES[:1], TEACHER)
    fake.failing_scores = ["server"] * 9
    with pytest.raises(ServiceError, match=r"failed at log-probs of tiny: .*out of memory"):
        backend.compute_logprobs(SAMPLES[:1], TEACHER)
    assert len(fake.failing_scores) == 6, "three tries"
    fake.failing_scores = []


def test_refreshed_teacher_gets_a_new_sampler(service: tuple[FakeTinker, str], built: Built) -> None:
    fake, url = service
    of = built(config(url, distill={"teacher": "policy", "privileged": "prompts:told", "refresh_steps": 2}))
    opened = len(fake.named("create_sampling_session"))
    for _ in range(5):
        of.train_step(Batch(SAMPLES))
    assert len(fake.named("create_sampling_session")) == opened + 3, "the base model, and the weights of steps 2 and 4"


def test_samples_at_another_temperature_are_refused(service: tuple[FakeTinker, str], built: Built) -> None:
    backend = built(config(service[1])).backend
    with pytest.raises(ValueError, match=r"rollout 0-0 was sampled at temperature 0.7, and the service's log-probs"):
        backend.compute_logprobs([replace(SAMPLES[0], temperature=0.7)])


@pytest.mark.parametrize(
    "distill",
    [
        {"teacher": "initial", "mix": "add", "discount": 0.5},
        {"teacher": "policy", "privileged": "prompts:told"},
        {"teacher": "policy", "privileged": "prompts:told", "refresh_steps": 2, "coef": 0.5},
        {"teacher": "other"},
    ],
    ids=["initial", "current", "refreshed", "other"],
)
def test_distillation_equals_local_backend(
    distill: dict[str, Any], service: tuple[FakeTinker, str], built: Built, tmp_path: Path
) -> None:
    fake, url = service
    if distill["teacher"] == "other":
        distill = {**distill, "teacher": str(tiny.save(tmp_path / "other", seed=1))}
        fake.serve_model(distill["teacher"], tiny.model(seed=1))
    # With so large an epsilon Adam's update is smooth in the gradient: the last bits of it stay the last bits.
    train = {"learning_rate": 1e-2, "adam_eps": 1.0}
    theirs = built(config(url, distill=distill, train=train))
    ours = beside({"distill": distill, "train": train})
    told = [replace(s, teacher_prompt_ids=np.array([5, 6, *s.prompt_ids], np.int32)) for s in SAMPLES]
    for step in range(4):
        expected, found = ours.train_step(Batch(told)), theirs.train_step(Batch(told))
        for name in ("distill/kl", "distill/clipped_share", "loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), (step, name)
        for mine, its in zip(ours.trained, theirs.trained, strict=True):
            np.testing.assert_allclose(its.advantages, mine.advantages, rtol=0, atol=1e-6)
        assert expected["distill/kl"] != 0
    _, meta = theirs.backend.save_state()
    assert meta.get("teacher", "").endswith("teacher-000004-2") == (distill.get("refresh_steps", 0) > 1)


def test_teacher_weights_are_restored_from_a_checkpoint(service: tuple[FakeTinker, str], built: Built) -> None:
    of = config(service[1], distill={"teacher": "policy", "privileged": "prompts:told", "refresh_steps": 2})
    first, second = built(of), built(of)
    for _ in range(3):
        first.train_step(Batch(SAMPLES))
    second.backend.load_state(*first.backend.save_state())
    expected, found = (trainer.backend.compute_logprobs(SAMPLES, TEACHER) for trainer in (first, second))
    for rollout_id, values in expected.items():
        np.testing.assert_array_equal(found[rollout_id], values)
    without = first.backend.save_state()[1]
    del without["teacher"]
    with pytest.raises(ValueError, match="the checkpoint names no such weights"):
        second.backend.load_state({}, without)


def test_another_model_as_teacher_needs_the_same_vocabulary(service: tuple[FakeTinker, str], built: Built) -> None:
    with pytest.raises(ValueError, match=r"distill\.teacher = 'nowhere'"):
        built(config(service[1], distill={"teacher": "nowhere"}))


def test_precomputed_advantages_equal_local_backend(service: tuple[FakeTinker, str], built: Built) -> None:
    draw = np.random.default_rng(0)
    given = [s.with_streams(advantages=draw.normal(size=len(s.token_ids)).astype(np.float32)) for s in SAMPLES]
    algorithm = {"advantage": "precomputed"}
    train = {"adam_eps": 1.0}
    theirs = built(config(service[1], algorithm=algorithm, train=train))
    ours = beside({"algorithm": algorithm, "train": train})
    start = ours.backend.compute_logprobs(given)
    expected, found = ours.train_step(Batch(given)), theirs.train_step(Batch(given))
    for name in ("loss", "grad_norm", "ratio/max", "importance/mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
    mine, its = (trainer.backend.compute_logprobs(given) for trainer in (ours, theirs))
    for rollout_id, values in mine.items():
        np.testing.assert_allclose(its[rollout_id], values, rtol=0, atol=1e-6)
    assert max(np.abs(mine[key] - start[key]).max() for key in mine) > 1e-4, "the weights have changed"

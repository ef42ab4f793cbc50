"""A critic with a model of its own: what its updates are made of, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from local_trainer import local_trainer
from plain_critic import PlainCritic
from rollover.config import AlgorithmConfig, Config, CriticConfig, ModelConfig, TrainConfig
from rollover.models.load import LoadedModel
from rollover.trainer.batch import Batch
from rollover.trainer.critic import Critic
from rollover.trainer.trainer import Trainer, build_trainer, split_groups
from rollover.types import Sample
from samples import random_samples

OPTIONS: dict[str, Any] = {"model": "policy", "learning_rate": 1e-3, "head_learning_rate": 1e-2}


def samples(seed: int = 1) -> list[Sample]:
    """Rewards at the last loss token, which differ between the answers."""
    out = []
    for i, s in enumerate(random_samples(seed)):
        rewards = np.zeros_like(s.advantages)
        rewards[np.flatnonzero(s.mask)[-1]] = i % 3
        out.append(s.with_streams(advantages=rewards))
    return out


def trainer(
    critic: dict[str, Any] | None = None,
    *,
    of_critic: LoadedModel | None = None,
    dtype: torch.dtype = torch.float32,
    algorithm: dict[str, Any] | None = None,
    **train: Any,
) -> Trainer:
    return local_trainer(
        tiny.loaded(),
        TrainConfig.model_validate({"learning_rate": 1e-3, "num_steps": 10, "micro_batch_tokens": 40, **train}),
        AlgorithmConfig.model_validate({"advantage": "gae", **(algorithm or {})}),
        dtype=dtype,
        max_new_tokens=16,
        critic=CriticConfig.model_validate(OPTIONS | (critic or {})),
        critic_model=of_critic or tiny.loaded(seed=1),
    )


def critic_of(t: Trainer) -> Critic:
    found = tiny.local(t).critic
    assert found is not None and found.own is not None
    return found


def weights(t: Trainer) -> dict[str, torch.Tensor]:
    """Of the critic, as a checkpoint holds them."""
    tensors, _ = critic_of(t).state()
    return {k.removeprefix("critic/").replace("/master", ""): v.clone() for k, v in tensors.items() if "/master/" in k}


def policy(t: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in tiny.local(t).model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_epoch_of_a_step_is_towards_the_same_returns() -> None:
    of_critic = tiny.loaded(seed=1)
    plain = PlainCritic(
        of_critic.model, learning_rate=1e-3, head_learning_rate=1e-2, weight_decay=0.0, max_grad_norm=1.0,
        betas=(0.9, 0.99), eps=1e-6,
    )  # fmt: skip
    t = trainer(of_critic=of_critic, minibatches_per_step=2, epochs_per_step=2, reshuffle=False, adam_eps=1e-6)
    for step in range(2):
        given = samples(step)
        norms = plain.train_step(split_groups(given, 2), 1.0, 1.0, 0.2, epochs=2)
        assert t.train_step(Batch(given))["critic/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    for name, value in plain.weights().items():
        torch.testing.assert_close(weights(t)[name], value, atol=2e-5, rtol=1e-4)
    assert t.policy_version == 2


def test_max_kl_ends_critic_updates() -> None:
    t = trainer({"schedule": "linear"}, epochs_per_step=3, max_kl=1e-9, learning_rate=1e-2)
    t.train_step(Batch(samples()))
    once, rest = trainer({"schedule": "linear"}, learning_rate=1e-2), critic_of(t).state()[1]
    once.train_step(Batch(samples()))
    # Its schedule goes on as if they had been made. Of the first update the rates are the same.
    assert {part["step_count"] for part in rest.values()} == {3} and same(weights(once), weights(t))


def test_it_learns_what_the_policys_hidden_states_do_not_tell() -> None:
    t = trainer(learning_rate=0.0)
    rows = [t.train_step(Batch(samples())) for _ in range(25)]
    assert rows[-1]["critic/loss"] < 0.2 * rows[0]["critic/loss"]
    assert rows[0]["critic/explained_variance"] < 0.1 and rows[-1]["critic/explained_variance"] > 0.7
    assert abs(rows[-1]["critic/value_mean"] - rows[-1]["critic/return_mean"]) < 0.2


def test_policy_and_critic_know_nothing_of_each_others_weights() -> None:
    """The policy moves by the values alone, and the critic by the rewards alone."""
    still, moving = trainer(learning_rate=0.0), trainer(learning_rate=1e-2)
    before = policy(still)
    for _ in range(2):
        assert still.train_step(Batch(samples()))["critic/loss"] == moving.train_step(Batch(samples()))["critic/loss"]
    assert same(weights(still), weights(moving))
    assert same(before, policy(still)) and not same(before, policy(moving))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(dtype: torch.dtype) -> None:
    options = {"schedule": "cosine", "warmup_steps": 2, "policy_waits_steps": 1}
    whole = trainer(options, dtype=dtype, minibatches_per_step=3)
    for _ in range(2):
        whole.train_step(Batch(samples()))
    tensors, meta = whole.backend.save_state()
    tensors, meta = {k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(meta))
    again = trainer(options, of_critic=tiny.loaded(seed=5), dtype=dtype, minibatches_per_step=3)
    again.backend.load_state(tensors, meta)
    for _ in range(2):
        assert again.train_step(Batch(samples(2))) == whole.train_step(Batch(samples(2)))
    assert same(weights(whole), weights(again)) and same(policy(whole), policy(again))
    assert {v.dtype for v in weights(whole).values()} == {torch.float32}
    assert next(critic_of(whole).own.model.parameters()).dtype == dtype  # type: ignore[union-attr]


def test_a_checkpoint_of_another_kind_of_critic_is_refused() -> None:
    own, other = trainer(), trainer(of_critic=tiny.loaded("qwen2"))
    head = local_trainer(
        tiny.loaded(), TrainConfig(), AlgorithmConfig(advantage="gae"), dtype=torch.float32, max_new_tokens=16
    )
    with pytest.raises(ValueError, match=r"another kind of critic .* Set critic.model back"):
        head.backend.load_state(*own.backend.save_state())
    with pytest.raises(ValueError, match=r"another kind of critic"):
        own.backend.load_state(*head.backend.save_state())
    with pytest.raises(ValueError, match=r"the critic of the checkpoint is another one \(critic.model\)"):
        own.backend.load_state(*other.backend.save_state())


@pytest.mark.parametrize("whose", ["critic", "policy"])
def test_a_nan_in_one_micro_batch_leaves_both_sound(whose: str) -> None:
    """Only the one whose pass it was is skipped; its weights and moments are as before, and both learn on."""
    t = trainer()
    t.train_step(Batch(samples()))
    model = tiny.local(t).model if whose == "policy" else critic_of(t).own.model  # type: ignore[union-attr]
    before = {k: v.clone() for k, v in t.backend.save_state()[0].items()}
    calls = 0

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()  # not the pass that asks for values
        return output * math.nan if torch.is_grad_enabled() and calls == 2 else output

    hook = model.model.norm.register_forward_hook(spoil)
    metrics = t.train_step(Batch(samples()))
    hook.remove()
    assert calls > 2
    skipped = metrics["train/skipped_steps"], metrics["critic/skipped_steps"]
    assert skipped == ((1, 0) if whose == "policy" else (0, 1))
    changed = {k.partition("/")[0] for k, v in t.backend.save_state()[0].items() if not torch.equal(v, before[k])}
    of_policy = {"master", "exp_avg", "exp_avg_sq"}
    assert changed == (of_policy if whose == "critic" else {"critic"})
    metrics = t.train_step(Batch(samples()))
    assert metrics["train/skipped_steps"] == metrics["critic/skipped_steps"] == 0
    assert all(math.isfinite(v) for v in metrics.values())
    now = t.backend.save_state()[0]
    assert all(v.isfinite().all() for v in now.values()) and not torch.equal(
        now["critic/model/master/model.norm.weight"], before["critic/model/master/model.norm.weight"]
    )


def test_while_the_policy_waits_the_model_of_the_critic_learns() -> None:
    t = trainer({"policy_waits_steps": 1})
    of_policy, of_critic = policy(t), weights(t)
    t.train_step(Batch(samples()))
    assert same(of_policy, policy(t)) and not same(of_critic, weights(t))
    t.train_step(Batch(samples()))
    assert not same(of_policy, policy(t))


def test_critic_checkpointing_is_exact_and_frees_output_layer() -> None:
    plain, saving = (
        trainer(of_critic=tiny.loaded(seed=1, tie_word_embeddings=False), gradient_checkpointing=on)
        for on in (False, True)
    )
    for _ in range(2):
        expected, found = plain.train_step(Batch(samples())), saving.train_step(Batch(samples()))
        assert found["critic/loss"] == pytest.approx(expected["critic/loss"], rel=1e-5)
    own = critic_of(saving).own
    assert own is not None and own.model.lm_head.weight.numel() == 0
    assert not any("lm_head" in name for name in weights(saving))


def test_flops_of_its_passes_count() -> None:
    head = local_trainer(
        tiny.loaded(), TrainConfig(micro_batch_tokens=40), AlgorithmConfig(advantage="gae"), dtype=torch.float32,
        max_new_tokens=16,
    )  # fmt: skip
    own = trainer()
    for t in (head, own):
        t.train_step(Batch(samples()))
    passes = critic_of(own).own.passes  # type: ignore[union-attr]
    assert 0 < passes.flops < own.backend.flops
    # With a head the values need a pass of the policy; with a model of its own none.
    assert own.backend.flops - passes.flops < head.backend.flops < own.backend.flops


def config(folder: Path, model: str) -> Config:
    return Config(
        model=ModelConfig(path=str(folder), dtype="float32", device="cpu"),
        algorithm=AlgorithmConfig(advantage="gae"),
        critic=CriticConfig(model=model),
    )


def test_the_model_is_the_policys_own_checkpoint_or_another_one(tmp_path: Path) -> None:
    tiny.save(tmp_path / "policy")
    tiny.save(tmp_path / "other", seed=3)
    for name, seed in (("policy", 0), (str(tmp_path / "other"), 3)):
        t = build_trainer(config(tmp_path / "policy", name), tiny.loaded(seed=7))
        expected = {f"model/{n}": p for n, p in tiny.model(seed=seed).named_parameters()}
        found = weights(t)
        assert all(torch.equal(found[n], p) for n, p in expected.items())


def test_a_model_that_does_not_fit_the_policy_is_refused_by_name(tmp_path: Path) -> None:
    tiny.save(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"critic.model = './nowhere': there is no such folder"):
        build_trainer(config(tmp_path / "policy", "./nowhere"), tiny.loaded())
    tiny.save(tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["model"]["vocab"] |= {"a": 13, "b": 12}
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"critic.model = .* has another vocabulary than the policy"):
        build_trainer(config(tmp_path / "policy", str(tmp_path / "other")), tiny.loaded())

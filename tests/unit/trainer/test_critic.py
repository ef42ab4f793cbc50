"""The critic by hand: advantages, returns and the value loss; what a step without finite gradients leaves of it; and
one with a model of its own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trainer
import torch
from tiny_trainer import nan_in_second_pass, restored, rewarded, sample, weights

import tiny
from plain_critic import PlainCritic
from rollover.config import AlgorithmConfig, Config, CriticConfig, ModelConfig, TrainConfig
from rollover.models.load import LoadedModel
from rollover.trainer.batch import Batch
from rollover.trainer.critic import Critic
from rollover.trainer.objective import step_metrics
from rollover.trainer.token_advantages import estimate_with_critic, with_bootstrap_token
from rollover.trainer.trainer import Trainer, build_trainer, split_groups
from rollover.types import Sample
from samples import random_samples

REWARDED = rewarded(random_samples(1), [3.0])


def trainer(critic: dict[str, Any] | None = None, **options: Any) -> Trainer:
    config = CriticConfig.model_validate(critic or {})
    return tiny_trainer.trainer({"advantage": "gae"}, critic=config, **{"learning_rate": 1e-3} | options)


def critic(**options: Any) -> Critic:
    return Critic(4, CriticConfig.model_validate(options), TrainConfig(), 10, torch.device("cpu"))


def test_explained_variance_formula() -> None:
    returns, values = np.array([1.0, 2.0, 4.0, 5.0]), np.array([1.5, 2.0, 3.0, 5.5])
    errors = returns - values
    totals = defaultdict(float) | {
        "count/tokens": 4.0,
        "count/sequences": 1.0,
        "sum/returns": float(returns.sum()),
        "sum/returns_squared": float((returns**2).sum()),
        "sum/critic_error": float(errors.sum()),
        "sum/critic_error_squared": float((errors**2).sum()),
    }
    update = {"grad_norm": 1.0, "learning_rate": 1e-5, "train/skipped_steps": 0.0}
    expected = 1 - np.var(errors) / np.var(returns)
    assert step_metrics(totals, [update])["critic/explained_variance"] == pytest.approx(expected)


def test_advantages_and_returns_by_hand() -> None:
    """d = r + gamma V_next - V, A = d + gamma lam A_next; rows of unequal length, one with an environment's token."""
    rows = [sample("a", [5], [0] * 3, advantages=[0, 0, 1]), sample("b", [5], [0] * 2, [0, 1], advantages=[0, 2])]
    values = {"a": np.array([0.5, 0.2, 0.4], np.float32), "b": np.array([0.3], np.float32)}
    out = estimate_with_critic(AlgorithmConfig(advantage="gae", gamma=0.5, gae_lambda=0.5), rows, values)
    returns = {s.rollout_id: s.in_loss("returns") for s in out}
    assert out[0].in_loss("values").tolist() == pytest.approx([0.5, 0.2, 0.4])
    a = [0.5 * 0.2 - 0.5 + 0.25 * 0.15, 0.5 * 0.4 - 0.2 + 0.25 * 0.6, 1 - 0.4]
    b = [2 - 0.3]
    assert returns["a"].tolist() == pytest.approx([a[0] + 0.5, a[1] + 0.2, a[2] + 0.4])
    assert returns["b"].tolist() == pytest.approx([2.0])
    raw = np.array(a + b)
    expected = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-4)  # over the loss tokens of the batch
    assert out[0].advantages.tolist() == pytest.approx(expected[:3])
    assert out[1].advantages.tolist() == pytest.approx([0, expected[3]])
    assert [s.rollout_id for s in out] == ["a", "b"] and out[1].mask.tolist() == [False, True]


def test_value_loss_clips_moved_values() -> None:
    c = critic(value_clip=0.2)
    assert c.gradients() == []
    torch.nn.init.constant_(c.head.bias, 0.5)  # the value of every token
    old, returns = torch.tensor([0.1, 0.1, 0.5]), torch.tensor([2.0, -1.0, 1.0])
    sums = c.forward_backward(torch.randn(3, 4), old, returns, 4)
    # Held at 0.3, no gradient; moved away, (v - R) = 1.5; not moved, (v - R) = -0.5.
    assert float(sums["sum/critic_loss"]) == pytest.approx(0.5 * (1.7**2 + 1.5**2 + 0.5**2))
    assert float(sums["sum/critic_clipped"]) == 1
    assert float(sums["sum/critic_error"]) == pytest.approx(1.9 - 1.1 + 0.5), "of the values before the step"
    assert float(sums["sum/critic_error_squared"]) == pytest.approx(1.9**2 + 1.1**2 + 0.5**2)
    assert (float(sums["sum/returns"]), float(sums["sum/returns_squared"])) == (2.0, 6.0)
    assert float(sums["sum/values"]) == pytest.approx(0.7)
    assert c.head.bias.grad is not None and c.head.bias.grad.item() == pytest.approx((1.5 - 0.5) / 4)
    free = critic(value_clip=0.0)  # none at all
    torch.nn.init.constant_(free.head.bias, 0.5)
    sums = free.forward_backward(torch.randn(3, 4), old, returns, 4)
    assert float(sums["sum/critic_clipped"]) == 0
    assert free.head.bias.grad is not None and free.head.bias.grad.item() == pytest.approx((-1.5 + 1.5 - 0.5) / 4)


def test_value_is_linear_in_detached_hidden_state() -> None:
    c = critic()
    torch.nn.init.constant_(c.head.weight, 1.0)
    hidden = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 80.0]], requires_grad=True)
    values = c.values(hidden)
    assert values.tolist() == pytest.approx([4.0, 2.0], rel=1e-4)  # unit mean square a row
    values.sum().backward()
    assert hidden.grad is None


def test_the_critic_learns_the_return_and_its_state_is_kept() -> None:
    options = {"head_learning_rate": 0.05}
    t, again = (trainer(options, learning_rate=0.0, minibatches_per_step=3) for _ in range(2))
    losses = [t.train_step(Batch(REWARDED))["critic/loss"] for _ in range(12)]
    # Half the squared return, or nearly: the old value is 0, and later minibatches see a head that has moved.
    assert 2 < losses[0] < 6 and losses[-1] < 0.3 * losses[0]
    assert restored(t, again).train_step(Batch(REWARDED)) == t.train_step(Batch(REWARDED))
    with pytest.raises(ValueError, match="holds no such weights"):
        restored(t, tiny_trainer.trainer({"kl_coef": 0.1}))
    with pytest.raises(ValueError, match="has no critic"):
        restored(tiny_trainer.trainer(), again)


def policy_and_head(t: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    head = tiny.local(t).critic.head  # type: ignore[union-attr]
    return weights(t), torch.cat([p.detach().flatten() for p in head.parameters()])


@pytest.mark.parametrize("whose", ["both", "policy", "critic"])
def test_nonfinite_gradients_skip_the_weights_they_are_of(whose: str) -> None:
    t = trainer()
    t.train_step(Batch(REWARDED))
    policy, head = policy_and_head(t)
    module = tiny.local(t).model.model.norm if whose == "both" else tiny.local(t).critic.head  # type: ignore[union-attr]
    given = [s.with_streams(advantages=s.advantages * (i % 3)) for i, s in enumerate(REWARDED)]
    if whose == "policy":  # the importance weight, and nothing of the critic's
        given[0] = given[0].with_streams(behavior_logprobs=given[0].behavior_logprobs * np.float32("nan"))
        metrics = t.train_step(Batch(given))
    else:
        with nan_in_second_pass(module):
            metrics = t.train_step(Batch(given))
    skipped = (whose != "critic", whose != "policy")
    assert (metrics["train/skipped_steps"], metrics["critic/skipped_steps"]) == skipped
    now, head_now = policy_and_head(t)
    assert (torch.equal(policy, now), torch.equal(head, head_now)) == skipped
    metrics = t.train_step(Batch(REWARDED))
    assert metrics["train/skipped_steps"] == metrics["critic/skipped_steps"] == 0
    assert all(math.isfinite(v) for v in metrics.values())
    assert not torch.equal(policy, policy_and_head(t)[0]) and not torch.equal(head, policy_and_head(t)[1])


def test_the_gradient_of_the_critic_is_clipped_by_its_own_norm() -> None:
    t = trainer({"max_grad_norm": 0.5}, max_grad_norm=0.0)
    metrics = t.train_step(Batch(REWARDED))
    assert metrics["critic/grad_norm"] > 1
    tensors, _ = t.backend.save_state()
    first = [tensors[f"critic/head/exp_avg/{name}"].flatten() for name in ("weight", "bias")]
    assert float(torch.cat(first).norm()) == pytest.approx(0.1 * 0.5, rel=1e-4)  # Adam: (1 - beta1) times the gradient


def test_the_critic_has_a_schedule_of_its_own() -> None:
    options = {"head_learning_rate": 0.1, "warmup_steps": 2, "schedule": "linear", "min_lr_ratio": 0.5}
    t = trainer(options, num_steps=3, minibatches_per_step=2)
    rows = [t.train_step(Batch(REWARDED)) for _ in range(3)]
    # Six updates: 0.05 and 0.1 of warm-up, then from 0.1 down to 0.05, told of the last of each step.
    assert [row["critic/learning_rate"] for row in rows] == pytest.approx([0.1, 0.1 * 0.875, 0.1 * 0.625])
    assert {row["learning_rate"] for row in rows} == {1e-3}


def test_weights_of_the_head_decay_by_what_the_critic_says() -> None:
    decayed, free = (trainer({"head_learning_rate": 0.1, "weight_decay": w}, weight_decay=0.0) for w in (1.0, 0.0))
    for t in (decayed, free):
        for _ in range(2):
            t.train_step(Batch(REWARDED))
    norms = [float(policy_and_head(t)[1][0].norm()) for t in (decayed, free)]
    assert norms[0] < 0.97 * norms[1]


def test_the_policy_waits_while_the_critic_learns_alone() -> None:
    t = trainer({"policy_waits_steps": 2}, num_steps=4, schedule="linear", minibatches_per_step=3)
    policy, head = policy_and_head(t)
    rows = [t.train_step(Batch(REWARDED)) for _ in range(2)]
    now, head_now = policy_and_head(t)
    assert torch.equal(policy, now) and not torch.equal(head, head_now) and t.policy_version == 2
    for row in rows:
        assert row["learning_rate"] == row["grad_norm"] == 0 and row["entropy"] > 0 and row["critic/grad_norm"] > 0
    row = t.train_step(Batch(REWARDED))
    assert row["grad_norm"] > 0 and not torch.equal(policy, policy_and_head(t)[0])
    # Its schedule is over the six updates that are its own, of which this was the third.
    assert row["learning_rate"] == pytest.approx(1e-3 * (1 - 2 / 6))
    assert t.backend.save_state()[1]["optimizer"]["step_count"] == 3


def test_bootstrap_truncated_uses_value_after_answer() -> None:
    """d_T = r_T + gamma V(all tokens) - V_T; the others end with what they got."""
    cut = dataclasses.replace(sample("cut", [5], [0] * 3, [1, 0, 1], advantages=[0, 0, 1]), truncated=True)
    rows = [cut, sample("ended", [5], [0] * 2, advantages=[0, 2])]
    asked = with_bootstrap_token(rows)
    assert [len(s.token_ids) for s in asked] == [4, 2] and asked[0].mask.tolist() == [True, False, True, True]
    assert asked[1] is rows[1] and len(asked[0].versions) == len(asked[0].behavior_logprobs) == 4
    values = {"cut": np.array([0.5, 0.4, 0.3], np.float32), "ended": np.array([0.1, 0.2], np.float32)}
    cut, ended = estimate_with_critic(AlgorithmConfig(advantage="gae", gamma=0.5, gae_lambda=1.0), rows, values)
    last = 1 + 0.5 * 0.3
    assert cut.in_loss("returns").tolist() == pytest.approx([0.5 * last, last])
    assert ended.in_loss("returns").tolist() == pytest.approx([0.5 * 2, 2])
    assert cut.in_loss("values").tolist() == pytest.approx([0.5, 0.4])
    # A truncated rollout that is out of the loss is none of the critic's business.
    (masked,) = with_bootstrap_token([dataclasses.replace(cut, mask=np.zeros(3, bool))])
    assert masked.mask.tolist() == [False] * 3


def test_bootstrap_value_at_last_position() -> None:
    t = trainer({"bootstrap_truncated": True}, loaded=tiny.loaded(max_position_embeddings=12), max_new_tokens=8)
    local = tiny.local(t)
    assert local.critic is not None
    torch.nn.init.normal_(local.critic.head.weight, generator=torch.Generator().manual_seed(0))
    tokens = np.array([9, 8, 7, 6, 5, 4, 3, 2], np.int32)
    full = sample("a", (5, 6, 7, 8), tokens)
    cut = dataclasses.replace(full, truncated=True)
    (longer,) = with_bootstrap_token([cut])
    other = dataclasses.replace(longer, token_ids=np.append(tokens, np.int32(77)))
    found = [t.backend.compute_values([s])["a"] for s in (full, longer, other)]
    assert found[1].shape == (9,) and np.array_equal(found[1], found[2])
    np.testing.assert_allclose(found[1][:8], found[0], rtol=1e-5)
    metrics = t.train_step(Batch([cut]))
    assert metrics["critic/value_mean"] == pytest.approx(float(found[0].mean()), rel=1e-4)
    expected = float(found[1][8])  # gamma 1, lambda 1, no reward: every return is what is expected at the end
    assert metrics["critic/return_mean"] == pytest.approx(expected, rel=1e-4) and abs(expected) > 1e-3
    for s in (longer, other):
        with pytest.raises(ValueError, match="12 positions"):
            t.backend.compute_logprobs([s])


# A model of its own

OWN: dict[str, Any] = {"model": "policy", "learning_rate": 1e-3, "head_learning_rate": 1e-2}


def samples(seed: int = 1) -> list[Sample]:
    return rewarded(random_samples(seed))


def with_model(
    critic: dict[str, Any] | None = None, *, of_critic: LoadedModel | None = None, **options: Any
) -> Trainer:
    return tiny_trainer.trainer(
        {"advantage": "gae"},
        critic=CriticConfig.model_validate(OWN | (critic or {})),
        critic_model=of_critic or tiny.loaded(seed=1),
        **options,
    )


def critic_of(t: Trainer) -> Critic:
    found = tiny.local(t).critic
    assert found is not None and found.own is not None
    return found


def critic_weights(t: Trainer) -> dict[str, torch.Tensor]:
    """Of the critic, as a checkpoint holds them."""
    tensors, _ = critic_of(t).state()
    return {k.removeprefix("critic/").replace("/master", ""): v.clone() for k, v in tensors.items() if "/master/" in k}


def same(a: Trainer, b: Trainer) -> bool:
    """Whether the critics have the same weights."""
    ours, theirs = critic_weights(a), critic_weights(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_epoch_of_a_step_is_towards_the_same_returns() -> None:
    of_critic = tiny.loaded(seed=1)
    plain = PlainCritic(
        of_critic.model, learning_rate=1e-3, head_learning_rate=1e-2, weight_decay=0.0, max_grad_norm=1.0,
        betas=(0.9, 0.99), eps=1e-6,
    )  # fmt: skip
    t = with_model(of_critic=of_critic, minibatches_per_step=2, epochs_per_step=2, reshuffle=False, adam_eps=1e-6)
    for step in range(2):
        given = samples(step)
        norms = plain.train_step(split_groups(given, 2), 1.0, 1.0, 0.2, epochs=2)
        assert t.train_step(Batch(given))["critic/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    for name, value in plain.weights().items():
        torch.testing.assert_close(critic_weights(t)[name], value, atol=2e-5, rtol=1e-4)
    assert t.policy_version == 2


def test_max_kl_ends_critic_updates() -> None:
    t = with_model({"schedule": "linear"}, epochs_per_step=3, max_kl=1e-9)
    t.train_step(Batch(samples()))
    once, rest = with_model({"schedule": "linear"}), critic_of(t).state()[1]
    once.train_step(Batch(samples()))
    # Its schedule goes on as if they had been made. Of the first update the rates are the same.
    assert {part["step_count"] for part in rest.values()} == {3} and same(once, t)


def test_policy_and_critic_know_nothing_of_each_others_weights() -> None:
    """The policy moves by the values alone, and the critic by the rewards alone."""
    still, moving = with_model(learning_rate=0.0), with_model()
    before = tiny_trainer.weights(still)
    for _ in range(2):
        assert still.train_step(Batch(samples()))["critic/loss"] == moving.train_step(Batch(samples()))["critic/loss"]
    policies = [tiny_trainer.weights(t) for t in (still, moving)]
    assert same(still, moving) and [torch.equal(before, policy) for policy in policies] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(dtype: torch.dtype) -> None:
    options = {"schedule": "cosine", "warmup_steps": 2, "policy_waits_steps": 1}
    whole = with_model(options, dtype=dtype, minibatches_per_step=3)
    for _ in range(2):
        whole.train_step(Batch(samples()))
    again = with_model(options, of_critic=tiny.loaded(seed=5), dtype=dtype, minibatches_per_step=3)
    restored(whole, again)
    for _ in range(2):
        assert again.train_step(Batch(samples(2))) == whole.train_step(Batch(samples(2)))
    assert same(whole, again) and torch.equal(tiny_trainer.weights(whole), tiny_trainer.weights(again))
    assert {v.dtype for v in critic_weights(whole).values()} == {torch.float32}
    assert next(critic_of(whole).own.model.parameters()).dtype == dtype  # type: ignore[union-attr]


def test_a_checkpoint_of_another_kind_of_critic_is_refused() -> None:
    own, other = with_model(), with_model(of_critic=tiny.loaded("qwen2"))
    head = tiny_trainer.trainer({"advantage": "gae"})
    with pytest.raises(ValueError, match=r"another kind of critic .* Set critic.model back"):
        restored(own, head)
    with pytest.raises(ValueError, match=r"another kind of critic"):
        restored(head, own)
    with pytest.raises(ValueError, match=r"the critic of the checkpoint is another one \(critic.model\)"):
        restored(other, own)


@pytest.mark.parametrize("whose", ["critic", "policy"])
def test_a_nan_in_one_micro_batch_leaves_both_sound(whose: str) -> None:
    """Only the one whose pass it was is skipped; its weights and moments are as before, and both learn on."""
    t = with_model()
    t.train_step(Batch(samples()))
    model = tiny.local(t).model if whose == "policy" else critic_of(t).own.model  # type: ignore[union-attr]
    before = {k: v.clone() for k, v in t.backend.save_state()[0].items()}
    with nan_in_second_pass(model.model.norm):
        metrics = t.train_step(Batch(samples()))
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


def test_critic_checkpointing_is_exact_and_frees_output_layer() -> None:
    plain, saving = (
        with_model(of_critic=tiny.loaded(seed=1, tie_word_embeddings=False), gradient_checkpointing=on)
        for on in (False, True)
    )
    for _ in range(2):
        expected, found = plain.train_step(Batch(samples())), saving.train_step(Batch(samples()))
        assert found["critic/loss"] == pytest.approx(expected["critic/loss"], rel=1e-5)
    own = critic_of(saving).own
    assert own is not None and own.model.lm_head.weight.numel() == 0
    assert not any("lm_head" in name for name in critic_weights(saving))


def test_flops_of_its_passes_count() -> None:
    head = tiny_trainer.trainer({"advantage": "gae"})
    own = with_model()
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
        found = critic_weights(t)
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

"""The critic by hand: advantages, returns and the value loss; and what a step without finite gradients leaves of it."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, CriticConfig, TrainConfig
from rollover.trainer.batch import Batch
from rollover.trainer.critic import Critic
from rollover.trainer.objective import step_metrics
from rollover.trainer.token_advantages import estimate_with_critic, with_bootstrap_token
from rollover.trainer.trainer import Trainer
from rollover.types import Sample
from samples import random_samples

CPU = torch.device("cpu")


def sample(rollout_id: str, mask: list[int], rewards: list[float], truncated: bool = False) -> Sample:
    n = len(mask)
    zeros = np.zeros(n, np.int32)
    return Sample(
        rollout_id,
        0,
        np.array([5], np.int32),
        zeros,
        np.array(mask, bool),
        {"behavior_logprobs": np.zeros(n, np.float32), "versions": zeros, "advantages": np.array(rewards, np.float32)},
        1.0,
        truncated=truncated,
    )


def critic(**options: Any) -> Critic:
    return Critic(4, CriticConfig.model_validate(options), TrainConfig(), 10, CPU)


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
    rows = [sample("a", [1, 1, 1], [0, 0, 1]), sample("b", [0, 1], [0, 2])]
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


def trainer(algorithm: dict[str, Any], critic: dict[str, Any] | None = None, **train: Any) -> Trainer:
    return local_trainer(
        tiny.loaded(),
        TrainConfig.model_validate({"learning_rate": 1e-3, "num_steps": 10, "micro_batch_tokens": 40, **train}),
        AlgorithmConfig.model_validate({"advantage": "gae", **algorithm}),
        dtype=torch.float32,
        max_new_tokens=16,
        critic=CriticConfig.model_validate(critic or {}),
    )


def rewarded(reward: float = 3.0) -> list[Sample]:
    out = []
    for s in random_samples(1):
        rewards = np.zeros_like(s.advantages)
        rewards[np.flatnonzero(s.mask)[-1]] = reward
        out.append(s.with_streams(advantages=rewards))
    return out


def test_the_critic_learns_the_return_and_its_state_is_kept() -> None:
    options = {"head_learning_rate": 0.05}
    t = trainer({}, options, learning_rate=0.0, minibatches_per_step=3)
    losses = [t.train_step(Batch(rewarded()))["critic/loss"] for _ in range(12)]
    # Half the squared return, or nearly: the old value is 0, and later minibatches see a head that has moved.
    assert 2 < losses[0] < 6 and losses[-1] < 0.3 * losses[0]
    tensors, meta = t.backend.save_state()
    again = trainer({}, options, learning_rate=0.0, minibatches_per_step=3)
    again.backend.load_state({k: v.clone() for k, v in tensors.items()}, meta)
    assert again.train_step(Batch(rewarded())) == t.train_step(Batch(rewarded()))
    with pytest.raises(ValueError, match="holds no such weights"):
        other = trainer({"advantage": "grpo", "kl_coef": 0.1})
        other.backend.load_state({k: v.clone() for k, v in tensors.items()}, meta)
    with pytest.raises(ValueError, match="has no critic"):
        trainer({}).backend.load_state(*trainer({"advantage": "grpo"}).backend.save_state())


def weights(t: Trainer) -> list[torch.Tensor]:
    local = tiny.local(t)
    assert local.critic is not None
    return [p.detach().clone() for p in (*local.critic.head.parameters(), *local.model.parameters())]


def policy_and_head(t: Trainer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    found = weights(t)
    return found[2:], found[:2]


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_nonfinite_micro_batch_skips_policy_and_critic() -> None:
    t = trainer({})
    t.train_step(Batch(rewarded()))
    before = weights(t)
    calls = 0

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()  # not the pass that asks for values
        return output * math.nan if torch.is_grad_enabled() and calls == 2 else output

    hook = tiny.local(t).model.model.norm.register_forward_hook(spoil)
    metrics = t.train_step(Batch(rewarded()))
    hook.remove()
    assert calls > 2 and metrics["train/skipped_steps"] == metrics["critic/skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
    metrics = t.train_step(Batch(rewarded()))
    assert metrics["train/skipped_steps"] == metrics["critic/skipped_steps"] == 0
    assert all(math.isfinite(v) for v in metrics.values())
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True) if a.numel() > 1)


def test_nonfinite_policy_gradient_keeps_critic_step() -> None:
    t = trainer({})
    policy, head = policy_and_head(t)
    samples = rewarded()
    samples[0].behavior_logprobs[samples[0].mask] = np.nan  # the importance weight, and nothing of the critic's
    metrics = t.train_step(Batch(samples))
    assert metrics["train/skipped_steps"] == 1 and metrics["critic/skipped_steps"] == 0
    assert math.isfinite(metrics["critic/loss"])
    now, head_now = policy_and_head(t)
    assert all_equal(policy, now) and not all_equal(head, head_now)


def test_nonfinite_critic_gradient_keeps_policy_step() -> None:
    t = trainer({})
    policy, head = policy_and_head(t)
    local = tiny.local(t)
    assert local.critic is not None
    calls = 0

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()  # not the pass that asks for values
        return output * math.nan if torch.is_grad_enabled() and calls == 2 else output

    hook = local.critic.head.register_forward_hook(spoil)
    given = [s.with_streams(advantages=s.advantages * (i % 3)) for i, s in enumerate(rewarded())]
    metrics = t.train_step(Batch(given))
    hook.remove()
    assert calls > 2 and metrics["train/skipped_steps"] == 0 and metrics["critic/skipped_steps"] == 1
    now, head_now = policy_and_head(t)
    assert all_equal(head, head_now) and not all_equal(policy, now)
    assert math.isfinite(t.train_step(Batch(rewarded()))["critic/loss"])
    assert not all_equal(head, policy_and_head(t)[1])


def test_the_gradient_of_the_critic_is_clipped_by_its_own_norm() -> None:
    t = trainer({}, {"max_grad_norm": 0.5}, max_grad_norm=0.0)
    metrics = t.train_step(Batch(rewarded()))
    assert metrics["critic/grad_norm"] > 1
    tensors, _ = t.backend.save_state()
    first = [tensors[f"critic/head/exp_avg/{name}"].flatten() for name in ("weight", "bias")]
    assert float(torch.cat(first).norm()) == pytest.approx(0.1 * 0.5, rel=1e-4)  # Adam: (1 - beta1) times the gradient


def test_the_critic_has_a_schedule_of_its_own() -> None:
    options = {"head_learning_rate": 0.1, "warmup_steps": 2, "schedule": "linear", "min_lr_ratio": 0.5}
    t = trainer({}, options, num_steps=3, minibatches_per_step=2)
    rows = [t.train_step(Batch(rewarded())) for _ in range(3)]
    # Six updates: 0.05 and 0.1 of warm-up, then from 0.1 down to 0.05, told of the last of each step.
    assert [row["critic/learning_rate"] for row in rows] == pytest.approx([0.1, 0.1 * 0.875, 0.1 * 0.625])
    assert {row["learning_rate"] for row in rows} == {1e-3}


def test_weights_of_the_head_decay_by_what_the_critic_says() -> None:
    decayed, free = (trainer({}, {"head_learning_rate": 0.1, "weight_decay": w}, weight_decay=0.0) for w in (1.0, 0.0))
    for t in (decayed, free):
        for _ in range(2):
            t.train_step(Batch(rewarded()))
    norms = [float(policy_and_head(t)[1][0].norm()) for t in (decayed, free)]
    assert norms[0] < 0.97 * norms[1]


def test_the_policy_waits_while_the_critic_learns_alone() -> None:
    t = trainer({}, {"policy_waits_steps": 2}, num_steps=4, schedule="linear", minibatches_per_step=3)
    policy, head = policy_and_head(t)
    rows = [t.train_step(Batch(rewarded())) for _ in range(2)]
    now, head_now = policy_and_head(t)
    assert all_equal(policy, now) and not all_equal(head, head_now) and t.policy_version == 2
    for row in rows:
        assert row["learning_rate"] == row["grad_norm"] == 0 and row["entropy"] > 0 and row["critic/grad_norm"] > 0
    row = t.train_step(Batch(rewarded()))
    assert row["grad_norm"] > 0 and not all_equal(policy, policy_and_head(t)[0])
    # Its schedule is over the six updates that are its own, of which this was the third.
    assert row["learning_rate"] == pytest.approx(1e-3 * (1 - 2 / 6))
    assert t.backend.save_state()[1]["optimizer"]["step_count"] == 3


def test_bootstrap_truncated_uses_value_after_answer() -> None:
    """d_T = r_T + gamma V(all tokens) - V_T; the others end with what they got."""
    rows = [sample("cut", [1, 0, 1], [0, 0, 1], truncated=True), sample("ended", [1, 1], [0, 2])]
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
    (masked,) = with_bootstrap_token([sample("out", [0, 0], [0, 0], truncated=True)])
    assert masked.mask.tolist() == [False, False]


def test_bootstrap_value_at_last_position() -> None:
    loaded = tiny.loaded(max_position_embeddings=12)
    t = local_trainer(
        loaded, TrainConfig(), AlgorithmConfig(advantage="gae"), dtype=torch.float32, max_new_tokens=8,
        critic=CriticConfig(bootstrap_truncated=True),
    )  # fmt: skip
    local = tiny.local(t)
    assert local.critic is not None
    torch.nn.init.normal_(local.critic.head.weight, generator=torch.Generator().manual_seed(0))
    tokens = np.array([9, 8, 7, 6, 5, 4, 3, 2], np.int32)
    zeros = np.zeros(8, np.float32)
    full = Sample(
        "a",
        0,
        np.array([5, 6, 7, 8], np.int32),
        tokens,
        zeros == 0,
        {"behavior_logprobs": zeros, "versions": tokens * 0, "advantages": zeros},
        1.0,
    )
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

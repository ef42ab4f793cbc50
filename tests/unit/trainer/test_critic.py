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
from rollover.config import AlgorithmConfig, TrainConfig
from rollover.trainer.batch import Batch
from rollover.trainer.build import local_trainer
from rollover.trainer.critic import Critic, estimate
from rollover.trainer.objective import step_metrics
from rollover.trainer.trainer import Trainer
from rollover.types import Sample
from samples import random_samples

CPU = torch.device("cpu")


def sample(rollout_id: str, mask: list[int], rewards: list[float]) -> Sample:
    n = len(mask)
    zeros = np.zeros(n, np.int32)
    return Sample(
        rollout_id, 0, np.array([5], np.int32), zeros, np.array(mask, bool), np.zeros(n, np.float32), zeros,
        np.array(rewards, np.float32), 1.0,
    )  # fmt: skip


def critic(**algorithm: Any) -> Critic:
    return Critic(4, AlgorithmConfig.model_validate({"advantage": "gae", **algorithm}), CPU)


def test_explained_variance_is_one_less_the_error_by_the_variance_of_the_returns() -> None:
    returns, values = np.array([1.0, 2.0, 4.0, 5.0]), np.array([1.5, 2.0, 3.0, 5.5])
    totals = defaultdict(float) | {
        "count/tokens": 4.0,
        "count/sequences": 1.0,
        "sum/returns": float(returns.sum()),
        "sum/returns_squared": float((returns**2).sum()),
        "sum/critic_error": float(((values - returns) ** 2).sum()),
    }
    update = {"grad_norm": 1.0, "learning_rate": 1e-5, "train/skipped_steps": 0.0}
    expected = 1 - np.mean((values - returns) ** 2) / np.var(returns)
    assert step_metrics(totals, [update])["critic/explained_variance"] == pytest.approx(expected)


def test_advantages_and_returns_by_hand() -> None:
    """d = r + gamma V_next - V, A = d + gamma lam A_next; rows of unequal length, one with an environment's token."""
    rows = [sample("a", [1, 1, 1], [0, 0, 1]), sample("b", [0, 1], [0, 2])]
    values = {"a": np.array([0.5, 0.2, 0.4], np.float32), "b": np.array([0.3], np.float32)}
    out, returns = estimate(AlgorithmConfig(advantage="gae", gamma=0.5, gae_lambda=0.5), rows, values)
    a = [0.5 * 0.2 - 0.5 + 0.25 * 0.15, 0.5 * 0.4 - 0.2 + 0.25 * 0.6, 1 - 0.4]
    b = [2 - 0.3]
    assert returns["a"].tolist() == pytest.approx([a[0] + 0.5, a[1] + 0.2, a[2] + 0.4])
    assert returns["b"].tolist() == pytest.approx([2.0])
    raw = np.array(a + b)
    expected = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-4)  # over the loss tokens of the batch
    assert out[0].advantages.tolist() == pytest.approx(expected[:3])
    assert out[1].advantages.tolist() == pytest.approx([0, expected[3]])
    assert [s.rollout_id for s in out] == ["a", "b"] and out[1].mask.tolist() == [False, True]


def test_the_value_loss_holds_a_value_that_has_moved_towards_its_return() -> None:
    c = critic(value_clip=0.2)
    assert c.gradients() == [] and c.gradient_norm() == 0
    torch.nn.init.constant_(c.head.bias, 0.5)  # the value of every token
    old, returns = torch.tensor([0.1, 0.1, 0.5]), torch.tensor([2.0, -1.0, 1.0])
    sums = c.forward_backward(torch.randn(3, 4), old, returns, 4)
    # Held at 0.3, no gradient; moved away, (v - R) = 1.5; not moved, (v - R) = -0.5.
    assert float(sums["sum/critic_loss"]) == pytest.approx(0.5 * (1.7**2 + 1.5**2 + 0.5**2))
    assert float(sums["sum/critic_error"]) == pytest.approx(1.9**2 + 1.1**2 + 0.5**2), "of the values before the step"
    assert (float(sums["sum/returns"]), float(sums["sum/returns_squared"])) == (2.0, 6.0)
    assert c.head.bias.grad is not None and c.head.bias.grad.item() == pytest.approx((1.5 - 0.5) / 4)
    free = critic(value_clip=9.0)
    torch.nn.init.constant_(free.head.bias, 0.5)
    free.forward_backward(torch.randn(3, 4), old, returns, 4)
    assert free.head.bias.grad is not None and free.head.bias.grad.item() == pytest.approx((-1.5 + 1.5 - 0.5) / 4)


def test_the_value_is_linear_in_the_normalised_hidden_state_and_passes_it_no_gradient() -> None:
    c = critic()
    torch.nn.init.constant_(c.head.weight, 1.0)
    hidden = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 80.0]], requires_grad=True)
    values = c.values(hidden)
    assert values.tolist() == pytest.approx([4.0, 2.0], rel=1e-4)  # unit mean square a row
    values.sum().backward()
    assert hidden.grad is None


def trainer(algorithm: dict[str, Any], **train: Any) -> Trainer:
    return local_trainer(
        tiny.loaded(),
        TrainConfig.model_validate({"learning_rate": 1e-3, "num_steps": 10, "micro_batch_tokens": 40, **train}),
        AlgorithmConfig.model_validate({"advantage": "gae", **algorithm}),
        dtype=torch.float32,
        max_new_tokens=16,
    )


def rewarded(reward: float = 3.0) -> list[Sample]:
    out = []
    for s in random_samples(1):
        rewards = np.zeros_like(s.advantages)
        rewards[np.flatnonzero(s.mask)[-1]] = reward
        out.append(dataclasses.replace(s, advantages=rewards))
    return out


def test_the_critic_learns_the_return_and_its_state_is_kept() -> None:
    algorithm = {"critic_learning_rate": 0.05}
    t = trainer(algorithm, learning_rate=0.0, minibatches_per_step=3)
    losses = [t.train_step(Batch(rewarded()))["critic/loss"] for _ in range(12)]
    # Half the squared return, or nearly: the old value is 0, and later minibatches see a head that has moved.
    assert 2 < losses[0] < 6 and losses[-1] < 0.3 * losses[0]
    tensors, meta = t.backend.save_state()
    again = trainer(algorithm, learning_rate=0.0, minibatches_per_step=3)
    again.backend.load_state({k: v.clone() for k, v in tensors.items()}, meta)
    assert again.train_step(Batch(rewarded())) == t.train_step(Batch(rewarded()))
    with pytest.raises(ValueError, match="holds no such weights"):
        other = trainer({"advantage": "grpo", "kl_coef": 0.1})
        other.backend.load_state({k: v.clone() for k, v in tensors.items()}, meta)
    with pytest.raises(ValueError, match="has no critic"):
        trainer(algorithm).backend.load_state(*trainer({"advantage": "grpo"}).backend.save_state())


def weights(t: Trainer) -> list[torch.Tensor]:
    local = tiny.local(t)
    assert local.critic is not None
    return [p.detach().clone() for p in (*local.critic.head.parameters(), *local.model.parameters())]


def test_one_micro_batch_that_is_not_finite_skips_policy_and_critic_and_the_run_goes_on() -> None:
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
    assert calls > 2 and metrics["train/skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
    metrics = t.train_step(Batch(rewarded()))
    assert metrics["train/skipped_steps"] == 0 and all(math.isfinite(v) for v in metrics.values())
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True) if a.numel() > 1)


def test_a_gradient_of_the_policy_alone_that_is_not_finite_stops_the_critic_too() -> None:
    t = trainer({})
    before = weights(t)
    samples = rewarded()
    samples[0].behavior_logprobs[samples[0].mask] = np.nan  # the importance weight, and nothing of the critic's
    metrics = t.train_step(Batch(samples))
    assert metrics["train/skipped_steps"] == 1 and math.isfinite(metrics["critic/loss"])
    assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))


def test_the_gradient_of_the_critic_is_clipped_as_the_policys_is() -> None:
    t = trainer({}, max_grad_norm=0.5)
    metrics = t.train_step(Batch(rewarded()))
    assert metrics["critic/grad_norm"] > 1
    tensors, _ = t.backend.save_state()
    first = [tensors[f"critic/exp_avg/{name}"].flatten() for name in ("weight", "bias")]
    assert float(torch.cat(first).norm()) == pytest.approx(0.1 * 0.5, rel=1e-4)  # Adam: (1 - beta1) times the gradient

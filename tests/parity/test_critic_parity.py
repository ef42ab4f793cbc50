"""The critic against verl's: estimates, value loss, and a whole update with its functions in the place of ours.

TRL 1.16 has no PPO trainer; verl's two functions were made from its former one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from local_trainer import local_trainer
from plain_critic import PlainCritic, Rows
from rollover.config import AlgorithmConfig, CriticConfig, TrainConfig
from rollover.trainer.batch import Batch
from rollover.trainer.critic import Critic
from rollover.trainer.objective import step_metrics
from rollover.trainer.token_advantages import estimate_with_critic
from rollover.trainer.trainer import split_groups
from rollover.types import Sample
from samples import random_samples

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")


def padded(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, T], mask), the answers in their first columns."""
    out = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return out, (torch.arange(out.shape[1]) < torch.tensor([[len(row)] for row in rows])).float()


def verls_gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    (rewards_BT, mask_BT), (values_BT, _) = padded(rewards), padded(values)
    found = core_algos.compute_gae_advantage_return(rewards_BT, values_BT, mask_BT, gamma, lam)
    advantages, returns = ([row[: len(v)] for row, v in zip(x, values, strict=True)] for x in found)
    return advantages, returns


def verls_value_loss(values: Rows, old: Rows, returns: Rows, clip: float) -> torch.Tensor:
    (values_BT, mask_BT), (old_BT, _), (returns_BT, _) = padded(values), padded(old), padded(returns)
    return core_algos.compute_value_loss(values_BT, returns_BT, old_BT, mask_BT, clip)[0]


def samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    # A reward at every token, as with KL in the reward.
    rewards = {s.rollout_id: rng.standard_normal(len(s.mask)).astype(np.float32) for s in random_samples(seed)}
    return [s.with_streams(advantages=rewards[s.rollout_id] * s.mask) for s in random_samples(seed)]


@pytest.mark.parametrize("seed", range(4))
def test_gae_equals_verls_with_environment_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = samples(seed)
    values = {s.rollout_id: rng.standard_normal(int(s.mask.sum())).astype(np.float32) for s in rows}
    ours = estimate_with_critic(AlgorithmConfig(advantage="gae", gamma=0.95, gae_lambda=0.9), rows, values)
    rewards = [torch.from_numpy(s.advantages[s.mask]) for s in rows]
    advantages, returns = verls_gae(rewards, [torch.from_numpy(v) for v in values.values()], 0.95, 0.9)
    for s, mine, theirs, of_return in zip(rows, ours, advantages, returns, strict=True):
        # verl adds 1e-8 to the variance, we 1e-4 to the deviation.
        np.testing.assert_allclose(mine.advantages[s.mask], theirs.numpy(), atol=1e-3)
        np.testing.assert_allclose(mine.in_loss("returns"), of_return.numpy(), atol=1e-5)


@pytest.mark.parametrize("clip", [0.02, 0.5])
def test_a_whole_update_is_that_of_verls_functions(clip: float) -> None:
    """Three steps of two minibatches: the weights of the critic, in float32."""
    of_critic = tiny.loaded(seed=1)
    plain = PlainCritic(
        of_critic.model, learning_rate=1e-3, head_learning_rate=1e-3, weight_decay=0.01, max_grad_norm=1.0,
        betas=(0.9, 0.999), eps=1e-6,
    )  # fmt: skip
    train = TrainConfig(
        learning_rate=1e-3, num_steps=10, micro_batch_tokens=40, minibatches_per_step=2, adam_beta2=0.999, adam_eps=1e-6
    )
    t = local_trainer(
        tiny.loaded(),
        train,
        AlgorithmConfig(advantage="gae", gamma=0.95, gae_lambda=0.9),
        dtype=torch.float32,
        max_new_tokens=16,
        critic=CriticConfig(
            model="policy", learning_rate=1e-3, head_learning_rate=1e-3, weight_decay=0.01, value_clip=clip
        ),
        critic_model=of_critic,
    )
    for step in range(3):
        given = samples(step)
        norms = plain.train_step(split_groups(given, 2), 0.95, 0.9, clip, verls_gae, verls_value_loss)
        metrics = t.train_step(Batch(given))
        assert metrics["critic/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-3), "verl logs the mean"
        assert metrics["critic/grad_norm_max"] == pytest.approx(max(norms), rel=1e-3)
    critic = tiny.local(t).critic
    assert critic is not None
    tensors, _ = critic.state()
    for name, value in plain.weights().items():
        part, _, rest = name.partition("/")
        torch.testing.assert_close(tensors[f"critic/{part}/master/{rest}"], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_clipped_share_and_the_explained_variance_are_verls(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(50, generator=generator) for _ in range(3))
    _, share = core_algos.compute_value_loss(values[None], returns[None], old[None], torch.ones(1, 50), 0.5)
    critic = Critic(50, CriticConfig(value_clip=0.5), TrainConfig(), 1, torch.device("cpu"))
    # One-hot rows, of which the head makes any values that are wanted.
    hidden = torch.eye(50)
    scale = float(torch.rsqrt(hidden[0].square().mean() + 1e-6))
    with torch.no_grad():
        critic.head.weight.copy_(values[None] / scale)
    sums: dict[str, Any] = critic.forward_backward(hidden, old, returns, 50)
    totals = defaultdict(float) | {name: float(value) for name, value in sums.items()}
    totals |= {"count/tokens": 50.0, "count/sequences": 1.0}
    update = {
        "grad_norm": 1.0, "learning_rate": 1e-5, "train/skipped_steps": 0.0, "critic/grad_norm": 1.0,
        "critic/learning_rate": 1e-5, "critic/skipped_steps": 0.0,
    }  # fmt: skip
    assert totals["sum/critic_clipped"] / 50 == pytest.approx(float(share))
    # compute_data_metrics of verl: the variances of the errors and of the returns.
    expected = 1 - torch.var(returns - old) / (torch.var(returns) + 1e-5)
    assert step_metrics(totals, [update])["critic/explained_variance"] == pytest.approx(float(expected), abs=1e-3)

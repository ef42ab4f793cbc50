"""What [algorithm] makes of a minibatch against verl's pipeline: weights, rejection, policy loss and aggregation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from local_trainer import build_batch
from rollover.algorithms.token_batch import TokenBatch
from rollover.config import AlgorithmConfig
from rollover.trainer.objective import Counts, Objective
from rollover.trainer.streams import without_rejected
from rollover.types import (
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    Sample,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
corr = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
actor = pytest.importorskip("verl.workers.config.actor")

SEEDS = pytest.mark.parametrize("seed", range(4))
CLOSE: dict[str, Any] = dict(atol=1e-5, rtol=1e-5)
CAP = 1.4
Data = dict[str, torch.Tensor]


def batch(seed: int) -> Data:
    """Three policies apart, ragged rows with holes, one advantage a row; row 0 near the behavior policy."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -2 * torch.rand(6, 9, generator=generator)
    drift = torch.linspace(0.05, 0.8, 6)[:, None]
    proximal = behavior + drift * torch.randn(6, 9, generator=generator)
    mask = torch.rand(6, 9, generator=generator) > 0.2
    mask[:, 0] = True
    return {
        "behavior": behavior,
        "proximal": proximal,
        "current": (proximal + 0.3 * torch.randn(6, 9, generator=generator)).clamp(max=-1e-3),
        "advantages": torch.randn(6, generator=generator)[:, None].expand(6, 9),
        "mask": mask,
    }


def _samples(data: Data) -> list[Sample]:
    zeros = np.zeros(9, np.int32)
    return [
        Sample(
            str(i),
            i,
            zeros,
            zeros,
            mask.numpy(),
            {"behavior_logprobs": behavior.numpy(), "versions": zeros, "advantages": zeros.astype(np.float32)},
            1.0,
        )
        for i, (mask, behavior) in enumerate(zip(data["mask"], data["behavior"], strict=True))
    ]


def ours(data: Data, **algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    objective = Objective(AlgorithmConfig.model_validate({"correction_cap": CAP, **algorithm}), 9)
    samples = _samples(data)
    if objective.config.rejection:
        samples = [s.with_streams(proximal_logprobs=data["proximal"][s.group_id].numpy()) for s in samples]
        samples = [without_rejected(objective.config, s, 0) for s in samples]
    rows = torch.tensor([s.group_id for s in samples if s.mask.any()])
    mask = torch.stack([torch.from_numpy(samples[i].mask) for i in rows.tolist()])
    current = data["current"].clone().requires_grad_(True)

    def stream(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values[rows], 0.0)

    nothing = torch.zeros_like(mask)
    given = TokenBatch(mask_BT=mask, group_B=rows, sequences=[samples[i].sequence_id for i in rows.tolist()], streams={
        "logprobs": stream(current), "entropy": nothing.float(), "proximal_logprobs": stream(data["proximal"]),
        "behavior_logprobs": stream(data["behavior"]), "advantages": stream(data["advantages"]),
        "versions": nothing.long(), "staleness": nothing.long(),
    })  # fmt: skip
    loss, _ = objective(given, Counts.from_samples(samples))
    return loss.detach(), torch.autograd.grad(loss, current)[0]


def settings(**options: Any) -> Any:
    return actor.FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, rollout_n=1, **options)


def verls(
    data: Data, name: str, mode: str, correction: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's batch pipeline: weights from the response mask as it was, then the loss over the rewritten one."""
    proto, mask, _ = corr.compute_rollout_correction_and_rejection_mask(
        data["proximal"], data["behavior"], data["mask"].float(), **correction
    )
    current = data["current"].clone().requires_grad_(True)
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    loss, _ = core_algos.get_policy_loss_fn(name)(
        data["proximal"], current, data["advantages"], mask, mode, settings(**options), rollout_is_weights=weights
    )
    return loss.detach(), torch.autograd.grad(loss, current)[0]


def assert_same(got: tuple[torch.Tensor, torch.Tensor], peer: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(got[0], peer[0], **CLOSE)
    torch.testing.assert_close(got[1], peer[1], **CLOSE)
    assert peer[1].any()


# Ours, and verl's options and thresholds, which are ratios where they are of k1.
REJECTIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, None, ""),
    ({"token_k2": 0.05}, "token_k2", "0.05"),
    ({"sequence_mean_k3": 0.1}, "seq_mean_k3", "0.1"),
    ({"token_k1": 0.4}, "token_k1", repr(math.exp(0.4))),
    ({"token_k1": [-0.5, 0.3]}, "token_k1", f"{math.exp(-0.5)!r}_{math.exp(0.3)!r}"),
    (
        {"token_k1": [-0.6, 0.5], "sequence_mean_k3": 0.15, "sequence_max_k2": 0.8},
        "token_k1,seq_mean_k3,seq_max_k2",
        f"{math.exp(-0.6)!r}_{math.exp(0.5)!r},0.15,0.8",
    ),
]


@SEEDS
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize(("rejection", "option", "threshold"), REJECTIONS)
@pytest.mark.parametrize(("loss", "name"), [("clip", "vanilla"), ("gspo", "gspo")])
def test_rejected_token_leaves_denominators_and_ratios(
    seed: int, loss: str, name: str, rejection: dict[str, Any], option: str | None, threshold: str, mode: str
) -> None:
    data = batch(seed)
    got = ours(data, loss=loss, aggregation=mode, rejection=rejection)
    correction = {"rollout_is": "token", "rollout_is_threshold": CAP, "rollout_rs": option}
    if option:
        correction["rollout_rs_threshold"] = threshold
    peer = verls(data, name, mode, correction, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9)
    assert_same(got, peer)
    if option:
        assert not torch.allclose(got[0], ours(data, loss=loss, aggregation=mode)[0], rtol=1e-3)


@SEEDS
def test_deliberate_sequence_weight_excludes_rejected(seed: int) -> None:
    data = batch(seed)
    common = {"loss": "clip", "correction": "sequence_truncate", "correction_cap": 1e6}
    correction = {"rollout_is": "sequence", "rollout_is_threshold": 1e6}
    options = {"clip_ratio_c": 1e9}
    assert_same(ours(data, **common), verls(data, "vanilla", "token-mean", correction, **options))
    whole = {"rejection": {"sequence_mean_k2": 0.05}}
    correction |= {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": "0.05"}
    assert_same(ours(data, **common, **whole), verls(data, "vanilla", "token-mean", correction, **options))
    tokens = {"rejection": {"token_k2": 0.05}}
    correction |= {"rollout_rs": "token_k2"}
    peer = verls(data, "vanilla", "token-mean", correction, **options)
    assert not torch.allclose(ours(data, **common, **tokens)[0], peer[0], rtol=1e-3)


@SEEDS
@pytest.mark.parametrize(("mode", "level"), [("token_truncate", "token"), ("sequence_truncate", "sequence")])
def test_reinforce_is_verls_bypass_mode(seed: int, mode: str, level: str) -> None:
    data = batch(seed)
    policy = actor.PolicyLossConfig(
        loss_mode="bypass_mode",
        rollout_correction={"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": CAP},
    )
    current = data["current"].clone().requires_grad_(True)
    loss, _ = core_algos.get_policy_loss_fn("bypass_mode")(
        data["behavior"], current, data["advantages"], data["mask"].float(), "seq-mean-token-sum",
        settings(policy_loss=policy),
    )  # fmt: skip
    peer = loss.detach(), torch.autograd.grad(loss, current)[0]
    assert_same(ours(data, loss="reinforce", correction=mode, aggregation="seq-mean-token-sum"), peer)


@SEEDS
@pytest.mark.parametrize(
    ("mode", "threshold"), [("token_truncate", CAP), ("icepop", f"{1 / CAP!r}_{CAP!r}"), ("sequence_truncate", CAP)]
)
def test_gmpo_weights_are_verls(seed: int, mode: str, threshold: Any) -> None:
    data = batch(seed)
    level = "sequence" if mode.startswith("sequence") else "token"
    correction = {"rollout_is": level, "rollout_is_threshold": threshold}
    peer = verls(data, "geo_mean", "token-mean", correction, clip_ratio_low=0.4, clip_ratio_high=0.4)
    options = {"loss": "gmpo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4, "clip_high": 0.4}
    got = ours(data, correction=mode, **options)
    torch.testing.assert_close(got, peer, atol=1e-5, rtol=1e-4)
    assert peer[1].any()


@SEEDS
@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_of_a_run_is_over_tokens_as_verls(seed: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    groups, masks, scores = [], [], []
    for g in range(3):
        rollouts = []
        for i in range(4):
            lengths = rng.integers(1, 6, 3)
            segments = [
                Segment(
                    np.full(n, 7, np.int32), np.full(n, -1.0, np.float32), 0, SamplingParams(), StopReason.PAUSED,
                    trainable=k != 1,
                )
                for k, n in enumerate(lengths)
            ]  # fmt: skip
            scores.append(float(rng.normal()))
            masks.append(np.repeat([True, False, True], lengths))
            task = Task(f"t{g}", "test", "reward", prompt="x")
            state, reward = RolloutState.READY, Reward(scores[-1])
            rollouts.append(Rollout(g, i, task, segments, state, StopReason.EOS, reward))
        groups.append(Group(g, rollouts[0].task, Prompt((5,)), rollouts))
    samples = build_batch(groups, AlgorithmConfig(advantage=name)).samples
    mask_NT = torch.zeros(12, max(map(len, masks)))
    rewards_NT = torch.zeros_like(mask_NT)
    for row, (mask, score) in enumerate(zip(masks, scores, strict=True)):
        mask_NT[row, : len(mask)] = torch.from_numpy(mask)
        rewards_NT[row, int(np.flatnonzero(mask)[-1])] = score
    index = np.array([f"uid-{i // 4}" for i in range(12)], dtype=object)
    function = getattr(core_algos, f"compute_{name}_outcome_advantage")
    config = type("Config", (), {"gamma": 1.0})()
    peer = function(rewards_NT, mask_NT, index=index, config=config)[0]
    for row, s in enumerate(samples):
        wanted = peer[row, : len(s.mask)].numpy()[s.mask]
        np.testing.assert_allclose(s.advantages[s.mask], wanted, rtol=1e-3)  # eps: 1e-4 on the deviation, 1e-8 inside

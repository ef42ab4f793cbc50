"""What each policy loss declares in config/algorithm.py, against what it does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from rollover.algorithms.loss import LOSSES, policy_loss
from rollover.config import AlgorithmConfig
from rollover.config.traits import LOSSES as TRAITS

KINDS = pytest.mark.parametrize("kind", LOSSES)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(6, 8, generator=generator)
    return {
        "logprobs_BT": (old + 0.5 * torch.randn(6, 8, generator=generator)).clamp(max=-1e-3),
        "old_logprobs_BT": old,
        "advantages_BT": torch.tensor([2.0, -1.0, 0.0, 1.0, 0.0, -2.0]),
        "mask_BT": torch.rand(6, 8, generator=generator) > 0.2,
    }


def options(kind: str) -> dict[str, Any]:
    out: dict[str, Any] = {"behavior_logprobs_BT": torch.full((6, 8), -1.0)} if TRAITS[kind].weighs else {}
    if kind == "vespo":
        out["weight_cap"] = 1.1  # without one only the ratio to the behavior policy is left
    if kind == "clip_cov":
        out |= {"cov_low": 0.4, "share": 1.0}  # every candidate is dropped: no draw
    return out | ({"share": 0.2} if kind == "kl_cov" else {})


def loss_and_gradient(kind: str, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = data["logprobs_BT"].clone().requires_grad_(True)
    loss_BT, _ = policy_loss(**(data | {"logprobs_BT": logprobs}), kind=kind, **options(kind))
    return loss_BT.detach(), torch.autograd.grad(loss_BT.sum(), logprobs)[0]


@KINDS
def test_ratio(kind: str) -> None:
    data = batch()
    moved = data | {"old_logprobs_BT": data["old_logprobs_BT"] - 0.3}
    same = torch.equal(loss_and_gradient(kind, data)[1], loss_and_gradient(kind, moved)[1])
    assert TRAITS[kind].ratio is not same


@KINDS
def test_vanishes(kind: str) -> None:
    """Whether the gradient is the same without the rows whose advantage is 0."""

    def same(data: dict[str, torch.Tensor]) -> bool:
        loud_B1 = (data["advantages_BT"] != 0)[:, None]
        without = data | {"mask_BT": data["mask_BT"] & loud_B1}
        return torch.equal(loss_and_gradient(kind, data)[1], loss_and_gradient(kind, without)[1])

    assert TRAITS[kind].vanishes == all(same(batch(seed)) for seed in range(10))


@KINDS
def test_options(kind: str) -> None:
    names = inspect.signature(LOSSES[kind]).parameters
    assert ({"clip_low", "clip_high"} <= names.keys()) == TRAITS[kind].bounds
    assert ("dual_clip" in names) == TRAITS[kind].dual_clip
    assert ("behavior_logprobs_BT" in names) == TRAITS[kind].weighs


@KINDS
def test_bounds_are_the_same_by_default_wherever_a_loss_is_called_from(kind: str) -> None:
    """By itself, through `policy_loss`, or from a configuration."""
    own, general = (inspect.signature(function).parameters for function in (LOSSES[kind], policy_loss))
    for name in ("clip_low", "clip_high"):
        default = AlgorithmConfig.model_fields[name].default
        assert general[name].default == default
        assert name not in own or own[name].default == default


@KINDS
def test_by_row(kind: str) -> None:
    data = batch()
    loss_BT, _ = loss_and_gradient(kind, data)
    spread = max(float(row[mask].max() - row[mask].min()) for row, mask in zip(loss_BT, data["mask_BT"], strict=True))
    by_row = spread < 1e-6
    # GSPO's tokens hold equal values too, but each passes the gradient of its own log-prob: token weights belong there.
    assert TRAITS[kind].by_row == (by_row and kind not in ("gspo", "luspo"))


def test_nothing_is_assumed_of_a_loss_of_ones_own() -> None:
    own = AlgorithmConfig(loss="mine.py:loss")
    assert own.needs_every_token and own.corrects and own.weight == "token_truncate"
    for proximal in ("behavior", "snapshot", "interpolated"):
        assert not AlgorithmConfig(loss="mine.py:loss", proximal=proximal).corrects


@KINDS
def test_losses_of_the_ratio_are_alike_where_it_is_1(kind: str) -> None:
    """What the notice about options of the ratio says (config/settle.py)."""
    data = batch()
    data["old_logprobs_BT"] = data["logprobs_BT"].clone()
    same = torch.allclose(loss_and_gradient(kind, data)[1], loss_and_gradient("reinforce", data)[1])
    assert TRAITS[kind].by_ratio is same

"""Off-policy sequence mask, effective sample size with its step scale, and the interpolated proximal policy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.algorithms.correction import (
    effective_sample_size,
    ess_step_scale,
    importance_weights,
    interpolated_proximal,
    off_policy_sequence_mask,
)
from rollover.algorithms.loss import policy_loss
from unit.algorithms.correction_rows import BEHAVIOR, MASK, PROXIMAL, random_batch


def test_off_policy_sequence_mask_keeps_the_threshold_itself_and_passes_no_gradient() -> None:
    current = torch.tensor([[-0.75, -0.25]]).requires_grad_(True)
    args = (torch.tensor([-1.0]), current, torch.zeros(1, 2), torch.ones(1, 2))
    kept = off_policy_sequence_mask(*args, threshold=0.5)
    assert kept.all() and not kept.requires_grad
    assert not off_policy_sequence_mask(*args, threshold=0.4999).any()
    loss, _ = policy_loss(current, torch.zeros(1, 2), args[0], args[3], kind="reinforce")
    (gradient,) = torch.autograd.grad((loss * kept).sum(), current)
    torch.testing.assert_close(gradient, torch.ones(1, 2))


def test_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([[3.0, 1.0, 2.0], [4.0, 2.0, 99.0]])
    assert float(effective_sample_size(weights, MASK, level="token")) == pytest.approx(144 / (5 * 34))
    # Row means 2 and 3.
    assert float(effective_sample_size(weights, MASK, level="sequence")) == pytest.approx(25 / (2 * 13))
    one = torch.tensor([[0.0, 7.0, 0.0], [0.0, 0.0, 5.0]])
    assert float(effective_sample_size(one, MASK, level="token")) == pytest.approx(1 / 5)
    assert float(effective_sample_size(one, MASK, level="sequence")) == pytest.approx(1 / 2)
    for nothing in ((torch.zeros(2, 3), MASK), (weights, torch.zeros(2, 3))):
        for level in ("token", "sequence"):
            assert float(effective_sample_size(*nothing, level=level)) == 0.0


@given(st.integers(0, 10_000), st.sampled_from(["token", "sequence"]), st.floats(0.01, 100))
def test_effective_sample_size_is_a_share_and_knows_no_scale(seed: int, level, scale: float) -> None:
    proximal, behavior, mask, _ = random_batch(seed)
    weights = (proximal - behavior).exp()
    share = effective_sample_size(weights, mask, level=level)
    count = int(mask.sum()) if level == "token" else int(mask.any(-1).sum())
    assert 1 / count - 1e-6 <= float(share) <= 1 + 1e-6
    torch.testing.assert_close(effective_sample_size(scale * weights, mask, level=level), share)
    torch.testing.assert_close(
        effective_sample_size(torch.full_like(weights, scale), mask, level=level), torch.ones(())
    )


def test_ess_step_scale_by_hand() -> None:
    for ess, expected in ((0.25, 0.5), (0.36, 0.6), (1.0, 1.0), (1.8, 1.0), (0.0, 0.0)):
        assert float(ess_step_scale(ess)) == pytest.approx(expected)
    share = effective_sample_size(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), level="sequence")
    assert float(ess_step_scale(share)) == pytest.approx(math.sqrt(0.8))


def test_interpolated_proximal_by_hand() -> None:
    behavior, current = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0]]), torch.tensor([[-3.0, -3.0, -3.0, -3.0, -9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    got = interpolated_proximal(behavior, current.requires_grad_(True), torch.tensor([[0, 1, 2, 4, 3]]), mask_BT=mask)
    torch.testing.assert_close(got, torch.tensor([[-1.0, -1.0, -2.0, -2.5, 0.0]]))
    assert not got.requires_grad
    old = interpolated_proximal(behavior, current, torch.full((1, 5), 10**6), mask_BT=mask)
    torch.testing.assert_close(old, torch.where(mask.bool(), current.detach(), 0.0), rtol=1e-5, atol=1e-5)


def test_interpolated_proximal_splits_the_whole_ratio() -> None:
    """weight(proximal, behavior) * ratio(current, proximal) is current / behavior at any staleness."""
    current, behavior, mask, versions = random_batch(3)
    proximal = interpolated_proximal(behavior, current, 5 - versions, mask_BT=mask)
    weights = importance_weights(proximal, behavior, mask, mode="token_truncate", cap=1e9)
    rest = torch.where(mask, current - proximal, 0.0).exp()
    torch.testing.assert_close(weights * rest, torch.where(mask, (current - behavior).exp(), 0.0))


def test_interpolated_proximal_refuses_a_negative_staleness() -> None:
    with pytest.raises(ValueError, match="staleness_BT is negative"):
        interpolated_proximal(BEHAVIOR, PROXIMAL, -torch.ones(2, 3), mask_BT=MASK)

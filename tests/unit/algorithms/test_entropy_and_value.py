"""The entropy term, the mask of high entropies, and the value loss."""

from __future__ import annotations

import math

import pytest
import torch

from rollover.algorithms.loss import entropy_bonus, high_entropy_mask, value_loss


def close(got: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_entropy_bonus_rewards_entropy() -> None:
    entropy = torch.tensor([[1.0, 2.0, math.nan]], requires_grad=True)
    term = entropy_bonus(entropy, torch.tensor([[1, 1, 0]]), coef=0.1)
    close(term.detach()[0], -0.1, -0.2, 0.0)
    (gradient,) = torch.autograd.grad(term.sum(), entropy)
    close(gradient[0], -0.1, -0.1, 0.0)


def test_high_entropy_mask_keeps_the_share_of_highest_entropy() -> None:
    entropy = torch.tensor([[0.1, 0.9, 0.3, math.nan], [0.5, 0.7, 0.2, math.inf]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    assert entropy[high_entropy_mask(entropy, mask, share=0.2)].tolist() == pytest.approx([0.9, 0.7])
    assert entropy[high_entropy_mask(entropy, mask, share=0.1)].tolist() == pytest.approx([0.9])
    assert high_entropy_mask(entropy, mask, share=1.0).equal(mask.bool())
    assert high_entropy_mask(torch.ones(2, 4), mask).equal(mask.bool())  # ties at the bound stay in
    assert not high_entropy_mask(entropy, torch.zeros(2, 4)).any()
    # 0.3 * 10 rounds to above 3: the fourth smallest of 11 stays in.
    assert int(high_entropy_mask(torch.arange(11.0)[None], torch.ones(1, 11), share=0.7).sum()) == 8
    with pytest.raises(ValueError, match="share = 1.5"):
        high_entropy_mask(entropy, mask, share=1.5)


def test_value_loss_by_hand() -> None:
    """The clip takes the larger error: it stops what has moved towards the return, not what has moved away."""
    values = torch.tensor([[1.5, 0.5, 1.1, math.nan]], requires_grad=True)
    mask, returns = torch.tensor([[1, 1, 1, 0]]), torch.full((1, 4), 2.0)
    loss = value_loss(values, torch.ones(1, 4), returns, mask)
    close(loss.detach()[0], 0.5 * 0.8**2, 0.5 * 1.5**2, 0.5 * 0.9**2, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    close(gradient[0], 0.0, -1.5, -0.9, 0.0)
    plain = value_loss(values, torch.ones(1, 4), returns, mask, clip=None)
    close(plain.detach()[0], 0.5 * 0.5**2, 0.5 * 1.5**2, 0.5 * 0.9**2, 0.0)


def test_value_loss_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(3, 5, generator=generator) for _ in range(3))
    mask, step = torch.rand(3, 5, generator=generator) > 0.2, 1e-2
    x = values.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(value_loss(x, old, returns, mask, clip=0.5).sum(), x)
    up, down = (value_loss(values + s, old, returns, mask, clip=0.5) for s in (step, -step))
    smooth = ((values - old).abs() - 0.5).abs() > 2 * step
    smooth &= (values + old.clamp(values - 0.5, values + 0.5) - 2 * returns).abs() > 2 * step
    assert int((smooth & mask).sum()) >= 8
    torch.testing.assert_close(((up - down) / (2 * step))[smooth], gradient[smooth], atol=1e-3, rtol=1e-3)

"""The entropy term, the mask of high entropies, and the value loss."""

from __future__ import annotations

import math

import pytest
import torch

from rollover.algorithms.loss import entropy_bonus, high_entropy_mask


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

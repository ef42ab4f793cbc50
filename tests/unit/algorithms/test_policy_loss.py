"""Policy losses: by hand, by finite differences, and their metrics."""

from __future__ import annotations

import math

import pytest
import torch

from rollover.algorithms.loss import policy_loss


def test_clip_by_hand() -> None:
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    loss, metrics = policy_loss(ratios.log(), torch.zeros(1, 6), advantages, mask, kind="clip", clip_high=0.28)
    # The clip binds only where it makes the objective smaller.
    torch.testing.assert_close(loss, torch.tensor([[-1.28, 1.5, -0.5, 0.8, -2.2, 0.0]]))
    assert {k: round(float(v), 5) for k, v in metrics.items()} == {
        "count/tokens": 5.0,
        "sum/ratio": 5.1,
        "max/ratio": 1.5,
        "sum/clipped": 2.0,
    }


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    ratios, advantages = torch.tensor([[10.0, 2.0, 10.0]]), torch.tensor([[-1.0, -1.0, 1.0]])
    loss, _ = policy_loss(
        ratios.log(), torch.zeros(1, 3), advantages, torch.ones(1, 3).bool(), kind="clip", dual_clip=3.0
    )
    torch.testing.assert_close(loss, torch.tensor([[3.0, 2.0, -1.2]]))


def test_reinforce_is_minus_logprob_times_advantage_of_the_row() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    loss, metrics = policy_loss(
        logprobs, logprobs, torch.tensor([2.0, -1.0]), torch.tensor([[True, True], [True, False]]), kind="reinforce"
    )
    assert loss.tolist() == [[2.0, 4.0], [-3.0, 0.0]]
    assert float(metrics["sum/clipped"]) == 0.0 and float(metrics["sum/ratio"]) == 3.0


@pytest.mark.parametrize("kind", ["clip", "reinforce"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_gradient_equals_finite_differences(kind, dual_clip) -> None:
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(3, 7, generator=generator) - 2
    current = (old + 0.6 * torch.randn(3, 7, generator=generator)).requires_grad_(True)
    advantages = torch.randn(3, 7, generator=generator)
    mask = torch.rand(3, 7, generator=generator) > 0.3

    def objective(x: torch.Tensor) -> torch.Tensor:
        return policy_loss(x, old, advantages, mask, kind=kind, dual_clip=dual_clip)[0]

    (gradient,) = torch.autograd.grad(objective(current).sum(), current)
    step = 1e-2
    # Each token's loss depends on its own log-prob only, so all entries are perturbed at once.
    with torch.no_grad():
        numeric = (objective(current + step) - objective(current - step)) / (2 * step)
        ratio = (current - old).exp()
        # A kink of the clip or the dual clip within the step makes the difference quotient meaningless.
        kinks = [0.8, 1.2] + ([dual_clip] if dual_clip else [])
        smooth = torch.stack([((ratio / k).log().abs() > 1.5 * step) for k in kinks]).all(0)
    assert int((smooth & mask).sum()) >= 8
    torch.testing.assert_close(gradient[smooth], numeric[smooth], atol=2e-3, rtol=2e-3)
    assert torch.equal(gradient[~mask], torch.zeros(int((~mask).sum())))


def test_ratio_one_gives_the_policy_gradient() -> None:
    """At equal policies the clipped loss has REINFORCE's gradient, -A, and clips nothing."""
    logprobs = (torch.randn(2, 5) - 3).requires_grad_(True)
    advantages, mask = torch.randn(2, 5), torch.ones(2, 5).bool()
    gradients = []
    for kind in ("clip", "reinforce"):
        loss, metrics = policy_loss(logprobs, logprobs.detach(), advantages, mask, kind=kind)
        gradients.append(torch.autograd.grad(loss.sum(), logprobs)[0])
        assert float(metrics["sum/clipped"]) == 0.0 and float(metrics["max/ratio"]) == 1.0
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], -advantages)


def test_what_lies_under_the_mask_does_not_matter() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    loss, metrics = policy_loss(logprobs, torch.tensor([[-1.0, -math.inf]]), torch.ones(1), mask, kind="clip")
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss.tolist() == [[-1.0, 0.0]] and logprobs.grad.tolist() == [[-1.0, 0.0]]
    assert float(metrics["max/ratio"]) == 1.0


def test_absurd_ratios_stay_finite() -> None:
    logprobs = torch.tensor([[0.0, -300.0]], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, torch.tensor([[-300.0, 0.0]]), torch.tensor([-1.0]), torch.ones(1, 2).bool(), kind="clip"
    )
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_metrics_of_the_parts_combine_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    current, old, advantages = (torch.randn(6, 4, generator=generator) for _ in range(3))
    mask = torch.rand(6, 4, generator=generator) > 0.4
    _, whole = policy_loss(current, old, advantages, mask, kind="clip")
    parts = [policy_loss(current[i], old[i], advantages[i], mask[i], kind="clip")[1] for i in (slice(2), slice(2, 6))]
    for key, value in whole.items():
        values = torch.stack([p[key] for p in parts])
        torch.testing.assert_close(values.max() if key.startswith("max/") else values.sum(), value)


def test_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="policy loss"):
        policy_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1), kind="ppo")  # type: ignore[arg-type]

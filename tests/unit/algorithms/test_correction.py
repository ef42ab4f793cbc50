"""Importance weights by hand, their bounds, and facts 3 and 6 of the decoupled loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.algorithms.aggregate import aggregate
from rollover.algorithms.correction import importance_weights, mismatch_metrics
from rollover.algorithms.loss import policy_loss

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
# Ratios 3, 0.5, 1 and (second row) 0.1, 2; the last position of row two is no loss token.
PROXIMAL = torch.tensor([[3.0, 0.5, 1.0], [0.1, 2.0, 7.0]]).log()
BEHAVIOR = torch.zeros(2, 3)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()


@pytest.mark.parametrize(
    ("mode", "cap", "floor", "expected"),
    [
        ("token_truncate", 2.0, None, [[2.0, 0.5, 1.0], [0.1, 2.0, 0.0]]),
        ("token_truncate", 2.0, 0.4, [[2.0, 0.5, 1.0], [0.4, 2.0, 0.0]]),
        ("token_mask", 2.5, None, [[0.0, 0.5, 1.0], [0.1, 2.0, 0.0]]),
        ("token_mask", 2.5, 0.4, [[0.0, 0.5, 1.0], [0.0, 2.0, 0.0]]),
        ("sequence_truncate", 1.2, None, [[1.2, 1.2, 1.2], [0.2, 0.2, 0.0]]),
        ("sequence_truncate", 1.2, 0.3, [[1.2, 1.2, 1.2], [0.3, 0.3, 0.0]]),
        ("sequence_mask", 1.2, None, [[0.0, 0.0, 0.0], [0.2, 0.2, 0.0]]),
        ("sequence_mask", 2.0, 0.3, [[1.5, 1.5, 1.5], [0.0, 0.0, 0.0]]),
    ],
)
def test_by_hand(mode, cap: float, floor: float | None, expected: list[list[float]]) -> None:
    got = importance_weights(PROXIMAL, BEHAVIOR, MASK, mode=mode, cap=cap, floor=floor)
    torch.testing.assert_close(got, torch.tensor(expected))
    assert torch.equal(got == 0, torch.tensor(expected) == 0), "masked entries are exactly 0"


@pytest.mark.parametrize("mode", MODES)
@given(
    proximal=st.lists(st.floats(-400, 0, width=32), min_size=6, max_size=6),
    behavior=st.lists(st.floats(-400, 0, width=32), min_size=6, max_size=6),
)
def test_weights_are_finite_bounded_and_detached(mode, proximal: list[float], behavior: list[float]) -> None:
    p = torch.tensor(proximal).view(2, 3).requires_grad_(True)
    weights = importance_weights(p, torch.tensor(behavior).view(2, 3), MASK, mode=mode, cap=2.0)
    assert weights.isfinite().all() and not weights.requires_grad
    assert float(weights.min()) >= 0 and float(weights.max()) <= 2.0
    assert float(weights[1, 2]) == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_log_ratios_are_bounded_to_20(mode) -> None:
    mask = torch.ones(1, 2).bool()
    high = importance_weights(torch.zeros(1, 2), torch.full((1, 2), -300.0), mask, mode=mode, cap=1e30)
    low = importance_weights(torch.full((1, 2), -300.0), torch.zeros(1, 2), mask, mode=mode, cap=2.0)
    torch.testing.assert_close(high, torch.full((1, 2), math.exp(20.0)))
    torch.testing.assert_close(low, torch.full((1, 2), math.exp(-20.0)))


@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_have_weight_one(mode) -> None:
    """Fact 3: weights are exactly 1, every mask keeps all, the mismatch is exactly 0."""
    logprobs = -torch.rand(2, 3) * 8
    weights = importance_weights(logprobs, logprobs, MASK, mode=mode, cap=1.0000001, floor=0.9999999)
    assert torch.equal(weights, MASK.float())
    metrics = mismatch_metrics(logprobs, logprobs, MASK, mode=mode, cap=1.0000001)
    assert float(metrics["sum/kl"]) == float(metrics["max/logprob_abs"]) == float(metrics["sum/capped"]) == 0.0
    assert float(metrics["sum/importance"]) == 5.0


def decoupled(current, proximal, behavior, advantages, *, kind="clip", mode="token_truncate", cap=2.0):
    """(loss, gradient of the current log-probs) of weight(proximal, behavior) * loss(current, proximal)."""
    current = current.clone().requires_grad_(True)
    loss_BT, _ = policy_loss(current, proximal, advantages, MASK, kind=kind)
    weights = importance_weights(proximal, behavior, MASK, mode=mode, cap=cap)
    loss = aggregate(loss_BT * weights, MASK, "token-mean")
    return loss, torch.autograd.grad(loss, current)[0]


@given(st.integers(0, 10_000))
def test_decoupled_loss_with_proximal_equal_to_behavior_is_ppo(seed: int) -> None:
    """Fact 6, first half."""
    generator = torch.Generator().manual_seed(seed)
    current, behavior, advantages = (torch.randn(2, 3, generator=generator) for _ in range(3))
    loss, gradient = decoupled(current, behavior, behavior, advantages)
    plain = current.clone().requires_grad_(True)
    ppo = aggregate(policy_loss(plain, behavior, advantages, MASK, kind="clip")[0], MASK, "token-mean")
    assert torch.equal(loss, ppo)
    assert torch.equal(gradient, torch.autograd.grad(ppo, plain)[0])


@given(st.integers(0, 10_000), st.sampled_from(MODES))
def test_decoupled_loss_at_the_proximal_policy_is_truncated_is_reinforce(seed: int, mode) -> None:
    """Fact 6, second half: the gradient is that of w * -A * log pi, w the bounded weight current / behavior."""
    generator = torch.Generator().manual_seed(seed)
    current, behavior, advantages = (torch.randn(2, 3, generator=generator) for _ in range(3))
    _, gradient = decoupled(current, current, behavior, advantages, mode=mode)
    _, reinforce = decoupled(current, current, behavior, advantages, mode=mode, kind="reinforce")
    weights = importance_weights(current, behavior, MASK, mode=mode, cap=2.0)
    torch.testing.assert_close(gradient, -weights * advantages / 5)
    torch.testing.assert_close(gradient, reinforce)


def test_mismatch_by_hand() -> None:
    metrics = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="token_truncate", cap=1.5)
    logs = [math.log(r) for r in (3.0, 0.5, 1.0, 0.1, 2.0)]
    assert float(metrics["sum/logprob_abs"]) == pytest.approx(sum(abs(x) for x in logs), rel=1e-5)
    assert float(metrics["max/logprob_abs"]) == pytest.approx(math.log(10), rel=1e-5)
    assert float(metrics["sum/kl"]) == pytest.approx(-sum(logs), rel=1e-5)
    # Weights are reported before the cap.
    assert float(metrics["sum/importance"]) == pytest.approx(6.6, rel=1e-5)
    assert float(metrics["max/importance"]) == pytest.approx(3.0, rel=1e-5)
    assert float(metrics["sum/capped"]) == 2.0


def test_mismatch_of_sequences_and_of_no_correction() -> None:
    sequence = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="sequence_mask", cap=1.2)
    assert float(sequence["max/importance"]) == pytest.approx(1.5, rel=1e-5)
    assert float(sequence["sum/importance"]) == pytest.approx(3 * 1.5 + 2 * 0.2, rel=1e-5)
    assert float(sequence["sum/capped"]) == 3.0
    uncorrected = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="none", cap=1.2)
    assert float(uncorrected["max/importance"]) == pytest.approx(3.0, rel=1e-5)
    assert float(uncorrected["sum/capped"]) == 0.0


def test_unknown_mode_is_an_error() -> None:
    for mode in ("token", "batch_mask", "none"):
        with pytest.raises(ValueError, match="not a correction"):
            importance_weights(PROXIMAL, BEHAVIOR, MASK, mode=mode, cap=2.0)  # type: ignore[arg-type]

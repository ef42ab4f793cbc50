"""KL: its unbiased value and gradient by summing over a small vocabulary, masks, and the controllers."""

from __future__ import annotations

import math

import pytest
import torch

from rollover.algorithms.kl import AdaptiveKL, bias_corrected_kl, full_kl, kl_penalty

KINDS = ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


def distributions(seed: int = 0, vocabulary: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of policy (with gradient), reference and old policy [V]."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref, old = torch.randn(3, vocabulary, generator=generator)
    return logits.requires_grad_(True), ref, old


def true_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL of two logit vectors by torch's own distributions."""
    return torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )


def gradient(value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def expected(estimate_V: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """Mean over tokens drawn from `sampler`: the probabilities are no part of what is differentiated."""
    return (sampler.detach().softmax(-1) * estimate_V).sum()


def test_full_by_hand() -> None:
    """0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = 0.1438; logits serve as well as log-probs."""
    p, q = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.25, 0.75]]]).log()
    assert kl_penalty(p, q, "full").tolist() == [[pytest.approx(0.1438410, abs=1e-6)]]
    torch.testing.assert_close(full_kl(p + 3, q - 5), full_kl(p, q))


@pytest.mark.parametrize("seed", range(5))
def test_full_is_the_kl_of_the_distributions(seed: int) -> None:
    logits, ref, _ = distributions(seed)
    full, true = full_kl(logits[None, None], ref[None, None])[0, 0], true_kl(logits, ref)
    torch.testing.assert_close(full, true)
    torch.testing.assert_close(gradient(full, logits), gradient(true, logits))


def test_tokens_of_no_probability_add_nothing_to_the_full_kl() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    ref = torch.tensor([[[0.25, 0.75, 0.0]]]).log()
    kl = full_kl(logits, ref)
    assert float(kl.detach()) == pytest.approx(0.1438410, abs=1e-6)
    assert gradient(kl.sum(), logits).isfinite().all()
    assert float(full_kl(torch.zeros(1, 1, 3), ref)) == math.inf  # possible here, impossible there


@pytest.mark.parametrize("seed", range(5))
def test_k1_and_k3_estimate_the_kl_without_bias_and_k2_does_not(seed: int) -> None:
    logits, ref, _ = distributions(seed)
    logprobs, ref_logprobs = logits.log_softmax(-1)[None], ref.log_softmax(-1)[None]
    true = float(true_kl(logits, ref).detach())
    for kind in ("k1", "k3", "k1+", "k3+"):
        assert float(expected(kl_penalty(logprobs, ref_logprobs, kind), logits).detach()) == pytest.approx(
            true, abs=1e-5
        )
    assert float(expected(kl_penalty(logprobs, ref_logprobs, "k2"), logits).detach()) != pytest.approx(true, rel=1e-2)


@pytest.mark.parametrize("seed", range(5))
def test_expected_gradients(seed: int) -> None:
    """k2 and "+": the KL's. k1: none. k3: that of the KL the other way round."""
    logits, ref, _ = distributions(seed)
    logprobs, ref_logprobs = logits.log_softmax(-1)[None], ref.log_softmax(-1)[None]
    wanted = {kind: gradient(true_kl(logits, ref), logits) for kind in ("k2", "k1+", "abs+", "k3+")}
    wanted |= {"k1": torch.zeros(6), "k3": gradient(true_kl(ref, logits), logits)}
    for kind, want in wanted.items():
        got = gradient(expected(kl_penalty(logprobs, ref_logprobs, kind), logits), logits)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(5))
def test_bias_corrected_kl_is_unbiased_on_tokens_of_an_old_policy(seed: int, kind: str) -> None:
    logits, ref, old = distributions(seed)
    logprobs, ref_logprobs, old_logprobs = (x.log_softmax(-1)[None] for x in (logits, ref, old))
    got = expected(bias_corrected_kl(logprobs, ref_logprobs, old_logprobs, kind), old)
    true = true_kl(logits, ref)
    torch.testing.assert_close(got, true, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(got, logits), gradient(true, logits), atol=1e-6, rtol=1e-5)
    uncorrected = gradient(expected(kl_penalty(logprobs, ref_logprobs, "k2"), old), logits)
    assert not torch.allclose(uncorrected, gradient(true, logits), rtol=1e-2)


def test_gradient_of_the_bias_corrected_k3_is_ratio_times_log_ratio() -> None:
    logprobs, ref, old = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    logprobs.requires_grad_(True)
    got = gradient(bias_corrected_kl(logprobs, ref, old).sum(), logprobs)
    torch.testing.assert_close(got, ((logprobs - old).exp() * (logprobs - ref)).detach())
    on_policy = bias_corrected_kl(logprobs, ref, logprobs.detach())
    torch.testing.assert_close(on_policy, kl_penalty(logprobs, ref, "k3"))
    torch.testing.assert_close(
        gradient(on_policy.sum(), logprobs), gradient(kl_penalty(logprobs, ref, "k3+").sum(), logprobs)
    )


def test_absurd_ratios_of_the_bias_corrected_kl_stay_finite() -> None:
    logprobs = torch.tensor([[0.0, -300.0]], requires_grad=True)
    kl = bias_corrected_kl(logprobs, torch.full((1, 2), -1.0), torch.tensor([[-300.0, 0.0]]))
    assert kl.isfinite().all() and gradient(kl.sum(), logprobs).isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k3+"])
def test_equal_policies_have_no_kl(kind: str) -> None:
    logprobs = torch.randn(2, 3).requires_grad_(True)
    kl = kl_penalty(logprobs, logprobs.detach(), kind)
    assert not kl.any() and (kind in ("k1",) or not gradient(kl.sum(), logprobs).any())


def test_max_value_and_far_references_of_k3() -> None:
    logprobs = torch.tensor([[-5.0, -1.0, -300.0]], requires_grad=True)
    ref = torch.tensor([[-1.0, -2.0, -1.0]])
    bounded = kl_penalty(logprobs, ref, "k3", max_value=10.0)
    torch.testing.assert_close(bounded.detach(), torch.tensor([[10.0, math.exp(-1), 10.0]]))
    assert (gradient(bounded.sum(), logprobs) != 0).tolist() == [[False, True, False]]
    free = kl_penalty(logprobs, ref, "k3")
    assert float(free[0, 0].detach()) == pytest.approx(math.exp(4) - 5) and float(free[0, 2].detach()) == pytest.approx(
        math.exp(20)
    )
    assert gradient(free.sum(), logprobs)[0, 0] == pytest.approx(1 - math.exp(4))
    straight = kl_penalty(logprobs, ref, "k3+", max_value=10.0)  # the value is bounded, the gradient stays k2's
    assert (
        gradient(straight.sum(), logprobs).tolist() == [[-4.0, 1.0, -299.0]] and float(straight[0, 0].detach()) == 10.0
    )


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [*KINDS, "corrected", "full"])
def test_what_lies_under_the_mask_does_not_matter(kind: str, garbage: float) -> None:
    shape = (2, 3, 4) if kind == "full" else (2, 3)
    tensors = list(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    hidden = ~mask.bool()
    results = []
    for filler in (0.0, garbage):
        policy, ref, old = (x.masked_fill(hidden[(...,) + (None,) * (x.ndim - 2)], filler) for x in tensors)
        policy.requires_grad_(True)
        if kind == "corrected":
            kl = bias_corrected_kl(policy, ref, old, mask_BT=mask)
        else:
            kl = kl_penalty(policy, ref, kind, mask_BT=mask)
        results.append((kl.detach(), gradient(kl.sum(), policy)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not results[1][0][hidden].any() and not results[1][1][hidden].any() and results[1][0][~hidden].all()


def test_only_the_policy_gets_a_gradient() -> None:
    policy, ref, old = torch.randn(3, 2, 3, 4).requires_grad_(True).unbind(0)
    for x in (policy, ref, old):
        x.retain_grad()
    loss = full_kl(policy, ref).sum() + kl_penalty(policy[..., 0], ref[..., 0], "k3").sum()
    (loss + bias_corrected_kl(policy[..., 0], ref[..., 0], old[..., 0]).sum()).backward()
    assert policy.grad is not None and policy.grad.any()
    assert (ref.grad is None or not ref.grad.any()) and (old.grad is None or not old.grad.any())


def test_errors_name_the_argument_and_the_fix() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="kind = 'kl' is not a KL: use one of k1, abs, k2, k3"):
        kl_penalty(x, x, "kl")
    with pytest.raises(ValueError, match=r"\[B, T, V\]"):
        kl_penalty(x, x, "full")
    with pytest.raises(ValueError, match="policy's"):
        kl_penalty(x, x[:, :1], "k1")
    with pytest.raises(ValueError, match="max_value"):
        kl_penalty(x, x, "k2", max_value=1.0)
    with pytest.raises(ValueError, match='use "k1" or "k3"'):
        bias_corrected_kl(x, x, x, "k2")
    with pytest.raises(ValueError, match="target = 0"):
        AdaptiveKL(0.1, 0.0, 10)
    with pytest.raises(ValueError, match="horizon = 0"):
        AdaptiveKL(0.1, 1.0, 0)

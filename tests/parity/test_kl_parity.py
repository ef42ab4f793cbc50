"""KL estimators and controllers against verl's: values and gradients. TRL's KL is in test_loss_parity."""

from __future__ import annotations

import pytest
import torch

from rollover.algorithms.kl import AdaptiveKL, FixedKL, kl_penalty

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")

NAMES = {"k1": "kl", "abs": "abs", "k2": "mse", "k3": "low_var_kl"}


def both(kind: str, logprobs: torch.Tensor, ref: torch.Tensor, **options) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(value, gradient) of ours and of verl's."""
    results = []
    name = NAMES[kind.removesuffix("+")] + ("+" if kind.endswith("+") else "")
    for function in (lambda x: kl_penalty(x, ref, kind, **options), lambda x: core_algos.kl_penalty(x, ref, name)):
        x = logprobs.clone().requires_grad_(True)
        value = function(x)
        results.append((value.detach(), torch.autograd.grad(value.sum(), x)[0]))
    return results


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
@pytest.mark.parametrize("spread", [0.3, 1.5, 8.0])
@pytest.mark.parametrize("seed", range(4))
def test_estimators_are_verls(seed: int, spread: float, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(5, 9, generator=generator)
    ref = logprobs + spread * torch.randn(5, 9, generator=generator)
    options = {"max_value": 10.0} if kind.startswith("k3") else {}
    got, peer = both(kind, logprobs, ref, **options)
    torch.testing.assert_close(got[0], peer[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], peer[1], atol=1e-5, rtol=1e-5)


def test_deliberate_k3_is_not_bounded_by_10_unless_asked() -> None:
    """Where the reference gives a token 20 times the probability, verl's k3 has no gradient left."""
    got, peer = both("k3", torch.tensor([[-4.0]]), torch.tensor([[-1.0]]))
    assert float(got[0]) == pytest.approx(16.0855, abs=1e-3) and float(got[1]) == pytest.approx(-19.0855, abs=1e-3)
    assert float(peer[0]) == 10.0 and float(peer[1]) == 0.0


def test_deliberate_verl_has_no_full_kl() -> None:
    x = torch.randn(1, 2, 3)
    with pytest.raises(NotImplementedError):
        core_algos.kl_penalty(x, x, "full")
    assert kl_penalty(x, x, "full").shape == (1, 2)


@pytest.mark.parametrize("seed", range(4))
def test_controllers_are_verls(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours, fixed = AdaptiveKL(coef=0.2, target=0.1, horizon=1000), FixedKL(0.2)
    peer, fixed_peer = core_algos.AdaptiveKLController(0.2, 0.1, 1000), core_algos.FixedKLController(0.2)
    for kl in (0.25 * torch.rand(50, generator=generator)).tolist():
        ours, fixed = ours.update(kl, 64), fixed.update(kl, 64)
        peer.update(kl, 64)
        fixed_peer.update(kl, 64)
        assert ours.coef == pytest.approx(peer.value) and fixed.coef == fixed_peer.value
    assert ours.coef != 0.2

"""KL to a reference policy: estimates per token for the loss or the reward, the exact KL, and coefficients.

Shapes: B rows, T tokens, V vocabulary. KL(policy || reference), tokens drawn from the policy. Differentiable in the
policy's values alone; float32; pure functions. With `mask_BT`, masked positions are 0, whatever the inputs hold there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rollover.algorithms.token_batch import bounded, bounded_exp, masked


def _k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio


def _k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio**2


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    log_inverse = bounded(-log_ratio)
    return torch.exp(log_inverse) - log_inverse - 1


ESTIMATORS = {"k1": _k1, "abs": torch.abs, "k2": _k2, "k3": _k3}


def _inputs(
    policy: torch.Tensor, others: list[torch.Tensor], mask_BT: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Policy values (with gradient) and the others (without), float32 and 0 where masked."""
    for other in others:
        if other.shape != policy.shape:
            raise ValueError(
                f"ref or old log-probs are {list(other.shape)}: give them the policy's {list(policy.shape)}"
            )
    policy, others = policy.float(), [x.detach().float() for x in others]
    if mask_BT is None:
        return policy, others
    mask = mask_BT.bool()[(...,) + (None,) * (policy.ndim - mask_BT.ndim)]
    return masked(policy, mask), [masked(x, mask) for x in others]


def full_kl(
    logprobs_BTV: torch.Tensor, ref_logprobs_BTV: torch.Tensor, *, mask_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """Return sum over v of p_v (log p_v - log q_v) [B, T]: the exact KL and gradient. Takes logits as well.

    It needs both distributions, log-probs of sampled tokens do not suffice. p_v = 0 adds nothing; q_v = 0 < p_v is inf.
    verl names this kind but does not implement it.
    """
    logits_BTV, (ref_BTV,) = _inputs(logprobs_BTV, [ref_logprobs_BTV], mask_BT)
    logp_BTV, logq_BTV = logits_BTV.log_softmax(-1), ref_BTV.log_softmax(-1)
    possible_BTV = logp_BTV > -torch.inf
    # Both are replaced before the difference: inf - inf would leave NaN in the gradient.
    difference_BTV = torch.where(possible_BTV, logp_BTV, 0.0) - torch.where(possible_BTV, logq_BTV, 0.0)
    return (logp_BTV.exp() * difference_BTV).sum(-1)


def kl_penalty(
    logprobs_BT: torch.Tensor,
    ref_logprobs_BT: torch.Tensor,
    kind: str,
    *,
    mask_BT: torch.Tensor | None = None,
    max_value: float | None = None,
) -> torch.Tensor:
    """Estimate of KL(policy || reference) per token [B, T]; d = logprob - ref (http://joschu.net/blog/kl-approx.html).

    - "k1": d. Unbiased, may be negative. As a loss its expected gradient is 0: use it in the reward.
    - "abs": |d|. Not an estimate of the KL; a penalty.
    - "k2": d^2 / 2. Biased value; its expected gradient on tokens of the current policy is the KL's.
    - "k3": exp(-d) + d - 1. Unbiased, never negative. Its expected gradient is that of KL(reference || policy).
    - "k1+", "abs+", "k3+": value of the estimator, gradient of k2 (verl's straight-through variants).
    - "full": the exact KL; both arguments are log-distributions [B, T, V] then, see `full_kl`.

    `max_value` bounds k3 from above, with no gradient beyond: verl bounds it by 10, TRL does not. k3 bounds -d to +-20
    before exp (as verl; TRL does not). verl's names: kl = k1, mse = k2, low_var_kl = k3.
    """
    if kind == "full":
        if logprobs_BT.ndim != 3:
            raise ValueError('kind = "full" needs log-distributions: give logprobs_BT and ref_logprobs_BT as [B, T, V]')
        return full_kl(logprobs_BT, ref_logprobs_BT, mask_BT=mask_BT)
    name = kind.removesuffix("+")
    if name not in ESTIMATORS:
        raise ValueError(
            f'kind = {kind!r} is not a KL: use one of {", ".join(ESTIMATORS)}, one of them with "+", or full'
        )
    if max_value is not None and name != "k3":
        raise ValueError(f"max_value bounds k3 and k3+ only, not kind = {kind!r}: leave it out")
    policy_BT, (ref_BT,) = _inputs(logprobs_BT, [ref_logprobs_BT], mask_BT)
    log_ratio_BT = policy_BT - ref_BT
    value_BT = ESTIMATORS[name](log_ratio_BT)
    if max_value is not None:
        value_BT = value_BT.clamp(max=max_value)
    if kind.endswith("+"):
        backward_BT = _k2(log_ratio_BT)
        value_BT = value_BT.detach() + backward_BT - backward_BT.detach()
    return value_BT


def bias_corrected_kl(
    logprobs_BT: torch.Tensor,
    ref_logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    kind: str = "k3",
    *,
    mask_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return current / old * estimate per token [B, T]: an unbiased estimate of the KL and of its gradient.

    For tokens drawn from the old policy. DeepSeek-V3.2 (arXiv 2512.02556) with k3: the gradient of a token is then
    exactly current / old * (logprob - ref). TRL (use_bias_correction_kl, on by default) and Axolotl do the same with
    k3. On policy give logprobs_BT.detach() as old: with k3 the value is k3's, the gradient k2's. `kind`: "k1" or "k3";
    with others the gradient would not be the KL's. The ratio's log is bounded to +-20, in the peers it is not.
    """
    if kind not in ("k1", "k3"):
        raise ValueError(f'kind = {kind!r} has no bias-corrected form: use "k1" or "k3"')
    policy_BT, (ref_BT, old_BT) = _inputs(logprobs_BT, [ref_logprobs_BT, old_logprobs_BT], mask_BT)
    ratio_BT = bounded_exp(policy_BT - old_BT)
    return ratio_BT * ESTIMATORS[kind](policy_BT - ref_BT)


@dataclass(frozen=True)
class FixedKL:
    """A constant coefficient of the KL in the reward."""

    coef: float

    def update(self, kl: float, num_steps: int) -> FixedKL:
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that steers the KL to `target`: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_steps / horizon.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2; `horizon` is in the unit of `num_steps` (their code and verl
    count samples).
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target = {self.target} and horizon = {self.horizon} must be above 0")

    def update(self, kl: float, num_steps: int) -> AdaptiveKL:
        """Return the controller after `num_steps` more samples with mean KL `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * num_steps / self.horizon))

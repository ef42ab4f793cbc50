"""Policy losses: log-probs and advantages -> loss per token -> one number. Entropy and value terms.

Shapes: B rows, T tokens. Differentiable in the current policy's values alone; float32; pure functions. Masked positions
are 0, whatever the inputs hold there. A new policy loss is one function over `TokenBatch`, and one entry of `LOSSES` in
config/traits.py. A parameter `x_BT` is the stream "x" of the batch; a stream that no step computes yet is one entry of
`STREAMS` in trainer/streams.py.

`aggregate` divides by `denominator`, the global count of what its mode divides by: the sum over any micro-batches and
ranks is the loss of the whole.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from rollover.algorithms.token_batch import (
    LossAndClipped,
    TokenBatch,
    bounded,
    bounded_exp,
    masked,
    masked_mean,
    ratio_at,
)
from rollover.config.traits import LOSSES as TRAITS
from rollover.config.traits import Aggregation
from rollover.functions import CustomFunction, custom_function, described


def _outside(ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return where PPO's clip binds: only on the side on which it makes the objective smaller."""
    return ((ratio_BT < low) & (advantages_BT < 0)) | ((ratio_BT > high) & (advantages_BT > 0))


def _ppo(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossAndClipped:
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"dual_clip = {dual_clip} would bound on-policy tokens too: use a value above 1, e.g. 3")
        bounded_BT = torch.minimum(loss_BT, -dual_clip * advantages_BT)
        loss_BT = torch.where(advantages_BT < 0, bounded_BT, loss_BT)
    return loss_BT, _outside(ratio_BT, advantages_BT, 1 - clip_low, 1 + clip_high)


def clip(
    t: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> LossAndClipped:
    """Return PPO's clipped loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = current / old.

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; separate bounds as in DAPO (arXiv 2503.14476), eq. 10. `dual_clip` c
    bounds the loss of a negative advantage by -c A (Ye et al. 2020, arXiv 1912.09729, eq. 5); verl has it always on
    with c = 3; TRL's `delta` is the same for delta > 1 + clip_high.
    """
    return _ppo(t.ratio_BT, t.advantages_BT, clip_low, clip_high, dual_clip)


def gspo(t: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossAndClipped:
    """PPO's clip of the sequence ratio s = exp(mean over the row's tokens of log r). Aggregate: seq-mean-token-mean.

    Zheng et al. 2025 (arXiv 2507.18071). This is the paper's GSPO-token (as in verl): each token holds the value of s
    and passes the gradient of its own log-prob. With one advantage per row it is GSPO, value and gradient; TRL lets s
    itself pass the gradient, which differs only where advantages differ within a row. The paper's bounds are far
    smaller than the defaults: clip_low = 3e-4, clip_high = 4e-4.
    """
    return _ppo(ratio_at(t, "sequence"), t.advantages_BT, clip_low, clip_high, None)


def luspo(t: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossAndClipped:
    """GSPO's loss of a sequence times its length (arXiv 2602.05261). Aggregate: seq-mean-token-sum.

    The length comes from that aggregation, which adds up the sequence's loss once per token; the loss per token is
    GSPO's. (With seq-mean-token-mean it would be GSPO again.)
    """
    return gspo(t, clip_low=clip_low, clip_high=clip_high)


def gmpo(t: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossAndClipped:
    """Return -A times the geometric mean over the row of the clipped ratios. Aggregate: seq-mean-token-mean.

    Zhao et al. 2025 (arXiv 2507.20673). The clip acts on log r, one-sided as PPO's: log r is bounded above by clip_high
    where A > 0 and below by -clip_low where A < 0; the paper's bounds are 0.4. Every token of a row holds the loss of
    the row; with advantages per token the row's A is their mean, as in verl (geo_mean). Both peers average over all
    rows; our aggregation leaves out rows without loss tokens.
    """
    positive_BT = t.advantages_BT > 0
    upper_BT = torch.where(positive_BT, clip_high, math.inf)
    lower_BT = torch.where(t.advantages_BT < 0, -clip_low, -math.inf)
    clipped_BT = t.log_ratio_BT.clamp(lower_BT, upper_BT)
    ratio_B1 = bounded_exp(masked_mean(clipped_BT, t.mask_BT))
    loss_BT = (-ratio_B1 * masked_mean(t.advantages_BT, t.mask_BT)).expand_as(t.logprobs_BT)
    return loss_BT, (t.log_ratio_BT < lower_BT) | (t.log_ratio_BT > upper_BT)


def cispo(
    t: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2, level: Literal["token", "sequence"] = "token"
) -> LossAndClipped:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] * A * logprob: the weight is clipped, no token loses its gradient.

    MiniMax-M1 (arXiv 2506.13585), section 3.1, which sets no lower bound (clip_low = 1). As verl. TRL has no lower
    bound either, and its epsilon_high is the bound itself: clip_high = epsilon_high - 1. `level` "sequence": the ratio
    of `gspo` in the place of the token's (TRL's importance_sampling_level).
    """
    ratio_BT = ratio_at(t, level).detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -weight_BT * t.advantages_BT * t.logprobs_BT, weight_BT != ratio_BT


def _covariance(t: TokenBatch) -> torch.Tensor:
    """Return (A - mean A)(logprob - mean logprob) [B, T], means over all tokens of the call."""
    count = t.mask_BT.sum().clamp(min=1)
    logprobs_BT = t.logprobs_BT.detach()
    return (t.advantages_BT - t.advantages_BT.sum() / count) * (logprobs_BT - logprobs_BT.sum() / count)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share = {share} is not a share of the tokens: use a value above 0 and up to 1")


def clip_cov(
    t: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
) -> LossAndClipped:
    """`clip`, and a random `share` of all tokens, drawn from those of high covariance, adds neither loss nor gradient.

    Cui et al. 2025 (arXiv 2505.22617), Clip-Cov. Candidates: cov_low < covariance < cov_high and not already clipped;
    at least one is dropped if there is any. `generator` (on the CPU) makes the draw repeatable. Not split-invariant:
    means, counts and the draw are over the tokens of this call.
    """
    _check_share(share)
    loss_BT, clipped_BT = _ppo(t.ratio_BT, t.advantages_BT, clip_low, clip_high, None)
    cov_BT = _covariance(t)
    candidates_K2 = ((cov_BT > cov_low) & (cov_BT < cov_high) & t.mask_BT & ~clipped_BT).nonzero()
    count = max(1, int(share * float(t.mask_BT.sum())))
    chosen_K2 = candidates_K2[torch.randperm(len(candidates_K2), generator=generator)[:count].to(cov_BT.device)]
    dropped_BT = torch.zeros_like(t.mask_BT)
    dropped_BT[chosen_K2[:, 0], chosen_K2[:, 1]] = True
    return torch.where(dropped_BT, 0.0, loss_BT), clipped_BT | dropped_BT


def kl_cov(t: TokenBatch, *, share: float = 0.0002, kl_coef: float = 1.0) -> LossAndClipped:
    """-r A, and the `share` of tokens of highest covariance pays kl_coef * |log r| on top. No clip.

    Cui et al. 2025 (arXiv 2505.22617), KL-Cov; |log r| as in the authors' code and verl (whose config sets kl_coef 0.1,
    its function 1). At least one token pays. It counts as clipped. Not split-invariant: means and ranks are over the
    tokens of this call.
    """
    _check_share(share)
    cov_K = _covariance(t)[t.mask_BT]
    count = min(len(cov_K), max(1, int(share * len(cov_K))))
    paying_K2 = t.mask_BT.nonzero()[cov_K.topk(count).indices]
    paying_BT = torch.zeros_like(t.mask_BT)
    paying_BT[paying_K2[:, 0], paying_K2[:, 1]] = True
    loss_BT = -t.ratio_BT * t.advantages_BT
    return loss_BT + torch.where(paying_BT, kl_coef * t.log_ratio_BT.abs(), 0.0), paying_BT


def _dppo(t: TokenBatch, blocked_BT: torch.Tensor, ratio_cap: float) -> LossAndClipped:
    weight_BT = t.ratio_BT.detach().clamp(max=ratio_cap).masked_fill(blocked_BT, 0.0)
    return -weight_BT * t.advantages_BT * t.logprobs_BT, blocked_BT


def dppo_tv(t: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_cap: float = 20.0) -> LossAndClipped:
    """-sg[min(r, ratio_cap)] * A * logprob, but 0 where the token's probability p moved too far in A's direction.

    Qi et al. 2026 (arXiv 2602.04879), DPPO-Binary-TV: blocked where A > 0 and p - p_old > clip_high, else where
    p_old - p > clip_low. The bounds are on probabilities, not ratios. verl reads ratio_cap from its dual clip's
    setting, 3 by default.
    """
    moved_BT = t.logprobs_BT.detach().exp() - t.old_logprobs_BT.exp()
    return _dppo(t, torch.where(t.advantages_BT > 0, moved_BT > clip_high, moved_BT < -clip_low), ratio_cap)


def dppo_kl(t: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_cap: float = 20.0) -> LossAndClipped:
    """Return the loss of `dppo_tv`, bounded by the KL of old and current policy between this token and all others.

    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)); blocked where it exceeds clip_high (A > 0) or
    clip_low (else) and p moved in A's direction. Qi et al. 2026 (arXiv 2602.04879), DPPO-Binary-KL.
    """
    eps = 1e-8  # p = 1 in float32 is common; verl's value
    logprobs_BT = t.logprobs_BT.detach()
    p_BT, old_BT = logprobs_BT.exp(), t.old_logprobs_BT.exp()
    rest_BT = (1 - old_BT) * torch.log((1 - old_BT + eps) / (1 - p_BT + eps))
    kl_BT = old_BT * (t.old_logprobs_BT - logprobs_BT) + rest_BT
    up_BT = (kl_BT > clip_high) & (p_BT > old_BT)
    down_BT = (kl_BT > clip_low) & (p_BT < old_BT)
    return _dppo(t, torch.where(t.advantages_BT > 0, up_BT, down_BT), ratio_cap)


def decoupled(
    t: TokenBatch,
    *,
    behavior_logprobs_BT: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weight_cap: float | None = None,
) -> LossAndClipped:
    """`clip` of current / old times the constant weight min(old / behavior, weight_cap); old is the proximal policy.

    Hilton et al. 2022 (arXiv 2110.00641); AReaL (arXiv 2505.24298). With old = behavior it is `clip`; with old =
    current its gradient is that of REINFORCE with truncated importance weights. The same as `clip` times
    `correction.importance_weights(mode="token_truncate")`.
    """
    loss_BT, clipped_BT = _ppo(t.ratio_BT, t.advantages_BT, clip_low, clip_high, dual_clip)
    weight_BT = bounded_exp(t.old_logprobs_BT - behavior_logprobs_BT)
    if weight_cap is not None:
        weight_BT = weight_BT.clamp(max=weight_cap)
    return weight_BT * loss_BT, clipped_BT


def reinforce(t: TokenBatch) -> LossAndClipped:
    """-logprob * A (Williams 1992). verl: gpg."""
    return -t.logprobs_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)


def nll(t: TokenBatch) -> LossAndClipped:
    """-logprob: the negative log-likelihood of examples (`rollover sft`). Advantages have no part in it.

    With the aggregation token-mean it is the loss that transformers computes of labels, and TRL's SFTTrainer.
    """
    return -t.logprobs_BT, torch.zeros_like(t.mask_BT)


def importance_sampling(t: TokenBatch) -> LossAndClipped:
    """-r A, r = current / old, without any bound: the surrogate of Kakade and Langford 2002 and of TRPO.

    Schulman et al. 2015 (arXiv 1502.05477), eq. 14. Its gradient is that of `reinforce` with the weight r: unbiased on
    the tokens of the old policy, with a variance that only the correction's cap bounds. verl's kl_cov without its
    penalty; the loss "importance_sampling" of Tinker.
    """
    return -t.ratio_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)


def dro(t: TokenBatch, *, beta: float = 1.0) -> LossAndClipped:
    """Return -(A logprob - beta / 2 (log r)^2): a quadratic penalty on the log-ratio in place of weight and clip.

    Direct Reward Optimisation, Richemond et al. 2024 (arXiv 2405.19107), with an advantage in the place of reward minus
    value; as verl's, which has no default for beta. The penalty pulls a token of advantage 0 back, too. Its exponents
    are log-ratios themselves: nothing is bounded.
    """
    if not beta > 0:
        raise ValueError(f"beta = {beta}: the weight of the penalty must be above 0")
    loss_BT = -(t.logprobs_BT * t.advantages_BT - 0.5 * beta * t.log_ratio_BT.square())
    return loss_BT, torch.zeros_like(t.mask_BT)


def sapo(
    t: TokenBatch,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: Literal["token", "sequence"] = "token",
) -> LossAndClipped:
    """Return -A * 4 / tau * sigmoid(tau (r - 1)): a smooth gate instead of a clip. Aggregate: seq-mean-token-mean.

    Gao et al. 2025 (arXiv 2511.20347). tau is tau_positive where A > 0, else tau_negative. At r = 1 the gradient is
    REINFORCE's. `level` "sequence": the ratio of `gspo` in the place of the token's. Nothing counts as clipped.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError("tau_positive and tau_negative must be above 0 (the paper: 1.0 and 1.05)")
    tau_BT = torch.where(t.advantages_BT > 0, tau_positive, tau_negative)
    gate_BT = torch.sigmoid(tau_BT * (ratio_at(t, level) - 1)) * 4 / tau_BT
    return -gate_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)


# Log of a weight of 0, as in TRL and the authors' code.
_LOG_ZERO = math.log(1e-8)


def vespo(
    t: TokenBatch,
    *,
    behavior_logprobs_BT: torch.Tensor,
    weight_cap: float | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> LossAndClipped:
    """-sg[phi(w)] A logprob, phi(w) = exp(lambda (1 - w)) w^k: a soft weight of the sequence, 1 where w = 1.

    arXiv 2602.10693, as TRL's. w is the product over the row's tokens of current / behavior: that of current / old
    times min(old / behavior, weight_cap), each log bounded to [log 1e-8, 20] (old / behavior) or +-20, and their sum
    again. k, lambda: the positive ones where A >= 0. phi rises as w^k from 0 to its peak at w = k / lambda and falls
    exponentially beyond: sequences far from the behavior policy on either side fade out. Aggregate: token-mean.
    """
    if min(k_positive, lambda_positive, k_negative, lambda_negative) <= 0:
        raise ValueError("k_positive, lambda_positive, k_negative and lambda_negative must be above 0 (2, 3, 3 and 2)")
    with torch.no_grad():
        correction_BT = masked(bounded(t.old_logprobs_BT - behavior_logprobs_BT.float()), t.mask_BT)
        if weight_cap is not None:
            correction_BT = correction_BT.clamp(max=math.log(weight_cap))
        log_w_BT = bounded(t.log_ratio_BT) + correction_BT.clamp(min=_LOG_ZERO)
        log_w_B1 = masked(log_w_BT, t.mask_BT).sum(-1, keepdim=True).clamp(_LOG_ZERO, 20.0)
        rises_BT = t.advantages_BT >= 0
        k_BT = torch.where(rises_BT, k_positive, k_negative)
        lambda_BT = torch.where(rises_BT, lambda_positive, lambda_negative)
        weight_BT = torch.exp(lambda_BT + k_BT * log_w_B1 - lambda_BT * log_w_B1.exp())
    return -weight_BT * t.advantages_BT * t.logprobs_BT, torch.zeros_like(t.mask_BT)


# Each name in the configuration is that of a function of this file.
LOSSES: dict[str, Callable[..., LossAndClipped]] = {name: globals()[name] for name in TRAITS}
# Kinds whose loss of a token depends on the other rows of the call, and so on the split into micro-batches.
NOT_SPLIT_INVARIANT = frozenset({"clip_cov", "kl_cov"})


def loss_function(kind: str | Callable[..., LossAndClipped]) -> Callable[..., LossAndClipped]:
    """Return the function of that name in `LOSSES`; a function is returned as it is."""
    if callable(kind):
        return kind
    if kind not in LOSSES:
        raise ValueError(f"kind = {kind!r} is not a policy loss: use one of {', '.join(LOSSES)}")
    return LOSSES[kind]


_LOSS_RETURNS = (
    "two tensors of the shape of t.mask_BT: the loss of each token, finite and differentiable in t.logprobs_BT, and a"
    " bool that says where the gradient was clipped"
)


class CustomLoss:
    """A custom policy loss (algorithm.loss), called like the functions of `LOSSES`, and checked at every call.

    FunctionError if it raises, changes an input tensor, or returns anything but `_LOSS_RETURNS`.
    """

    def __init__(self, spec: str) -> None:
        self._function: CustomFunction = custom_function("algorithm.loss", spec, _LOSS_RETURNS)
        functools.update_wrapper(self, self._function, updated=())

    def __call__(self, t: TokenBatch, **options: Any) -> LossAndClipped:
        given = {**{f"{name}_BT": values for name, values in t.streams.items()}, "mask_BT": t.mask_BT, **options}
        before = _tensor_versions(given)
        value = self._function(t, **options)
        if changed := [name for name, version in _tensor_versions(given).items() if version != before[name]]:
            raise self._function.changed(changed)
        wrong = _defect(value, t)
        if wrong is not None:
            raise self._function.refused(wrong)
        return value[0], value[1].bool()


def _tensor_versions(given: Mapping[str, Any]) -> dict[str, int]:
    """Return how often each tensor was changed in place, as autograd counts it."""
    return {name: value._version for name, value in given.items() if isinstance(value, torch.Tensor)}


def _defect(value: Any, t: TokenBatch) -> str | None:
    """Describe what is wrong with the returned value of a custom loss; None: nothing."""
    if not isinstance(value, tuple | list):
        return described(value)
    if len(value) != 2 or not all(isinstance(part, torch.Tensor) for part in value):
        return f"{len(value)} values: {', '.join(map(described, value))}"
    for name, part in zip(("a loss", "the clipped tokens"), value, strict=True):
        if part.shape != t.mask_BT.shape:
            return f"{name} of the shape {list(part.shape)}, where t.mask_BT is {list(t.mask_BT.shape)}"
    loss_M = value[0].detach()[t.mask_BT]
    # If the model's log-probs are not finite, the loss is not at fault.
    if not torch.isfinite(loss_M).all() and torch.isfinite(t.logprobs_BT[t.mask_BT]).all():
        bad_M = loss_M[~torch.isfinite(loss_M)]
        return f"a loss that is {bad_M[0]:g} at {len(bad_M)} of {len(loss_M)} tokens"
    if t.logprobs_BT.requires_grad and not value[0].requires_grad:
        return "a loss without a gradient (something detached it)"
    return None


def option_parameters(function: Callable[..., LossAndClipped]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a loss after the batch: options and streams."""
    parameters = list(inspect.signature(function).parameters.items())[1:]
    return {name: p for name, p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def declared_streams(function: Callable[..., LossAndClipped]) -> dict[str, bool]:
    """Return the streams that a loss takes, by its parameters `<stream>_BT`, and whether it needs each.

    A parameter with a default gets the stream if the run has it."""
    named = {n.removesuffix("_BT"): p for n, p in option_parameters(function).items() if n.endswith("_BT")}
    return {name: parameter.default is parameter.empty for name, parameter in named.items()}


def _options(
    function: Callable[..., LossAndClipped], clip_low: float, clip_high: float, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of a loss. Clip bounds always have a value; not every loss reads them."""
    kind = getattr(function, "__name__", type(function).__name__)
    parameters = option_parameters(function)
    names = ", ".join(parameters)
    if unknown := next((name for name in given if name not in parameters), None):
        raise ValueError(f"{unknown} is not an option of the policy loss {kind!r}: its options are {names or 'none'}")
    options = {n: bound for n, bound in (("clip_low", clip_low), ("clip_high", clip_high)) if n in parameters} | given
    if lacks := next((n for n, p in parameters.items() if p.default is p.empty and n not in options), None):
        raise ValueError(f"the policy loss {kind!r} needs the option {lacks}")
    return options


def policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    kind: str | Callable[..., LossAndClipped],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **kind_options: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss per token [B, T] and metrics as sums and counts, which add up over micro-batches ("max/..." by maximum).

    `kind`: a key of `LOSSES`, or a function like those; each states its formula, its source, and the aggregation of the
    paper. `kind_options` are that function's keyword arguments, streams included. `advantages_BT` may be [B] or [B, T].
    """
    if advantages_BT.shape == logprobs_BT.shape[:1]:
        advantages_BT = advantages_BT[:, None].expand_as(logprobs_BT)
    streams = {name: kind_options.pop(name) for name in list(kind_options) if name.endswith("_BT")}
    batch = TokenBatch.of(
        mask_BT,
        logprobs=logprobs_BT,
        old_logprobs=old_logprobs_BT,
        advantages=advantages_BT,
        **{name.removesuffix("_BT"): values for name, values in streams.items()},
    )
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return batch_loss(batch, kind=kind, **options, **kind_options)


def batch_loss(
    batch: TokenBatch,
    *,
    kind: str | Callable[..., LossAndClipped],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **kind_options: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy loss of a batch, as `policy_loss`. The function gets the streams that it declares.

    Ratios in the metrics are per token, current / old, for every kind; log-ratios are bounded to +-20 before exp."""
    if dual_clip is not None:
        kind_options["dual_clip"] = dual_clip
    function, mask_BT = loss_function(kind), batch.mask_BT
    given = {f"{name}_BT": batch.stream(name) for name in declared_streams(function) if name in batch.streams}
    loss_BT, clipped_BT = function(batch, **_options(function, clip_low, clip_high, given | kind_options))
    with torch.no_grad():
        ratio_BT = torch.where(mask_BT, batch.ratio_BT, 0.0)
        metrics = {
            "count/tokens": mask_BT.sum().float(),
            "sum/ratio": ratio_BT.sum(),
            "max/ratio": ratio_BT.max() if ratio_BT.numel() else ratio_BT.sum(),
            "sum/clipped": (clipped_BT & mask_BT).sum().float(),
        }
    return torch.where(mask_BT, loss_BT, 0.0), metrics


def entropy_bonus(entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, coef: float) -> torch.Tensor:
    """-coef * entropy per token [B, T], to be added to a policy loss. Differentiable in `entropy_BT`.

    Mnih et al. 2016 (arXiv 1602.01783), section 4. Added per token it is averaged as the policy loss is (verl); TRL
    takes the token mean of each micro-batch, whatever the loss type.
    """
    return torch.where(mask_BT.bool(), -coef * entropy_BT.float(), 0.0)


@torch.no_grad()
def high_entropy_mask(entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, share: float = 0.2) -> torch.Tensor:
    """Return a mask [B, T] (bool) of the `share` of tokens of highest entropy. Tokens at the bound stay in.

    Wang et al. 2025 (arXiv 2506.01939), the 80/20 rule. The bound is the (1 - share) quantile over the tokens of this
    call, as in TRL (top_entropy_quantile = share): call it before splitting into micro-batches.
    """
    _check_share(share)
    mask_BT = mask_BT.bool()
    sorted_M = entropy_BT.float()[mask_BT].sort().values
    if not len(sorted_M):
        return mask_BT
    # The smallest value at or above the quantile; the slack absorbs the rounding of 1 - share.
    bound = sorted_M[math.ceil((len(sorted_M) - 1) * (1 - share) - 1e-6)]
    return mask_BT & (entropy_BT.float() >= bound)


def value_loss(
    values_BT: torch.Tensor,
    old_values_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip: float | None = 0.2,
) -> torch.Tensor:
    """0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) per token [B, T]. Differentiable in `values_BT`.

    The clipped value loss of PPO's code, see Engstrom et al. 2020 (arXiv 2005.12729), section 3; as TRL and verl.
    `clip` None: the plain squared error.
    """
    mask_BT = mask_BT.bool()
    values_BT = masked(values_BT, mask_BT)
    old_BT, returns_BT = (masked(x.detach(), mask_BT) for x in (old_values_BT, returns_BT))
    loss_BT = (values_BT - returns_BT) ** 2
    if clip is not None:
        clipped_BT = values_BT.clamp(old_BT - clip, old_BT + clip)
        loss_BT = torch.maximum(loss_BT, (clipped_BT - returns_BT) ** 2)
    return 0.5 * loss_BT


# The number that each mode divides the sum over rows by: of those with a loss token. None: no division.
DENOMINATORS: dict[Aggregation, Literal["tokens", "sequences", "groups"] | None] = {
    "token-mean": "tokens",
    "token-sum": None,
    "seq-mean-token-sum": "sequences",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum-norm": "sequences",
    "prompt-mean": "groups",
}


def aggregate(  # noqa: PLR0913 - one count for each mode
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: Aggregation,
    *,
    denominator: float | None = None,
    group_B: torch.Tensor | None = None,
    group_tokens_B: torch.Tensor | None = None,
    sequence_tokens_B: torch.Tensor | None = None,
    norm: float | None = None,
) -> torch.Tensor:
    """Scalar loss. Without `denominator` this batch is all there is. A row without a loss token is no sequence.

    A sequence is a trajectory, which may have several rows: one that the agent did not cut into contexts, and the same
    tokens in several rows, have one loss. `sequence_tokens_B`: loss tokens of the row's whole sequence, and then
    `denominator` is the number of sequences; None: a row is a sequence.

    - token-mean: sum of tokens / tokens (DAPO, arXiv 2503.14476, eq. 8, taken over the batch instead of each prompt's
      group, as in verl and TRL's dapo). denominator: tokens.
    - token-sum: sum of tokens; no denominator.
    - seq-mean-token-sum: mean over sequences of their token sums. denominator: sequences.
    - seq-mean-token-mean: mean over sequences of their token means (GRPO, arXiv 2402.03300, eq. 3).
      denominator: sequences.
    - seq-mean-token-sum-norm: seq-mean-token-sum divided by the constant `norm` (Dr. GRPO, arXiv 2503.20783: no
      division by the sequence's own length; norm is the token limit). denominator: sequences. The default norm, T as
      in verl, changes with padding: give it. TRL's dr_grpo divides by rows * max_completion_length, the same but for
      rows without loss tokens, which TRL counts (as its grpo does in the mean).
    - prompt-mean: mean over groups of their token means: eq. 8 of DAPO to the letter, the expectation over prompts.
      `group_B`: group of each row; `group_tokens_B`: loss tokens of the row's whole group (needed where a group is
      split). denominator: groups.
    """
    if mask_BT.shape != loss_BT.shape:
        raise ValueError(f"mask_BT is {list(mask_BT.shape)}: give it the shape of loss_BT, {list(loss_BT.shape)}")
    if mode not in DENOMINATORS:
        raise ValueError(f"mode = {mode!r} is not an aggregation: use one of {', '.join(DENOMINATORS)}")
    mask_BT = mask_BT.bool()
    loss_BT = masked(loss_BT, mask_BT)
    tokens_B = mask_BT.sum(-1)
    if mode in ("token-mean", "token-sum"):
        total = loss_BT.sum()
    elif mode == "prompt-mean":
        if group_B is None:
            raise ValueError("prompt-mean needs group_B: the group id of each row")
        total = (loss_BT.sum(-1) / _group_tokens(tokens_B, group_B, group_tokens_B).clamp(min=1)).sum()
    elif mode == "seq-mean-token-mean":
        total = (loss_BT.sum(-1) / (tokens_B if sequence_tokens_B is None else sequence_tokens_B).clamp(min=1)).sum()
    elif mode == "seq-mean-token-sum-norm":
        total = (loss_BT.sum(-1) / (loss_BT.shape[1] if norm is None else norm)).sum()
    else:
        total = loss_BT.sum(-1).sum()
    counted = DENOMINATORS[mode]
    if counted is None:
        return total
    # Count only if no denominator is given: on a GPU counting waits for the whole forward pass.
    return total / max(1.0, _num_in_loss(counted, tokens_B, group_B) if denominator is None else denominator)


def _num_in_loss(what: str, tokens_B: torch.Tensor, group_B: torch.Tensor | None) -> float:
    """Return how many tokens, sequences or groups of this batch are in the loss."""
    if what == "tokens":
        return float(tokens_B.sum())
    in_loss_B = tokens_B > 0
    return float(in_loss_B.sum() if what == "sequences" or group_B is None else len(torch.unique(group_B[in_loss_B])))


def _group_tokens(tokens_B: torch.Tensor, group_B: torch.Tensor, given_B: torch.Tensor | None) -> torch.Tensor:
    """Return the loss tokens of each row's group [B]: as given, else those of the rows of this batch."""
    if given_B is not None:
        return given_B
    ids, index_B = torch.unique(group_B, return_inverse=True)
    return torch.zeros(len(ids), device=tokens_B.device).index_add_(0, index_B, tokens_B.float())[index_B]

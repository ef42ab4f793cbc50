"""Off-policy correction: importance weights and masks between the policy that sampled a token and the proximal one.

Shapes: B rows, T tokens. Log-probs [B, T], mask [B, T] (bool or 0/1). A row with a loss token is a sequence. Weights
and masks come back as [B, T], are constants (detached) and exactly 0 at masked positions, whatever those hold.
d = log proximal - log behavior of a token; every exponent is bounded to +-20. A NaN at a loss position lies outside
every bound: a mask drops it, and a truncated weight is NaN (in TRL it is 1).

`mismatch_metrics` and `mismatch_summary` are the diagnostics of these ratios and weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from rollover.algorithms.token_batch import MAX_LOG_RATIO, bounded, bounded_exp, masked

CorrectionMode = Literal[
    "token_truncate",
    "token_mask",
    "icepop",
    "segment_truncate",
    "segment_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
]
RejectionKind = Literal["k1", "k2", "k3"]
RejectionLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]

# Mode: what a ratio is taken over, and what happens to a ratio outside the bounds.
MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "icepop": ("token", "mask"),
    "segment_truncate": ("segment", "truncate"),
    "segment_mask": ("segment", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
    "geometric_mask": ("geometric", "keep"),
}
_TWO_SIDED = ("icepop", "geometric_mask")


def row_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over the loss tokens of each row [B]; 0 for a row without one."""
    return masked(values_BT, mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)


def _segment_sums(values_BT: torch.Tensor, versions_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Each loss token gets the sum over the loss tokens of its row that have its version [B, T]."""
    if not mask_BT.any():
        return torch.zeros_like(values_BT)
    keys_2M = torch.stack([mask_BT.nonzero(as_tuple=True)[0], versions_BT[mask_BT].long()])
    segments_2S, index_M = torch.unique(keys_2M, dim=1, return_inverse=True)
    sums_S = torch.zeros(segments_2S.shape[1], device=values_BT.device).index_add_(0, index_M, values_BT[mask_BT])
    return torch.zeros_like(values_BT).masked_scatter_(mask_BT, sums_S[index_M])


def log_ratios(
    proximal_logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    level: str,
    versions_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log of the ratio that weights a token at `level` [B, T], before any bound."""
    d_BT = masked(proximal_logprobs_BT.float() - behavior_logprobs_BT.float(), mask_BT)
    if level == "token":
        return d_BT
    if level == "segment":
        if versions_BT is None:
            raise ValueError("versions_BT is missing: a segment mode needs the policy version of every token, [B, T]")
        if versions_BT.shape != mask_BT.shape:
            raise ValueError(f"versions_BT has shape {tuple(versions_BT.shape)}: give it the mask's, [B, T]")
        return _segment_sums(d_BT, versions_BT, mask_BT)
    sum_B1 = d_BT.sum(-1, keepdim=True)
    if level == "geometric":
        sum_B1 = sum_B1 / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return sum_B1.expand_as(d_BT)


def checked_floor(mode: str, cap: float, floor: float | None) -> float | None:
    """Return the floor that `mode` applies (None: none), after the check of mode, cap and floor."""
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r} is not a correction: use one of {', '.join(MODES)}")
    if not cap > 0:
        raise ValueError(f"cap = {cap}: the largest weight must be positive")
    if floor is None and mode in _TWO_SIDED:
        floor = 1 / cap
    if floor is not None and not 0 <= floor <= cap:
        raise ValueError(f"floor = {floor} must lie between 0 and cap = {cap} (the default of {mode} may be 1 / cap)")
    return floor


@torch.no_grad()
def importance_weights(
    proximal_logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    mode: CorrectionMode,
    cap: float,
    floor: float | None = None,
    versions_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return w = exp(sum of d over the token, its segment or its sequence), bounded by `cap` and `floor` -> [B, T].

    - token_truncate, token_mask: w of the token alone. Decoupled PPO (Hilton et al. 2022, arXiv 2110.00641);
      truncation: Ionides 2008, "Truncated Importance Sampling".
    - icepop: token_mask whose floor is 1 / cap where none is given (Ring-1T, arXiv 2510.18855: outside [alpha, beta]
      the token gives no gradient). verl writes it as rollout_is_threshold = "floor_cap".
    - segment_truncate, segment_mask: product over the loss tokens that the row has of the token's policy version
      (`versions_BT` [B, T], integers). One version: as sequence; a version per token: as token. No peer has it.
    - sequence_truncate, sequence_mask: product over the sequence, the same weight at all its tokens.
    - geometric_mask: weight 1 where the geometric mean exp(mean d) lies in [floor, cap], else 0; floor 1 / cap where
      none is given. It is a trust region per token, not a ratio of two distributions, so it selects and does not weigh
      (verl's Geo-RS; Liu, Li et al. 2025, "When Speed Kills Stability", part 3). Multiply by another mode's weights to
      have both.

    "truncate" clamps w into [floor, cap], without `floor` only from above (as verl and TRL do; Axolotl always floors at
    1 / cap). "mask" sets w outside [floor, cap] to exactly 0 (Axolotl's floor turns such a 0 into 1 / cap).
    """
    mask_BT = mask_BT.bool()
    floor = checked_floor(mode, cap, floor)
    level, action = MODES[mode]
    weights_BT = bounded_exp(log_ratios(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level, versions_BT))
    if action == "truncate":
        return masked(weights_BT.clamp(min=floor, max=cap), mask_BT)
    inside_BT = (weights_BT >= (floor or 0.0)) & (weights_BT <= cap)
    if action == "keep":
        return (inside_BT & mask_BT).float()
    return masked(weights_BT, inside_BT & mask_BT)


@torch.no_grad()
def rejection_mask(
    proximal_logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    kind: RejectionKind,
    level: RejectionLevel,
    high: float,
    low: float | None = None,
) -> torch.Tensor:
    """Loss tokens to keep, bool [B, T]: those whose estimate of KL(behavior || proximal) is at most `high` nats.

    Per token k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (Schulman 2020, "Approximating KL Divergence"), d bounded to
    +-20. level "token": each token alone; "sequence_sum", "sequence_mean": the whole sequence, by the sum or mean over
    its loss tokens; "sequence_max": the whole sequence if each of its tokens passes (trust region masking, Li et al.
    2025, arXiv 2512.23075).

    k1 may be negative: it has to lie in [low, high], low = -high where none is given. verl gives bounds of k1 as ratios
    behavior / proximal, "exp(low)_exp(high)", and has no sequence_max of k1. k2 and k3 are never negative: no `low`.
    """
    mask_BT = mask_BT.bool()
    d_BT = log_ratios(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, "token")
    d_BT = bounded(d_BT)
    if kind == "k1":
        estimate_BT = -d_BT
        low = -high if low is None else low
    elif kind in ("k2", "k3"):
        if low is not None:
            raise ValueError(f"low = {low} with kind = {kind!r}: the estimate is never negative, leave low out")
        estimate_BT = d_BT**2 / 2 if kind == "k2" else torch.expm1(d_BT) - d_BT
        # Rounding may give -1e-8.
        low = -float("inf")
    else:
        raise ValueError(f'kind = {kind!r} is not an estimate: use "k1", "k2" or "k3"')
    if not low <= high:
        raise ValueError(f"high = {high} is below low = {low}: nothing would be kept")
    if level == "sequence_sum":
        estimate_BT = estimate_BT.sum(-1, keepdim=True)
    elif level == "sequence_mean":
        estimate_BT = row_mean(estimate_BT, mask_BT)[:, None]
    elif level not in ("token", "sequence_max"):
        raise ValueError(f'level = {level!r}: use "token", "sequence_sum", "sequence_mean" or "sequence_max"')
    keep_BT = (estimate_BT >= low) & (estimate_BT <= high)
    if level == "sequence_max":
        keep_BT = (keep_BT | ~mask_BT).all(-1, keepdim=True)
    return keep_BT & mask_BT


@torch.no_grad()
def off_policy_sequence_mask(
    advantages: torch.Tensor,
    logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    threshold: float,
) -> torch.Tensor:
    """Loss tokens to keep, bool [B, T]: A >= 0, or mean over the sequence of (behavior - current) <= `threshold`.

    DeepSeek-V3.2 (arXiv 2512.02556), eq. 9: a sequence far from the current policy is dropped where it would be pushed
    down. `advantages` [B], or [B, T], then decided per token as the equation writes it. TRL's off_policy_mask_threshold
    gives [B, 1]. No gradient flows through it: `logprobs_BT` may be detached.
    """
    mask_BT = mask_BT.bool()
    distance_B = row_mean(behavior_logprobs_BT.float() - logprobs_BT.float(), mask_BT)
    advantages_BX = advantages[:, None] if advantages.ndim == 1 else advantages
    return ((advantages_BX >= 0) | (distance_B <= threshold)[:, None]) & mask_BT


def geometric_row_mean(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """exp(mean over the row's tokens of log(w + 1e-10)), at all of them [B, T]; 0 where masked.

    The weight of a row from those of its tokens, for a loss that belongs to the row as a whole (GMPO): as verl does. A
    token of weight 0 makes the row's small, not 0.
    """
    mask_BT = mask_BT.bool()
    logs_BT = masked(torch.log(weights_BT.float() + 1e-10), mask_BT)
    mean_B1 = logs_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return masked(mean_B1.exp(), mask_BT)


@torch.no_grad()
def effective_sample_size(
    weights_BT: torch.Tensor, mask_BT: torch.Tensor, *, level: Literal["token", "sequence"]
) -> torch.Tensor:
    """(sum w)^2 / (n * sum w^2), a share in [0, 1] (Kish 1965) -> scalar. 1: all count alike; 1/n: one has it all.

    level "token": the n loss tokens. "sequence": the n sequences, each by the mean weight of its loss tokens (which is
    its weight in a sequence mode). The same as verl's 1 / mean((w / mean w)^2). No weight above 0 (verl: inf): 0.
    """
    mask_BT = mask_BT.bool()
    if level == "token":
        weights, count = masked(weights_BT, mask_BT), mask_BT.sum()
    elif level == "sequence":
        weights, count = row_mean(weights_BT, mask_BT), mask_BT.any(-1).sum()
    else:
        raise ValueError(f'level = {level!r}: use "token" or "sequence"')
    squares = weights.square().sum() * count
    return torch.where(squares == 0, 0.0, weights.sum().square() / squares)


def ess_step_scale(ess: torch.Tensor | float) -> torch.Tensor:
    """Factor of the learning rate for one step, in [0, 1]: sqrt(min(1, ess)).

    VCPO (Huang et al. 2026, arXiv 2602.17616): the rate goes with the square root of the effective sample size share
    under AdamW. `ess`: that of the step's sequence ratios before any cap. The bound at 1 is that of the authors' code.
    """
    return torch.as_tensor(ess).detach().float().clamp(max=1.0).sqrt()


@torch.no_grad()
def interpolated_proximal(
    behavior_logprobs_BT: torch.Tensor,
    current_logprobs_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    *,
    mask_BT: torch.Tensor,
) -> torch.Tensor:
    """Proximal log-probs without a forward pass: alpha * behavior + (1 - alpha) * current [B, T], detached.

    A-3PO (arXiv 2512.06547): alpha = 1 / staleness, staleness = current version - version of the token; the proximal
    policy is one step behind the current one. At staleness 1 that is the behavior policy; at 0 it is taken too, as in
    the authors' code (AReaL, "loglinear", whose alpha is our 1 - alpha). The interpolation is of log-probs of the
    sampled token: it is not normalised over the vocabulary.
    """
    mask_BT = mask_BT.bool()
    staleness_BT = masked(staleness_BT, mask_BT)
    if (staleness_BT < 0).any():
        raise ValueError("staleness_BT is negative: a token cannot be newer than the current version")
    share_BT = 1 / staleness_BT.clamp(min=1)
    return torch.lerp(masked(current_logprobs_BT, mask_BT), masked(behavior_logprobs_BT, mask_BT), share_BT)


@torch.no_grad()
def mismatch_metrics(
    proximal_logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    mode: CorrectionMode | Literal["none"],
    cap: float,
    floor: float | None = None,
    versions_BT: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """How far the sampling policy was from the proximal one: sums and counts ("max/..." combine by maximum).

    sum/kl and sum/k3: the k1 and k3 estimates of KL(behavior || proximal), summed over tokens. */importance: the mode's
    ratio before its bounds (with "none" the token's, which is then not applied). sum/capped, sum/below: tokens whose
    ratio passes the cap, or is below the floor (1 / cap where the mode has none); 0 with "none". sum/bounded: tokens
    whose log-ratio was bounded to +-20. sum/weight(_squared): the weights as applied. sum/token_ratio(_squared) is over
    tokens, sum/sequence_ratio(_squared) and */..ppl.. are over sequences. `mismatch_summary` makes means of them.
    No tokens are selected by the mask: to learn how many there are, the program would have to wait for the GPU.
    """
    mask_BT = mask_BT.bool()
    level = "token" if mode == "none" else MODES.get(mode, ("token", ""))[0]
    # A mode that does not exist is an error here as it is in importance_weights.
    floor = checked_floor("token_mask" if mode == "none" else mode, cap, floor)
    args = (proximal_logprobs_BT, behavior_logprobs_BT, mask_BT)
    log_ratio_BT = masked(log_ratios(*args, level, versions_BT), mask_BT)
    ratio_BT = masked(bounded_exp(log_ratio_BT), mask_BT)
    if mode == "none":
        weights_BT = mask_BT.float()
    else:
        weights_BT = importance_weights(*args, mode=mode, cap=cap, floor=floor, versions_BT=versions_BT)
    d_BT = log_ratios(*args, "token")
    bounded_BT = bounded(d_BT)
    token_ratio_BT = masked(bounded_BT.exp(), mask_BT)
    corrected = float(mode != "none")
    below_BT = mask_BT & (ratio_BT < (1 / cap if floor is None else floor))
    return {
        "count/tokens": mask_BT.sum().float(),
        "sum/logprob_abs": d_BT.abs().sum(),
        "max/logprob_abs": d_BT.abs().max(),
        "sum/kl": -d_BT.sum(),
        "sum/k3": (torch.expm1(bounded_BT) - bounded_BT).sum(),
        "sum/importance": ratio_BT.sum(),
        "max/importance": ratio_BT.max(),
        "sum/capped": (ratio_BT > cap).sum() * corrected,
        "sum/below": below_BT.sum() * corrected,
        "sum/bounded": (log_ratio_BT.abs() > MAX_LOG_RATIO).sum().float(),
        "sum/weight": weights_BT.sum(),
        "sum/weight_squared": weights_BT.square().sum(),
        "sum/token_ratio": token_ratio_BT.sum(),
        "sum/token_ratio_squared": token_ratio_BT.square().sum(),
    } | _sequence_metrics(*args)


def _sequence_metrics(
    proximal_logprobs_BT: torch.Tensor, behavior_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the metrics of mismatch_metrics over the S sequences. log ppl = -mean log-prob of the loss tokens."""
    some_B = mask_BT.any(-1)
    proximal_B = -row_mean(proximal_logprobs_BT, mask_BT)
    behavior_B = -row_mean(behavior_logprobs_BT, mask_BT)
    difference_B = proximal_B - behavior_B
    ratio_B = bounded_exp(log_ratios(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, "sequence")[:, 0])

    def total(values_B: torch.Tensor) -> torch.Tensor:
        return masked(values_B, some_B).sum()

    def largest(values_B: torch.Tensor) -> torch.Tensor:
        return torch.where(some_B, values_B, -float("inf")).max()

    return {
        "count/sequences": some_B.sum().float(),
        "sum/sequence_ratio": total(ratio_B),
        "sum/sequence_ratio_squared": total(ratio_B.square()),
        "sum/proximal_log_ppl": total(proximal_B),
        "sum/behavior_log_ppl": total(behavior_B),
        "sum/proximal_ppl": total(bounded_exp(proximal_B)),
        "sum/behavior_ppl": total(bounded_exp(behavior_B)),
        "sum/ppl_ratio": total(bounded_exp(difference_B)),
        "sum/log_ppl_abs_difference": total(difference_B.abs()),
        "max/log_ppl_difference": largest(difference_B),
        "max/log_ppl_difference_negative": largest(-difference_B),
    }


def mismatch_summary(totals: Mapping[str, float]) -> dict[str, float]:
    """Diagnostics from the added-up `mismatch_metrics` of any number of micro-batches; {} without a token.

    Means over tokens or sequences; chi2 = mean(ratio^2) - 1, the chi-square divergence of proximal from behavior;
    effective sample sizes as in `effective_sample_size`: of the weights as applied, and of the ratios before bounds.
    """
    if not totals.get("count/tokens"):
        return {}
    tokens, sequences = float(totals["count/tokens"]), float(totals["count/sequences"])

    def ess(name: str, count: float) -> float:
        squares = float(totals[f"sum/{name}_squared"]) * count
        return float(totals[f"sum/{name}"]) ** 2 / squares if squares else 0.0

    over_tokens = ("logprob_abs", "kl", "k3", "importance", "capped", "below", "bounded", "weight")
    over_sequences = (
        "proximal_log_ppl", "behavior_log_ppl", "proximal_ppl", "behavior_ppl", "ppl_ratio", "log_ppl_abs_difference"
    )  # fmt: skip
    means = {name: float(totals[f"sum/{name}"]) / tokens for name in over_tokens}
    means |= {name: float(totals[f"sum/{name}"]) / sequences for name in over_sequences}
    return means | {
        "chi2_token": float(totals["sum/token_ratio_squared"]) / tokens - 1,
        "chi2_sequence": float(totals["sum/sequence_ratio_squared"]) / sequences - 1,
        "log_ppl_difference": means["proximal_log_ppl"] - means["behavior_log_ppl"],
        "log_ppl_difference_max": float(totals["max/log_ppl_difference"]),
        "log_ppl_difference_min": -float(totals["max/log_ppl_difference_negative"]),
        "ess_weight": ess("weight", tokens),
        "ess_token_ratio": ess("token_ratio", tokens),
        "ess_sequence_ratio": ess("sequence_ratio", sequences),
    }

"""The loss of a micro-batch, composed from `rollover.algorithms` as [algorithm] says. Never touches a model.

    policy loss x importance weight x mask + KL to the reference - entropy bonus, aggregated to one number

With the defaults (Decoupled PPO, arXiv 2505.24298), of a token with advantage A that policy mu sampled, where p is the
policy at the start of the step and pi the current one:

    -min(p / mu, cap) x min(pi / p A, clip(pi / p, 1 - clip_low, 1 + clip_high) A)

Each token has its own mu, so a rollout of several policy versions is no special case.

Rejected tokens (algorithm.rejection) are already out of the masks (streams.py).

Shapes: B samples, T longest response.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollover.algorithms.correction import (
    ess_step_scale,
    geometric_row_mean,
    importance_weights,
    interpolated_proximal,
    mismatch_metrics,
    mismatch_summary,
    off_policy_sequence_mask,
)
from rollover.algorithms.kl import bias_corrected_kl, kl_penalty
from rollover.algorithms.loss import (
    DENOMINATORS,
    CustomLoss,
    aggregate,
    batch_loss,
    declared_streams,
    entropy_bonus,
    loss_function,
    option_parameters,
)
from rollover.algorithms.token_batch import TokenBatch
from rollover.config import AlgorithmConfig
from rollover.config.traits import Aggregation
from rollover.functions import FunctionError
from rollover.models.devices import widest_float
from rollover.types import Sample

Sums = dict[str, torch.Tensor]
TOKEN_STATS = "tokens"
"""Key of the statistics of each token [B, T, K], float32, among the sums of a micro-batch (columns: objective.py)."""
STAT_LOGPROB, STAT_ENTROPY, STAT_WEIGHT = range(3)
"""Columns of TOKEN_STATS: a token's log-prob and the entropy of its distribution, under the current weights; and the
factor of its advantage in the gradient of its log-prob (`token_stats_of`)."""


@dataclass(frozen=True)
class Counts:
    """Loss tokens of a minibatch over all its micro-batches, in all, by sequence and by group.

    `divided` False: the rest of the minibatch is not known yet, and its gradient is divided at the end.
    """

    tokens: int
    sequence_tokens: dict[str, int]
    group_tokens: dict[int, int]
    divided: bool = True

    @classmethod
    def from_samples(cls, samples: list[Sample]) -> Counts:
        group_tokens, sequence_tokens = Counter[int](), Counter[str]()
        for s in samples:
            if num := int(s.mask.sum()):
                group_tokens[s.group_id] += num
                sequence_tokens[s.sequence_id] += num
        return cls(group_tokens.total(), dict(sequence_tokens), dict(group_tokens))

    def divisor(self, aggregation: Aggregation) -> float:
        """Return the global count that `aggregation` divides by; 1 if the division is later, or none."""
        counted = DENOMINATORS[aggregation]
        if not self.divided or counted is None:
            return 1.0
        counts = {
            "tokens": self.tokens,
            "sequences": len(self.sequence_tokens),
            "groups": len(self.group_tokens),
        }
        return float(counts[counted])

    def tokens_of_group(self, group_B: torch.Tensor) -> torch.Tensor:
        """Return the loss tokens of the whole group of each row [B]."""
        return torch.tensor([self.group_tokens[int(group)] for group in group_B.numpy()])

    def tokens_of_sequence(self, sequences: Sequence[str]) -> torch.Tensor:
        """Return the loss tokens of the whole sequence of each row [B]."""
        return torch.tensor([self.sequence_tokens[sequence] for sequence in sequences])


class Objective:
    """The loss that [algorithm] configures.

    `max_new_tokens`: the norm of seq-mean-token-sum-norm, unless algorithm.aggregation_norm is set. `tells_tokens`: add
    TOKEN_STATS to the sums (track.token_stats).
    """

    def __init__(self, config: AlgorithmConfig, max_new_tokens: int, *, tells_tokens: bool = False) -> None:
        self.config, self.tells_tokens = config, tells_tokens
        self.norm = config.aggregation_norm or float(max_new_tokens)
        self.kind = CustomLoss(config.loss) if ":" in config.loss else config.loss
        self._options: dict[str, Any] = _options_from_config(self.kind, config) | config.loss_options
        if config.loss_traits.weighs:
            self._options["weight_cap"] = config.correction_cap
        if config.dual_clip:
            self._options["dual_clip"] = config.dual_clip
        self._check_options()

    def __call__(self, batch: TokenBatch, counts: Counts) -> tuple[torch.Tensor, Sums]:
        """Return (scalar loss, metrics as sums and counts over the micro-batch).

        Reads the streams "logprobs", "entropy", "behavior_logprobs", "advantages", "versions", and those of STREAMS
        (streams.py) that [algorithm] and the loss use.
        """
        cfg, mask_BT = self.config, batch.mask_BT
        batch = batch.with_streams(old_logprobs=self._old_logprobs(batch))
        loss_BT, sums = self._policy_loss(batch)
        loss_BT = loss_BT * self._weights(batch, sums)
        if "weights" in batch.streams:
            loss_BT = loss_BT * batch.stream("weights")
        if self.tells_tokens:
            sums[TOKEN_STATS] = token_stats_of(loss_BT, batch)
        if cfg.kl_in_loss:
            kl_BT = self._reference_kl(batch)
            loss_BT = loss_BT + cfg.kl_coef * kl_BT
            sums["sum/reference_kl"] = kl_BT.detach().sum()
        if cfg.entropy_coef:
            loss_BT = loss_BT + entropy_bonus(batch.entropy_BT, mask_BT, coef=cfg.entropy_coef)
        group_tokens_B = sequence_tokens_B = None
        if cfg.aggregation == "prompt-mean":
            group_tokens_B = counts.tokens_of_group(batch.group_B).to(loss_BT.device)
        elif cfg.aggregation == "seq-mean-token-mean":
            sequence_tokens_B = counts.tokens_of_sequence(batch.sequences).to(loss_BT.device)
        loss = aggregate(
            loss_BT,
            mask_BT,
            cfg.aggregation,
            denominator=counts.divisor(cfg.aggregation),
            group_B=batch.group_B,
            group_tokens_B=group_tokens_B,
            sequence_tokens_B=sequence_tokens_B,
            norm=self.norm,
        )
        if "start_logprobs" in batch.streams:
            # Of the policy that (nearly) drew the tokens to the current one: exp(d) - 1 - d of d = current - start.
            start_kl_BT = kl_penalty(batch.stream("start_logprobs"), batch.logprobs_BT.detach(), "k3", mask_BT=mask_BT)
            sums["sum/start_kl"] = torch.where(mask_BT, start_kl_BT, 0.0).sum()
        if cfg.supervised:  # no policy sampled the tokens: there are no ratios
            sums = {"count/tokens": sums["count/tokens"], "sum/nll": -batch.logprobs_BT.detach().sum()}
        else:
            sums |= mismatch_metrics(
                batch.old_logprobs_BT,
                batch.behavior_logprobs_BT,
                mask_BT,
                mode=cfg.weight,
                cap=cfg.correction_cap,
                floor=cfg.correction_floor or None,
                versions_BT=batch.versions_BT,
            )
        return loss, sums | {"sum/loss": loss.detach(), "sum/entropy": batch.entropy_BT.detach().sum()}

    def _policy_loss(self, batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
        cfg = self.config
        return batch_loss(batch, kind=self.kind, clip_low=cfg.clip_low, clip_high=cfg.clip_high, **self._options)

    def _check_options(self) -> None:
        """Raise ValueError for unknown loss options or a broken loss, before anything is generated."""
        old_BT = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]])
        advantages_BT = torch.tensor([[1.0], [-0.5]]).expand(2, 3)
        declared = {name: old_BT for name, needed in declared_streams(loss_function(self.kind)).items() if needed}
        given = declared | {"old_logprobs": old_BT, "advantages": advantages_BT}
        try:
            self._policy_loss(TokenBatch.of(old_BT < 0, logprobs=(old_BT * 1.1).requires_grad_(), **given))
        except FunctionError:
            raise  # its message is complete
        except (TypeError, ValueError) as error:
            options = self.config.loss_options
            raise ValueError(f"algorithm.loss = {self.config.loss!r}, loss_options = {options}: {error}") from error

    def _old_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Return the log-probs of the proximal policy; the current ones if the step computed none."""
        policy = self.config.proximal_policy
        if policy == "behavior":
            return batch.behavior_logprobs_BT
        if policy == "interpolated":
            return interpolated_proximal(
                batch.behavior_logprobs_BT, batch.logprobs_BT, batch.stream("staleness"), mask_BT=batch.mask_BT
            )
        if policy == "current" or "proximal_logprobs" not in batch.streams:
            return batch.logprobs_BT.detach()
        return batch.stream("proximal_logprobs")

    def _weights(self, batch: TokenBatch, sums: Sums) -> torch.Tensor:
        """Return the importance weight of each token [B, T], 0 where off_policy_mask_above masks it.

        Denominators, KL and entropy count tokens of weight 0, too.
        """
        cfg, mask_BT = self.config, batch.mask_BT
        weights_BT = mask_BT.float()
        if cfg.weight_outside != "none":
            weights_BT = importance_weights(
                batch.old_logprobs_BT,
                batch.behavior_logprobs_BT,
                mask_BT,
                mode=cfg.weight_outside,
                cap=cfg.correction_cap,
                floor=cfg.correction_floor or None,
                versions_BT=batch.versions_BT,
            )
            if cfg.loss_traits.by_row:
                weights_BT = geometric_row_mean(weights_BT, mask_BT)
        if math.isfinite(cfg.off_policy_mask_above):
            kept_BT = off_policy_sequence_mask(
                batch.advantages_BT,
                batch.logprobs_BT.detach(),
                batch.behavior_logprobs_BT,
                mask_BT,
                threshold=cfg.off_policy_mask_above,
            )
            weights_BT = weights_BT * kept_BT
            sums["sum/off_policy"] = (mask_BT & ~kept_BT).sum().float()
        return weights_BT

    def _reference_kl(self, batch: TokenBatch) -> torch.Tensor:
        cfg, mask_BT, reference_BT = self.config, batch.mask_BT, batch.stream("reference_logprobs")
        if cfg.kl_bias_correction:
            # Tokens are drawn from the behavior policy: the ratio to any other would leave a bias.
            kl_BT = bias_corrected_kl(
                batch.logprobs_BT, reference_BT, batch.behavior_logprobs_BT, cfg.kl_estimator, mask_BT=mask_BT
            )
        else:
            kl_BT = kl_penalty(
                batch.logprobs_BT,
                reference_BT,
                cfg.kl_estimator,
                mask_BT=mask_BT,
                max_value=cfg.kl_bound(cfg.kl_estimator),
            )
        return torch.where(mask_BT, kl_BT, 0.0)


def token_stats_of(loss_BT: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return TOKEN_STATS [B, T, 3] from the policy loss of each token, before KL, entropy and aggregation.

    The weight is -dLoss/dlogprob / advantage: importance weight and ratio as the loss bounds, clips or masks them,
    for any loss; 0 where the token has no gradient, NaN where its advantage is 0 or gradients are off.
    """
    weight_BT = torch.full_like(loss_BT, float("nan"), requires_grad=False)
    if loss_BT.requires_grad:
        (slope_BT,) = torch.autograd.grad(loss_BT.sum(), batch.logprobs_BT, retain_graph=True)
        weight_BT = torch.where(batch.advantages_BT == 0, weight_BT, -slope_BT / batch.advantages_BT)
    return torch.stack([batch.logprobs_BT.detach(), batch.entropy_BT.detach(), weight_BT], -1).float()


def rate_scale(sums: dict[str, float]) -> float:
    """Return the learning rate's factor for a minibatch with these sums (algorithm.ess_step_scaling)."""
    return float(ess_step_scale(mismatch_summary(sums)["ess_sequence_ratio"])) if sums else 1.0


def start_kl(sums: dict[str, float]) -> float:
    """Return the mean KL (k3) of the policy at the start of the step to the current one; 0 without a token.

    `sums`: of a minibatch. ValueError if the backend did not compute it.
    """
    if not sums:
        return 0.0
    if "sum/start_kl" not in sums:
        raise ValueError(
            "train.max_kl: the backend's forward_backward ignores the stream start_logprobs of its samples, which the"
            " KL needs. Pass it to the Objective (`pack` does), or set train.max_kl = 0"
        )
    return sums["sum/start_kl"] / sums["count/tokens"]


def _options_from_config(kind: str | CustomLoss, config: AlgorithmConfig) -> dict[str, Any]:
    """Return the options of a custom loss that share the name of an option of [algorithm], with its value.

    Every loss gets clip bounds and dual_clip anyway.
    """
    if isinstance(kind, str):
        return {}
    names = option_parameters(kind).keys() - {"clip_low", "clip_high", "dual_clip"}
    return {name: getattr(config, name) for name in AlgorithmConfig.model_fields if name in names}


# metric of docs/metrics.md -> the sum behind it, as a mean over tokens
_TOKEN_MEANS = {
    "entropy": "sum/entropy",
    "sft/loss": "sum/nll",
    "clip_fraction": "sum/clipped",
    "ratio/mean": "sum/ratio",
    "kl/reference": "sum/reference_kl",
    "off_policy/masked_share": "sum/off_policy",
    "critic/loss": "sum/critic_loss",
    "critic/clipped_share": "sum/critic_clipped",
    "critic/value_mean": "sum/values",
    "critic/return_mean": "sum/returns",
}
# metric -> diagnostic of mismatch_summary
_MISMATCH = {
    "importance/mean": "importance",
    "importance/weight_mean": "weight",
    "importance/capped_share": "capped",
    "importance/below_share": "below",
    "importance/ess": "ess_weight",
    "importance/ess_token_ratio": "ess_token_ratio",
    "importance/ess_sequence_ratio": "ess_sequence_ratio",
    "mismatch/logprob_abs_mean": "logprob_abs",
    "mismatch/bounded_share": "bounded",
    "mismatch/kl": "kl",
    "mismatch/k3": "k3",
    "mismatch/chi2_token": "chi2_token",
    "mismatch/chi2_sequence": "chi2_sequence",
    "mismatch/proximal_ppl": "proximal_ppl",
    "mismatch/behavior_ppl": "behavior_ppl",
    "mismatch/ppl_ratio": "ppl_ratio",
    "mismatch/log_ppl_difference": "log_ppl_difference",
    "mismatch/log_ppl_abs_difference": "log_ppl_abs_difference",
    "mismatch/log_ppl_difference_max": "log_ppl_difference_max",
    "mismatch/log_ppl_difference_min": "log_ppl_difference_min",
}
_MAXIMA = {
    "ratio/max": "max/ratio",
    "importance/max": "max/importance",
    "mismatch/logprob_abs_max": "max/logprob_abs",
}


def step_metrics(totals: dict[str, float], updates: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a training step (docs/metrics.md). `updates`: results of its optimizer steps."""
    tokens = max(1.0, totals.get("count/tokens", 0.0))
    mismatch = mismatch_summary(totals) if "sum/nll" not in totals else {}
    metrics = {
        "loss": totals.get("sum/loss", 0.0) / len(updates),
        **{key: totals[source] / tokens for key, source in _TOKEN_MEANS.items() if source in totals},
        **{key: mismatch[source] for key, source in _MISMATCH.items() if source in mismatch},
        **{key: totals[source] for key, source in _MAXIMA.items() if source in totals},
        **_norms(updates, "grad_norm"),
        "learning_rate": updates[-1]["learning_rate"],
        "train/skipped_steps": sum(u["train/skipped_steps"] for u in updates),
    }
    metrics["train/updates"] = len(updates) - metrics["train/skipped_steps"]
    if "critic/grad_norm" in updates[0]:
        metrics |= _norms(updates, "critic/grad_norm")
        metrics["critic/learning_rate"] = updates[-1]["critic/learning_rate"]
        metrics["critic/skipped_steps"] = sum(u["critic/skipped_steps"] for u in updates)
    if "sum/returns" in totals:
        of_errors, of_returns = (_variance(totals, name, tokens) for name in ("sum/critic_error", "sum/returns"))
        metrics["critic/explained_variance"] = 1 - of_errors / max(of_returns, 1e-8)
    return metrics


def _norms(updates: list[dict[str, float]], key: str) -> dict[str, float]:
    norms = [update[key] for update in updates]
    return {key: sum(norms) / len(norms), f"{key}_max": max(norms)}


def _variance(totals: dict[str, float], name: str, num: float) -> float:
    """Return the variance of `num` values from their sum and the sum of their squares."""
    return totals[f"{name}_squared"] / num - (totals[name] / num) ** 2


# Sums of micro-batches


class Tally:
    """Sums by name, those named max/... by maximum, and statistics of each token, by rollout.

    They stay on the device until they are read: reading a number waits until the device has computed all before.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[str, ...], torch.Tensor]] = []
        self._totals: dict[str, float] = {}
        self._divisors: dict[str, float] = {}
        self._token_stats: list[tuple[Sequence[Sample], torch.Tensor]] = []
        self._tokens: dict[str, np.ndarray] = {}

    def add(self, sums: Mapping[str, torch.Tensor], samples: Sequence[Sample] = ()) -> None:
        """Add the sums of one micro-batch, a number each. `samples`: its rows, if it has TOKEN_STATS."""
        # In double precision, where the device has it, as Python adds numbers.
        numbers = {name: _wide(value) for name, value in sums.items() if name != TOKEN_STATS}
        self._waiting.append((tuple(numbers), torch.stack(list(numbers.values()))))
        if TOKEN_STATS in sums:
            self._token_stats.append((samples, sums[TOKEN_STATS]))

    def pop_token_stats(self) -> dict[str, np.ndarray]:
        """Return and discard rollout_id -> statistics of its loss tokens [loss tokens, K]."""
        found, pending = self._tokens, self._token_stats
        self.drop_token_stats()
        if pending:
            flat = torch.cat([stats_BTK.flatten() for _, stats_BTK in pending]).cpu().numpy()
            parts = np.split(flat, np.cumsum([stats_BTK.numel() for _, stats_BTK in pending])[:-1])
            for (samples, stats_BTK), part in zip(pending, parts, strict=True):
                rows = part.reshape(stats_BTK.shape)
                found |= {s.rollout_id: row[: len(s.mask)][s.mask] for s, row in zip(samples, rows, strict=True)}
        return found

    def drop_token_stats(self) -> None:
        """Discard the token statistics."""
        self._token_stats, self._tokens = [], {}

    def vectors(self) -> list[tuple[tuple[str, ...], list[float]]]:
        """Return the (names, numbers) of each addition."""
        return [(names, vector.tolist()) for names, vector in self._waiting]

    @classmethod
    def from_vectors(
        cls, vectors: Iterable[tuple[Sequence[str], Sequence[float]]], tokens: Mapping[str, np.ndarray]
    ) -> Tally:
        """Make a Tally of the `vectors` and token statistics of others."""
        out = cls()
        out._waiting = [(tuple(names), torch.tensor(numbers, dtype=torch.float64)) for names, numbers in vectors]
        out._tokens = dict(tokens)
        return out

    def absorb(self, other: Tally) -> None:
        """Move all additions of `other` here, in the same order."""
        self._waiting += other._waiting
        self._token_stats += other._token_stats
        self._tokens |= other._tokens
        other._waiting, other._token_stats, other._tokens = [], [], {}

    def divide(self, name: str, divisor: float) -> None:
        """Divide the total of `name` by `divisor` once it is complete."""
        self._divisors[name] = divisor

    def totals(self) -> dict[str, float]:
        """Return the totals of all additions."""
        return totals_of([self])


def totals_of(tallies: Sequence[Tally]) -> dict[str, float]:
    """Return the totals over all tallies, in one transfer."""
    vectors = [vector for tally in tallies for _, vector in tally._waiting]
    numbers = iter(torch.cat(vectors).tolist() if vectors else ())
    out: dict[str, float] = {}
    for tally in tallies:
        for names, _ in tally._waiting:
            _combine(tally._totals, {name: next(numbers) for name in names})
        tally._waiting.clear()
        _combine(out, {name: total / tally._divisors.get(name, 1.0) for name, total in tally._totals.items()})
    return out


def _combine(totals: dict[str, float], sums: Mapping[str, float]) -> None:
    """Add `sums` to `totals`; those named max/... by maximum."""
    for key, number in sums.items():
        old = totals.get(key)
        totals[key] = number if old is None else max(old, number) if key.startswith("max/") else old + number


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(widest_float(value.device))

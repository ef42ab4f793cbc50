"""The KL to the reference policy in the reward (algorithm.kl_in): the penalty per token, and its coefficient.

    r_t = (score at a trajectory's last token) - coef * kl_t        kl_t of log policy/reference at token t

kl_t is of the policy at the start of the step, whoever sampled the token. The gradient sought is that of
E[score - coef * sum_t log policy/reference] at the weights that are changed, and the importance weight policy/behavior
turns the expectation over the behavior policy's tokens into one over the policy's. With the behavior policy's own
log-probs it would be that of E[score] - coef * (KL(policy || reference) - KL(policy || behavior)): away from the
behavior policy. On fresh tokens the two are the same, which is what verl does (`old_log_probs`).

Owns the controller. credit.py subtracts the penalties for estimators; scores as filters, replay, curricula and metrics
read them never change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollover.algorithms.kl import AdaptiveKL, FixedKL, kl_penalty
from rollover.config import AlgorithmConfig
from rollover.trainer.backend import TrainerBackend, reference_version
from rollover.types import Sample

_MAX_LOG_RATIO = float(np.log(2.0))


@dataclass(frozen=True)
class Penalties:
    """KL penalties of a step's rollouts, subtracted from their rewards.

    `tokens`: rollout_id -> coef * KL of each token after the prompt [n], 0 for tokens that were not sampled. `kl`: mean
    over `num_rollouts` rollouts of the mean over their tokens, each weighted by policy/behavior, up to 2: so it is the
    policy's for stale tokens, too (k1 would be negative for tokens of the reference itself). `seconds`: of its passes,
    by part (logprobs, reference).
    """

    tokens: Mapping[str, np.ndarray]
    kl: float
    coef: float
    num_rollouts: int
    seconds: Mapping[str, float] = field(default_factory=dict)


def bounded_ratio(policy_M: np.ndarray, sample: Sample) -> np.ndarray:
    """Return min(policy/behavior, 2) of each loss token.

    Weighted by it, an estimate over tokens of older policies is one of the policy.
    """
    return np.exp(np.minimum(policy_M - sample.behavior_logprobs[sample.mask], _MAX_LOG_RATIO))


class RewardKL:
    """The KL in the reward of one run, computed by its `backend`."""

    def __init__(self, backend: TrainerBackend, algorithm: AlgorithmConfig) -> None:
        self.backend, self.algorithm = backend, algorithm
        self._reset()

    @property
    def coef(self) -> float:
        """The coefficient of the next step."""
        return self.controller.coef

    def penalties(self, samples: list[Sample]) -> Penalties:
        """Return the penalties of the next step, whose sampled tokens are the loss tokens of `samples`.

        ValueError if a log-prob is not finite: it would be in every weight afterwards.
        """
        samples = [s for s in samples if s.mask.any()]
        started = time.perf_counter()
        policy = self.backend.compute_logprobs(samples)
        between = time.perf_counter()
        reference = self.backend.compute_logprobs(samples, reference_version(self.algorithm))
        seconds = {"logprobs": between - started, "reference": time.perf_counter() - between}
        tokens: dict[str, np.ndarray] = {}
        means: list[float] = []
        for s in samples:
            kl_M = kl_penalty(
                torch.from_numpy(policy[s.rollout_id]),
                torch.from_numpy(reference[s.rollout_id]),
                self.algorithm.reward_kl_estimator,
                max_value=self.algorithm.kl_bound(self.algorithm.reward_kl_estimator),
            ).numpy()
            if not np.isfinite(kl_M).all():
                raise ValueError(
                    f"rollout {s.rollout_id}: a log-prob of the policy or of its reference is not finite. Try"
                    ' model.dtype = "float32"'
                )
            of_rollout = np.zeros(len(s.mask), np.float32)
            of_rollout[s.mask] = self.coef * kl_M
            tokens[s.rollout_id] = of_rollout
            means.append(float((bounded_ratio(policy[s.rollout_id], s) * kl_M).mean(dtype=np.float64)))
        return Penalties(tokens, sum(means) / max(1, len(means)), self.coef, len(means), seconds)

    def after_step(self, penalties: Penalties) -> dict[str, float]:
        """Update the coefficient after a trained step; return the step's metrics."""
        self.controller = self.controller.update(penalties.kl, penalties.num_rollouts)
        return {"kl/in_reward": penalties.kl, "kl/coef": penalties.coef}

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient of the next step, and the configured one."""
        return {"coef": self.coef, "kl_coef": self.algorithm.reward_kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; start fresh if the configured coefficient changed, or is fixed."""
        self._reset()
        if self.algorithm.kl_target and state.get("kl_coef") == self.algorithm.reward_kl_coef:
            self._reset(state["coef"])

    # Private

    def _reset(self, coef: float | None = None) -> None:
        cfg = self.algorithm
        coef = cfg.reward_kl_coef if coef is None else coef
        self.controller: FixedKL | AdaptiveKL = (
            AdaptiveKL(coef, cfg.kl_target, cfg.kl_horizon) if cfg.kl_target else FixedKL(coef)
        )

"""The space of [algorithm]: how its configurations are drawn, and what one of them makes of a fixed random batch.

The batch has what options can act on: groups with several rewards, with equal and with missing ones, a greedy rollout
each, answers that were cut off, tokens of several policy versions, policies from near to far apart.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from local_trainer import build_batch
from rollover.algorithms.filters import rollout_filters
from rollover.algorithms.loss import LossAndClipped, TokenBatch
from rollover.config import Config
from rollover.config.correction import REJECTIONS
from rollover.config.load import ConfigError, load_config
from rollover.config.presets import PRESETS
from rollover.staleness import staleness
from rollover.trainer.backend import Stream
from rollover.trainer.critic import Critic
from rollover.trainer.objective import Counts, Objective, rate_scale
from rollover.trainer.passes import token_batch
from rollover.trainer.streams import STATISTICS, with_weights, without_rejected
from rollover.trainer.token_advantages import estimate_tokens, estimate_with_critic, with_bootstrap_token
from rollover.types import (
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    Sample,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

HERE = "objective_space"
VERSION = 4  # of the trainer
Values = dict[str, Any]


def own_loss(t: TokenBatch, *, clip_low: float, clip_high: float, dual_clip: float = 9.0) -> LossAndClipped:
    """A loss of one's own, with a term where the advantage is 0."""
    ratio_BT = t.ratio_BT.clamp(0.5 / (1 + clip_low), 1 + clip_high)
    return -ratio_BT * t.advantages_BT + 0.1 * t.logprobs_BT**2 + 1e-3 * dual_clip * t.logprobs_BT, t.mask_BT & False


def own_advantage(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    return rewards_N.nan_to_num(0.0) ** 2 - 0.3


def halve(rollouts: list[Rollout], advantages_N: torch.Tensor) -> None:
    advantages_N[::2] *= 0.5


def shift(rollouts: list[Rollout], advantages_N: torch.Tensor) -> torch.Tensor:
    return advantages_N + 0.1


# By the estimate: for small ones k2 and k3 are the same.
BOUNDS = {"k1": (0.05, 0.3), "k2": (0.02, 0.12), "k3": (0.05, 0.3)}
# The values that a key is drawn from.
VALUES: dict[str, tuple[Any, ...]] = {
    "algorithm.advantage": (
        "grpo", "dr_grpo", "rloo", "gdpo", "sum_then_normalize", "remax", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "opo", "grpo_passk", "max_rl", "gpg", "gae", "reinforce_plus_plus_tokens",
        "optimal_token_baseline", "tir_optimal_token_baseline", f"{HERE}:own_advantage",
    ),
    "algorithm.advantage_std": ("sample", "population", "batch", "none"),
    "algorithm.advantage_counts": ("", "rollouts", "tokens"),
    "algorithm.passk": (2, 3, 4),
    "algorithm.passk_std": ("none", "sample"),
    "algorithm.reward_weights": ({}, {"score": 1.0, "short": 0.5}, {"score": 1.0, "short": 2.0}),
    "algorithm.gamma": (1.0, 0.9, 0.7),
    "algorithm.gae_lambda": (1.0, 0.9, 0.5),
    "critic.head_learning_rate": (1e-3, 1e-2),
    "critic.value_clip": (0.2, 0.05, 0.5, 0.0),
    "critic.weight_decay": (0.0, 0.5),
    "critic.bootstrap_truncated": (False, True),
    "algorithm.after_scoring": ("", f"{HERE}:halve", f"{HERE}:shift"),
    "algorithm.loss": (
        "clip", "reinforce", "gspo", "gmpo", "cispo", "sapo", "luspo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl",
        "decoupled", "vespo", "dro", "importance_sampling", f"{HERE}:own_loss",
    ),
    "algorithm.clip_low": (0.2, 0.1, 0.05, 1.0, 1.5),
    "algorithm.clip_high": (0.2, 0.1, 0.28, 0.05),
    "algorithm.dual_clip": (0.0, 0.5, 1.3, 2.0),
    "algorithm.loss_options": (
        {}, {"tau_positive": 2.0}, {"share": 0.05}, {"share": 0.9}, {"ratio_cap": 1.2}, {"clip_low": 0.1},
        {"weight_cap": 3.0}, {"beta": 0.3}, {"level": "sequence"}, {"k_positive": 1.5, "lambda_negative": 1.0},
    ),
    "algorithm.aggregation": (
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
        "prompt-mean",
    ),
    "algorithm.aggregation_norm": (0.0, 8.0),
    "algorithm.entropy_coef": (0.0, 0.01, 0.1),
    "algorithm.top_entropy_share": (1.0, 0.2, 0.6),
    "algorithm.proximal": ("step_start", "behavior", "interpolated", "snapshot"),
    "algorithm.correction": (
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop", "segment_truncate",
        "segment_mask",
    ),
    "algorithm.correction_cap": (2.0, 1.1, 1.5),
    "algorithm.correction_floor": (0.0, 0.7, 0.9),
    "algorithm.correction_normalize": (False, True),
    "algorithm.allow_uncorrected": (False, True),
    "algorithm.rejection": (
        {}, *({name: bound} for name in REJECTIONS for bound in BOUNDS[name[-2:]]), {"token_k1": [-0.05, 0.3]},
        {"sequence_mean_k1": [-0.3, 0.02]}, {"token_k2": 0.02, "sequence_mean_k3": 0.1},
    ),
    "algorithm.off_policy_mask_above": (math.inf, 0.0, 0.02, 0.3),
    "algorithm.ess_step_scaling": (False, True),
    "algorithm.kl_coef": (0.0, 0.01, 0.3),
    "algorithm.kl_kind": ("k3", "k1", "abs", "k2", "k1+", "k3+"),
    "algorithm.kl_max": (0.0, 0.01, 0.05),
    "algorithm.kl_bias_correction": (False, True),
    "filters.mask_truncated": (False, True),
    "filters.mask_overlong": (False, True),
    "filters.overlong_tokens": (0, 4, 6),
    "filters.mask_in_baseline": (True, False),
}  # fmt: skip
CRITIC = [key for key in VALUES if key.startswith("critic.")]
# A key acts only together with these: drawn so half of the time, so that each acts often enough.
COMPANIONS: dict[str, list[Values]] = {
    "algorithm.advantage_std": [{"advantage": "grpo"}, {"advantage": "sum_then_normalize"}],
    "algorithm.advantage_counts": [{"advantage": "gdpo"}, {"advantage": "reinforce_plus_plus"}],
    "algorithm.passk": [{"advantage": "grpo_passk"}],
    "algorithm.passk_std": [{"advantage": "grpo_passk"}],
    "algorithm.reward_weights": [{"advantage": "gdpo"}, {"advantage": "sum_then_normalize"}],
    "algorithm.gamma": [{"advantage": "gae"}, {"advantage": "reinforce_plus_plus_tokens"}],
    **{k: [{"advantage": "gae"}] for k in ("algorithm.gae_lambda", *CRITIC)},
    "algorithm.dual_clip": [{"loss": "clip"}, {"loss": "decoupled"}],
    "algorithm.aggregation_norm": [{"aggregation": "seq-mean-token-sum-norm"}],
    "algorithm.loss_options": [
        {"loss": "dro"},
        {"loss": "vespo"},
        {"loss": "sapo"},
        {"loss": "kl_cov"},
        {"loss": "clip_cov"},
        {"loss": "dppo_kl"},
    ],
    "algorithm.kl_kind": [{"kl_coef": 0.3}],
    "algorithm.kl_max": [{"kl_coef": 0.3, "kl_kind": "k3"}, {"kl_coef": 0.3, "kl_kind": "k3+"}],
    "algorithm.kl_bias_correction": [{"kl_coef": 0.3}],
    "algorithm.correction_floor": [{"correction": c} for c in VALUES["algorithm.correction"][1:]],
    "filters.mask_overlong": [{"filters.overlong_tokens": 4, "filters.max_overlong_share": 0.5}],
    "filters.overlong_tokens": [{"filters.mask_overlong": True}],
    "filters.mask_in_baseline": [{"filters.mask_truncated": True}],
}
THE_RATIO = ("algorithm.loss", "algorithm.proximal", "algorithm.correction", "algorithm.allow_uncorrected")
# Where rollouts come from: fresh ones, and everything that makes them off-policy.
FRESH: Values = {}
SEVERAL_UPDATES: list[Values] = [
    {"train.minibatches_per_step": 4},
    {"train.epochs_per_step": 2},
    {"train.minibatches_per_step": 2, "train.epochs_per_step": 3},
]
OFF_POLICY: list[Values] = [
    {"rollout.max_staleness": 2, "rollout.in_flight_groups": 24},
    {"rollout.max_staleness": 1, "rollout.in_flight_groups": 12, "rollout.interrupt": "when_enough"},
    {"rollout.max_staleness": 1, "rollout.in_flight_groups": 12, "rollout.on_stale": "mask",
     "rollout.interrupt": "when_enough"},
    {"rollout.overlap": True, "rollout.max_staleness": 1, "rollout.in_flight_groups": 16},
    {"rollout.top_p": 0.9},
    {"rollout.top_k": 5},
    {"rollout.min_p": 0.1},
    {"replay.size": 4},
    {"run.train_on_recorded": "recorded"},
]  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """An accepted configuration: what was set, and what it came to."""

    preset: str
    values: Values
    config: Config


def load(preset: str, values: Values) -> Config:
    """The resolved configuration of a preset and values in one layer above it. ConfigError where it is refused."""
    overrides = [("algorithm.preset", preset), *((key, _text(value)) for key, value in values.items())]
    return load_config([], overrides, require_sources=False).config


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_text(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def draw(rng: random.Random, about: str | None = None, off_policy: bool | None = None, always: Values = FRESH) -> Drawn:
    """An accepted configuration, which sets the key `about` and has what is `always` so; `off_policy`: whether rollouts
    are (None: either)."""
    while True:
        off = rng.random() < 0.5 if off_policy is None else off_policy
        keys = rng.sample(sorted(VALUES), rng.randint(0, 3)) + ([about] if about else [])
        keys += [key for key in THE_RATIO if rng.random() < 0.5]
        values = always | (rng.choice(OFF_POLICY) if off else FRESH) | {key: rng.choice(VALUES[key]) for key in keys}
        if about in COMPANIONS and rng.random() < 0.5:
            extra = rng.choice(COMPANIONS[about])
            values |= {key if "." in key else f"algorithm.{key}": value for key, value in extra.items()}
        preset = rng.choice(sorted(PRESETS))
        for _ in range(6):
            try:
                config = load(preset, values)
                objective = Objective(config.algorithm, 16)  # the last door: options that the loss does not take
            except (ConfigError, ValueError) as error:
                inert = set(re.findall(r"(\S+) has no effect", str(error))) - {about}
                if not inert & values.keys():
                    break
                values = {key: value for key, value in values.items() if key not in inert}
            else:
                assert objective.config is config.algorithm
                return Drawn(preset, values, config)


# The batch


def _rollout(rng: np.random.Generator, group: int, sibling: int, equal: bool) -> Rollout:
    greedy = sibling == 4
    segments = []
    for version in sorted(rng.choice(VERSION + 1, rng.integers(1, 3), replace=False)):
        n = int(rng.integers(1, 5))
        behavior = -rng.uniform(0.05, 2.5, n).astype(np.float32)
        sampling = SamplingParams(temperature=0.0 if greedy else 1.0)
        ids = rng.integers(2, 99, n).astype(np.int32)
        segments.append(Segment(ids, behavior, int(version), sampling, StopReason.PAUSED))
    score = 0.5 if equal else float(rng.choice([0.0, 1.0, 0.3, -0.5]))
    missing = not equal and sibling == 3 and group == 0
    reward = Reward(None, error="timeout") if missing else Reward(score, extras={"short": float(rng.random())})
    stop = StopReason.LENGTH if rng.random() < 0.3 else StopReason.EOS
    task = Task(f"t{group}", "test", "reward", prompt="x")
    return Rollout(group, sibling, task, segments, RolloutState.READY, stop, reward)


def _groups(rng: np.random.Generator) -> list[Group]:
    groups = []
    for g in range(4):
        rollouts = [_rollout(rng, g, i, equal=g == 2) for i in range(5)]
        groups.append(Group(g, rollouts[0].task, Prompt((5, 6)), rollouts))
    return groups


Policies = dict[str, dict[str, np.ndarray]]


def _policies(rng: np.random.Generator, groups: list[Group]) -> Policies:
    """policy -> rollout_id -> log-probs of all tokens; rollouts from near to far from the policy that sampled them."""
    out: Policies = {}
    for r in (r for g in groups for r in g.rollouts):
        behavior = np.concatenate([s.logprobs for s in r.segments])
        scale = 10 ** rng.uniform(-2.5, 0)
        drift = scale * rng.standard_normal()
        for name in ("snapshot", "start", "current", "reference"):
            noise = drift + scale * rng.standard_normal(len(behavior))
            if name == "current":
                noise += rng.choice([-0.5, 0.0, 1.0], len(behavior), p=[0.2, 0.6, 0.2])  # ratios far from 1, too
            values = np.minimum(behavior + noise, -1e-3).astype(np.float32)
            out.setdefault(name, {})[r.rollout_id] = values
    return out


@functools.cache
def _batch(seed: int) -> tuple[list[Group], Policies]:
    rng = np.random.default_rng(seed)
    groups = _groups(rng)
    return groups, _policies(rng, groups)


_HIDDEN = 8


def objective_of(config: Config, seed: int = 0, behavior_shift: float = 0.0, before_update: float = 0.0) -> np.ndarray:
    """All that the configuration makes of a random batch: loss, gradient of every token's log-prob and entropy, factor
    of the learning rate; and of a critic the gradient and where its step goes.

    `behavior_shift`: added to the behavior log-probs of stale tokens alone, in turns up and down. `before_update`: to
    those of all tokens, as to the log-probs of all policies before the step's first update.
    """
    algorithm = config.algorithm
    groups, policies = _batch(seed)

    def log_probs(s: Sample, policy: str) -> np.ndarray:
        shift = before_update if policy in ("snapshot", "start") else 0.0
        return (policies[policy][s.rollout_id] + _signs(s, shift))[s.mask]

    groups = [replace(g, rollouts=g.rollouts[: 5 if config.rollout.greedy_baseline else 4]) for g in groups]
    oldest = config.rollout.oldest_in_loss(VERSION)
    samples = build_batch(groups, algorithm, oldest, rollout_filters(config.filters)).samples
    samples = [_shifted(s, behavior_shift, before_update) for s in samples]
    critic = None
    if algorithm.needs_critic:
        critic = Critic(_HIDDEN, config.critic, config.train, 1, torch.device("cpu"))
        torch.nn.init.constant_(critic.head.weight, 0.3)
        asked = with_bootstrap_token(samples) if config.critic.bootstrap_truncated else samples
        values: Stream = {s.rollout_id: 0.5 + log_probs(s, "start") for s in samples}
        for s, of_asked in zip(samples, asked, strict=True):
            num_more = of_asked.num_loss_tokens - s.num_loss_tokens
            values[s.rollout_id] = np.append(values[s.rollout_id], np.full(num_more, 0.4, np.float32))
        samples = estimate_with_critic(algorithm, samples, values)
    elif algorithm.advantage_traits.over_tokens:
        samples = estimate_tokens(algorithm, [_with_statistics(s, policies) for s in samples])
    objective = Objective(algorithm, 16)
    proximal = "snapshot" if algorithm.proximal == "snapshot" else "start"
    samples = [s.with_loss_stream("proximal_logprobs", log_probs(s, proximal)) for s in samples]
    samples = [s.with_streams(start_logprobs=s.streams["proximal_logprobs"]) for s in samples]
    if algorithm.rejection:
        samples = [without_rejected(algorithm, s, VERSION) for s in samples]
    samples = [s for s in samples if s.mask.any()]
    if not samples:
        return np.zeros(1)
    entropies = [0.5 + log_probs(s, "start") ** 2 for s in samples]
    samples = [s.with_loss_stream("statistics_entropy", of) for s, of in zip(samples, entropies, strict=True)]
    (samples,), _ = with_weights(algorithm, [samples], VERSION)
    torch.default_generator.manual_seed(0)  # clip_cov draws
    current_BT = _padded(samples, [log_probs(s, "current") for s in samples]).requires_grad_(True)
    entropy_BT = _padded(samples, entropies).requires_grad_(True)
    samples = [s.with_loss_stream("reference_logprobs", log_probs(s, "reference")) for s in samples]
    samples = [s.with_loss_stream("staleness", staleness(s.in_loss("versions"), VERSION)) for s in samples]
    streams = token_batch(samples).with_streams(logprobs=current_BT, entropy=entropy_BT)
    loss, sums = objective(streams, Counts.from_samples(samples))
    gradients = torch.autograd.grad(loss, (current_BT, entropy_BT), allow_unused=True)
    rate = rate_scale({k: float(v) for k, v in sums.items()}) if algorithm.ess_step_scaling else 1.0
    parts = [np.array([loss.item(), rate]), *(np.zeros(1) if g is None else g.numpy().ravel() for g in gradients)]
    if critic is not None:
        parts += _critic_step(critic, samples, seed)
    return np.concatenate([p.astype(np.float64) for p in parts])


def _with_statistics(s: Sample, policies: Policies) -> Sample:
    """As a backend would tell them, of a distribution over two tokens."""
    logprobs = policies["start"][s.rollout_id][s.mask]
    p = np.exp(logprobs)
    for name, values in zip(STATISTICS, (logprobs, -p * logprobs, p**2 + (1 - p) ** 2), strict=True):
        s = s.with_loss_stream(name, values.astype(np.float32))
    return s


def _critic_step(critic: Critic, samples: list[Sample], seed: int) -> list[np.ndarray]:
    values_M, returns_M = (
        torch.from_numpy(np.concatenate([s.in_loss(name) for s in samples])) for name in ("values", "returns")
    )
    hidden_ME = torch.randn(len(values_M), _HIDDEN, generator=torch.Generator().manual_seed(seed)) - 0.3
    critic.forward_backward(hidden_ME, values_M, returns_M, len(values_M))
    gradients = [g.numpy().ravel().copy() for g in critic.gradients()]
    critic.step()
    return [*gradients, critic.head.weight.detach().numpy().ravel()]


def _signs(s: Sample, shift: float) -> np.ndarray:
    """In turns up and down [n]."""
    return np.where(np.arange(len(s.mask)) % 2, shift, -0.7 * shift).astype(np.float32)


def _shifted(s: Sample, of_stale: float, of_all: float) -> Sample:
    stale = s.versions < VERSION
    change = np.where(stale, _signs(s, of_stale), 0) + _signs(s, of_all)
    return s.with_streams(behavior_logprobs=(s.behavior_logprobs + change).astype(np.float32))


def _padded(samples: list[Sample], rows: list[np.ndarray]) -> torch.Tensor:
    """[B, T] float32: each row's loss tokens at their places, 0 elsewhere."""
    out = np.zeros((len(samples), max(len(s.mask) for s in samples)), np.float32)
    for i, (s, values) in enumerate(zip(samples, rows, strict=True)):
        out[i, np.flatnonzero(s.mask)] = values
    return torch.from_numpy(out)

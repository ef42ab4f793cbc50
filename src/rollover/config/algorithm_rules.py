"""The rules about [algorithm]: options without effect, and combinations that are refused."""

from __future__ import annotations

from rollover.config import Config
from rollover.config.algorithm import ADVANTAGES, CLIPPED, LOSSES, WITHOUT_SIBLINGS
from rollover.config.fields import did_you_mean
from rollover.config.rule import Inert, Refused


def truncates_sampling(config: Config) -> bool:
    rollout = config.rollout
    return rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0


def _is_own(name: str) -> bool:
    return ":" in name


def _compares_with_behavior(config: Config) -> bool:
    """Whether the loss itself holds the ratio to the policy that sampled, so that nothing is left to correct."""
    return config.algorithm.loss == "decoupled" or (
        config.algorithm.proximal == "behavior" and config.algorithm.loss != "reinforce"
    )


def uncorrected(config: Config) -> bool:
    algorithm = config.algorithm
    return algorithm.correction == "none" and not algorithm.allow_uncorrected and not _compares_with_behavior(config)


def _unless_advantage(options: tuple[str, ...], *advantages: str) -> Inert:
    """`options` have an effect with these advantages only."""
    return Inert(
        tuple(f"algorithm.{option}" for option in options),
        ("algorithm.advantage",),
        lambda c: c.algorithm.advantage not in advantages,
        f"unless algorithm.advantage is {' or '.join(advantages)}",
    )


INERT: tuple[Inert, ...] = (
    Inert(
        ("algorithm.clip_low", "algorithm.clip_high"),
        ("algorithm.loss",),
        lambda c: c.algorithm.loss not in CLIPPED and not _is_own(c.algorithm.loss),
        f"unless algorithm.loss is one of {', '.join(CLIPPED)}",
    ),
    Inert(
        ("algorithm.dual_clip",),
        ("algorithm.loss",),
        lambda c: c.algorithm.loss not in ("clip", "decoupled") and not _is_own(c.algorithm.loss),
        "unless algorithm.loss is clip or decoupled",
    ),
    _unless_advantage(("advantage_std",), "grpo", "sum_then_normalize"),
    _unless_advantage(("passk",), "grpo_passk"),
    _unless_advantage(("reward_weights",), "gdpo", "sum_then_normalize"),
    _unless_advantage(("gamma", "gae_lambda", "critic_learning_rate", "value_clip"), "gae"),
    Inert(
        ("rollout.greedy_baseline",),
        ("algorithm.advantage",),
        lambda c: c.algorithm.advantage != "remax",
        'unless algorithm.advantage = "remax": no other estimator compares with a greedy rollout',
    ),
    Inert(
        ("algorithm.correction_cap", "algorithm.correction_floor"),
        ("algorithm.correction",),
        lambda c: c.algorithm.correction == "none" and c.algorithm.loss != "decoupled",
        'with algorithm.correction = "none"',
    ),
    Inert(
        ("algorithm.correction_floor",),
        ("algorithm.loss",),
        lambda c: c.algorithm.loss == "decoupled",
        'with algorithm.loss = "decoupled", which has a cap only',
    ),
    Inert(
        ("algorithm.correction",),
        ("algorithm.proximal",),
        lambda c: c.algorithm.proximal == "behavior",
        'with algorithm.proximal = "behavior": proximal/behavior is 1 everywhere',
    ),
    Inert(
        ("algorithm.correction",),
        ("algorithm.loss",),
        lambda c: c.algorithm.loss == "decoupled",
        'with algorithm.loss = "decoupled", which holds the weight itself',
        "Use loss = clip for another correction",
    ),
    Inert(
        ("algorithm.rejection",),
        ("algorithm.proximal",),
        lambda c: c.algorithm.proximal == "behavior",
        'with algorithm.proximal = "behavior": they are the same policy',
    ),
    Inert(
        ("algorithm.rejection_high",),
        ("algorithm.rejection",),
        lambda c: c.algorithm.rejection == "none",
        'with algorithm.rejection = "none"',
    ),
    Inert(
        ("algorithm.ess_step_scaling",),
        ("algorithm.correction",),
        lambda c: c.algorithm.correction == "none" and c.algorithm.loss != "decoupled",
        'with algorithm.correction = "none": all weights are 1',
    ),
    Inert(
        ("algorithm.allow_uncorrected",),
        ("algorithm.correction",),
        lambda c: c.algorithm.correction != "none",
        'unless algorithm.correction = "none"',
    ),
    Inert(
        ("algorithm.allow_uncorrected",),
        ("algorithm.loss", "algorithm.proximal"),
        _compares_with_behavior,
        "as the loss holds the ratio to the policy that sampled",
    ),
    Inert(
        ("algorithm.allow_uncorrected",),
        ("rollout.max_staleness", "rollout.top_p", "rollout.top_k", "rollout.min_p", "replay.size"),
        lambda c: not (c.rollout.max_staleness or truncates_sampling(c) or c.run.replay_rollouts or c.replay.size),
        "with rollout.max_staleness = 0, untruncated sampling and no replay: there is nothing to correct",
    ),
    Inert(
        ("algorithm.kl_kind", "algorithm.kl_bias_correction"),
        ("algorithm.kl_coef",),
        lambda c: not c.algorithm.kl_coef,
        "with algorithm.kl_coef = 0",
        "Set algorithm.kl_coef",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        ("algorithm.advantage",),
        lambda c: c.algorithm.advantage not in ADVANTAGES and not _is_own(c.algorithm.advantage),
        lambda c: (
            f'algorithm.advantage = "{c.algorithm.advantage}" is none of {", ".join(ADVANTAGES)}, and no function'
            f" (module:function or path.py:function){did_you_mean(c.algorithm.advantage, ADVANTAGES)}"
        ),
    ),
    Refused(
        ("algorithm.loss",),
        lambda c: c.algorithm.loss not in LOSSES and not _is_own(c.algorithm.loss),
        lambda c: (
            f'algorithm.loss = "{c.algorithm.loss}" is none of {", ".join(LOSSES)}, and no function'
            f" (module:function or path.py:function){did_you_mean(c.algorithm.loss, LOSSES)}"
        ),
    ),
    Refused(
        ("algorithm.reward_weights",),
        lambda c: not all(_is_number(w) for w in c.algorithm.reward_weights.values()),
        lambda c: (
            f"algorithm.reward_weights = {c.algorithm.reward_weights}: every weight must be a number, for instance"
            " { score = 1.0, format = 0.5 }"
        ),
    ),
    Refused(
        ("rollout.max_staleness", "algorithm.correction"),
        lambda c: c.rollout.max_staleness > 0 and uncorrected(c),
        lambda c: (
            f'rollout.max_staleness = {c.rollout.max_staleness} with algorithm.correction = "none": tokens of older'
            ' policy versions would be trained as if they were fresh. Set algorithm.correction = "token_truncate", or'
            " rollout.max_staleness = 0, or (if you mean it) algorithm.allow_uncorrected = true"
        ),
    ),
    Refused(
        ("rollout.top_p", "rollout.top_k", "rollout.min_p", "algorithm.correction"),
        lambda c: truncates_sampling(c) and uncorrected(c),
        lambda c: (
            'truncated sampling (rollout.top_p, top_k or min_p) with algorithm.correction = "none": log-probs of the'
            ' truncated distribution are not those of the policy. Set algorithm.correction = "token_truncate", sample'
            " untruncated, or (if you mean it) set algorithm.allow_uncorrected = true"
        ),
    ),
    Refused(
        ("rollout.group_size", "algorithm.advantage"),
        lambda c: c.rollout.group_size < 2 and c.algorithm.advantage not in WITHOUT_SIBLINGS,
        lambda c: (
            f'rollout.group_size = {c.rollout.group_size} with algorithm.advantage = "{c.algorithm.advantage}": a'
            " baseline needs at least 2 sibling rollouts. Set rollout.group_size to 2 or more"
        ),
    ),
    Refused(
        ("rewards.min_valid", "rollout.group_size"),
        lambda c: (
            c.rewards.min_valid > c.rollout.group_size
            and (c.rollout.group_size >= 2 or c.algorithm.advantage in WITHOUT_SIBLINGS)
        ),
        lambda c: (
            f"rewards.min_valid = {c.rewards.min_valid} is above rollout.group_size = {c.rollout.group_size}: every"
            " group would be dropped. Lower it"
        ),
    ),
    Refused(
        ("rewards.min_valid", "algorithm.advantage"),
        lambda c: c.rewards.min_valid < 2 and c.algorithm.advantage not in WITHOUT_SIBLINGS,
        lambda c: (
            f'rewards.min_valid = {c.rewards.min_valid} with algorithm.advantage = "{c.algorithm.advantage}": one'
            " reward has no sibling to be compared with. Set rewards.min_valid to 2 or more"
        ),
    ),
    Refused(
        ("algorithm.proximal", "run.replay_rollouts"),
        lambda c: c.algorithm.proximal == "snapshot" and bool(c.run.replay_rollouts),
        lambda c: (
            'algorithm.proximal = "snapshot" with run.replay_rollouts: the weights that sampled recorded rollouts are'
            ' not kept. Set algorithm.proximal = "step_start"'
        ),
    ),
    Refused(
        ("algorithm.kl_bias_correction", "algorithm.kl_kind"),
        lambda c: c.algorithm.kl_bias_correction and c.algorithm.kl_kind not in ("k1", "k3"),
        lambda c: (
            f'algorithm.kl_bias_correction with algorithm.kl_kind = "{c.algorithm.kl_kind}": only k1 and k3 have a'
            ' bias-corrected form. Set algorithm.kl_kind = "k3"'
        ),
    ),
    Refused(
        ("algorithm.passk", "rollout.group_size"),
        lambda c: c.algorithm.advantage == "grpo_passk" and c.algorithm.passk > c.rollout.group_size,
        lambda c: (
            f"algorithm.passk = {c.algorithm.passk} is above rollout.group_size = {c.rollout.group_size}: there are"
            " not so many siblings. Lower it"
        ),
    ),
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

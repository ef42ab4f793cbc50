"""The rules about [algorithm]: options without effect, and combinations that are refused."""

from __future__ import annotations

from collections.abc import Callable

from rollover.config import Config
from rollover.config.algorithm import ADVANTAGES, LOSSES, WITHOUT_SIBLINGS
from rollover.config.fields import did_you_mean
from rollover.config.rule import Inert, Refused

_BOUNDED = tuple(name for name, traits in LOSSES.items() if traits.bounds)
_DUAL_CLIPPED = tuple(name for name, traits in LOSSES.items() if traits.dual_clip)
_BOUNDS_AS_SHARES = ("clip", "decoupled", "gspo", "luspo", "cispo", "clip_cov", "dppo_tv")  # of a ratio or probability
_NOT_FREE = {
    "clip_low": "algorithm.clip_low",
    "clip_high": "algorithm.clip_high",
    "dual_clip": "algorithm.dual_clip",
    "weight_cap": "algorithm.correction_cap",
    "behavior_logprobs_BT": "nothing: it is given",
}


def _truncates_sampling(config: Config) -> bool:
    rollout = config.rollout
    return rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0


def _forgets_minibatches(config: Config) -> bool:
    """Whether later minibatches of a step may be trained as if the earlier ones had changed nothing."""
    return config.train.minibatches_per_step > 1 and not config.algorithm.follows_updates


def _forgotten(config: Config) -> str:
    num = config.train.minibatches_per_step
    nothing_else = "accounts for what the earlier minibatches of a step changed. Set train.minibatches_per_step = 1,"
    if config.algorithm.loss_traits.ratio is None:
        return (
            f"train.minibatches_per_step = {num} with a loss of your own: it is not known whether it holds the ratio of"
            f" current and old log-probs (ratio_BT), and nothing else {nothing_else} or (if it does) set"
            " algorithm.allow_uncorrected = true"
        )
    return (
        f'train.minibatches_per_step = {num} with algorithm.loss = "{config.algorithm.loss}" and algorithm.correction ='
        f' "none": nothing {nothing_else} algorithm.correction = "token_truncate", or (if you mean it)'
        " algorithm.allow_uncorrected = true"
    )


def _is_own(name: str) -> bool:
    return ":" in name


def _never_negative(config: Config) -> bool:
    algorithm = config.algorithm
    return algorithm.advantage == "grpo_passk" and not (algorithm.after_scoring or _is_own(algorithm.loss))


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
        lambda c: not c.algorithm.loss_traits.bounds,
        f"unless algorithm.loss is one of {', '.join(_BOUNDED)}",
    ),
    Inert(
        ("algorithm.dual_clip",),
        ("algorithm.loss",),
        lambda c: not c.algorithm.loss_traits.dual_clip,
        f"unless algorithm.loss is {' or '.join(_DUAL_CLIPPED)}",
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
        ("algorithm.clip_low", "algorithm.dual_clip"),
        ("algorithm.advantage",),
        lambda c: _never_negative(c) and c.algorithm.loss != "cispo",
        'with algorithm.advantage = "grpo_passk": it concerns negative advantages, and none is',
    ),
    Inert(
        ("algorithm.off_policy_mask_threshold",),
        ("algorithm.advantage",),
        _never_negative,
        'with algorithm.advantage = "grpo_passk": it concerns negative advantages, and none is',
    ),
    Inert(
        ("algorithm.proximal",),
        ("algorithm.loss",),
        lambda c: c.algorithm.loss_traits.ratio is False,
        'with algorithm.loss = "reinforce", which holds no ratio to it: its importance weight is current/behavior',
    ),
    Inert(
        ("algorithm.correction",),
        ("algorithm.proximal",),
        lambda c: c.algorithm.proximal_policy == "behavior",
        'with algorithm.proximal = "behavior": proximal/behavior is 1 everywhere',
        neutral=("none",),
    ),
    Inert(
        ("algorithm.correction",),
        ("algorithm.loss",),
        lambda c: c.algorithm.loss_traits.weighs and c.algorithm.proximal_policy != "behavior",  # else it says so above
        'with algorithm.loss = "decoupled", which holds the weight of token_truncate itself',
        "Use loss = clip for another correction",
    ),
    Inert(
        ("algorithm.correction_cap", "algorithm.correction_floor", "algorithm.ess_step_scaling"),
        ("algorithm.proximal",),
        lambda c: c.algorithm.proximal_policy == "behavior",
        'with algorithm.proximal = "behavior": the importance weight proximal/behavior is 1 everywhere',
    ),
    Inert(
        ("algorithm.correction_cap", "algorithm.correction_floor", "algorithm.ess_step_scaling"),
        ("algorithm.correction",),
        lambda c: c.algorithm.weight == "none" and c.algorithm.proximal_policy != "behavior",
        'with algorithm.correction = "none": all weights are 1',
    ),
    Inert(
        ("algorithm.correction_floor",),
        ("algorithm.loss",),
        lambda c: c.algorithm.loss_traits.weighs,
        'with algorithm.loss = "decoupled", which has a cap only',
    ),
    Inert(
        ("algorithm.rejection",),
        ("algorithm.proximal",),
        lambda c: c.algorithm.proximal_policy == "behavior",
        'with algorithm.proximal = "behavior": they are the same policy',
    ),
    Inert(
        ("algorithm.rejection_high",),
        ("algorithm.rejection",),
        lambda c: c.algorithm.rejection == "none",
        'with algorithm.rejection = "none"',
    ),
    Inert(
        ("algorithm.allow_uncorrected",),
        ("algorithm.correction", "algorithm.loss", "algorithm.proximal", "train.minibatches_per_step"),
        lambda c: c.algorithm.corrects and not _forgets_minibatches(c),
        "as the loss holds the ratio to the policy that sampled",
    ),
    Inert(
        ("algorithm.allow_uncorrected",),
        (
            *("rollout.max_staleness", "rollout.top_p", "rollout.top_k", "rollout.min_p", "replay.size"),
            "train.minibatches_per_step",
        ),
        lambda c: (
            not (
                c.rollout.max_staleness
                or _truncates_sampling(c)
                or c.run.replay_rollouts
                or c.replay.size
                or _forgets_minibatches(c)
            )
        ),
        "with rollout.max_staleness = 0, untruncated sampling, no replay and one minibatch a step (or a loss that is"
        " known to hold the ratio to the step's start): there is nothing to correct",
    ),
    Inert(
        ("algorithm.kl_kind", "algorithm.kl_bias_correction"),
        ("algorithm.kl_coef",),
        lambda c: not c.algorithm.kl_coef,
        "with algorithm.kl_coef = 0",
        "Set algorithm.kl_coef",
    ),
)


def _uncorrected(
    keys: tuple[str, ...],
    when: Callable[[Config], bool],
    what: Callable[[Config], str],
    why: str,
    fix: str,
) -> Refused:
    """`what` needs the ratio to the policy that sampled, and the loss, so far as is known, does not hold it."""

    def message(config: Config) -> str:
        algorithm = config.algorithm
        if algorithm.weight != "none" or (algorithm.loss_traits.ratio is None and algorithm.proximal != "step_start"):
            cause = f'a loss of your own and algorithm.proximal = "{algorithm.proximal}"'
            otherwise = (
                'algorithm.proximal = "step_start" with a correction, or (if your loss multiplies by the ratio of'
                " current and old log-probs)"
            )
        else:
            cause = 'algorithm.correction = "none"'
            otherwise = 'algorithm.correction = "token_truncate", or (if you mean it)'
        return f"{what(config)} with {cause}: {why}. {fix}, or set {otherwise} algorithm.allow_uncorrected = true"

    return Refused(
        (*keys, "algorithm.correction", "algorithm.proximal", "algorithm.loss"),
        lambda c: when(c) and not (c.algorithm.corrects or c.algorithm.allow_uncorrected),
        message,
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
            f" (module:function or path.py:function){did_you_mean(c.algorithm.loss, tuple(LOSSES))}"
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
    _uncorrected(
        ("rollout.max_staleness",),
        lambda c: c.rollout.max_staleness > 0,
        lambda c: f"rollout.max_staleness = {c.rollout.max_staleness}",
        "tokens of older policy versions would be trained as if they were fresh",
        "Set rollout.max_staleness = 0",
    ),
    _uncorrected(
        ("rollout.top_p", "rollout.top_k", "rollout.min_p"),
        _truncates_sampling,
        lambda _: "truncated sampling (rollout.top_p, top_k or min_p)",
        "log-probs of the truncated distribution are not those of the policy",
        "Sample untruncated",
    ),
    _uncorrected(
        ("replay.size",),
        lambda c: c.replay.size > 0,
        lambda c: f"replay.size = {c.replay.size}",
        "tokens of older policy versions would be trained as if they were fresh",
        "Remove replay.size",
    ),
    _uncorrected(
        ("run.replay_rollouts",),
        lambda c: bool(c.run.replay_rollouts),
        lambda _: "run.replay_rollouts",
        "recorded rollouts were sampled by another policy and would be trained as if they were fresh",
        "Remove run.replay_rollouts",
    ),
    Refused(
        ("train.minibatches_per_step", "algorithm.loss", "algorithm.correction"),
        lambda c: _forgets_minibatches(c) and not c.algorithm.allow_uncorrected,
        _forgotten,
    ),
    Refused(
        ("algorithm.advantage", "rollout.greedy_baseline"),
        lambda c: c.algorithm.advantage == "remax" and not c.rollout.greedy_baseline,
        lambda _: (
            'algorithm.advantage = "remax" without rollout.greedy_baseline: there is no greedy rollout to compare'
            " with, all advantages would be 0. Set rollout.greedy_baseline = true"
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
        ("algorithm.proximal", "rollout.max_staleness", "replay.size"),
        lambda c: (
            c.algorithm.proximal_policy == "interpolated"
            and c.staleness_bound <= 1
            and not (c.replay.size or c.run.replay_rollouts)
        ),
        lambda c: (
            f'algorithm.proximal = "interpolated" with a staleness of {c.staleness_bound} at most: at 0 and 1 that is'
            ' the behavior policy itself. Set algorithm.proximal = "behavior", or rollout.max_staleness to 2 or more'
        ),
    ),
    Refused(
        ("algorithm.kl_kind", "algorithm.kl_coef"),
        lambda c: c.algorithm.kl_coef > 0 and c.algorithm.kl_kind == "k1" and not c.algorithm.kl_bias_correction,
        lambda _: (
            'algorithm.kl_kind = "k1" in the loss: the gradient of that estimate is 0 on average. Set'
            ' algorithm.kl_kind = "k3", "k2" or "k1+" (its value, with the gradient of k2), or'
            " algorithm.kl_bias_correction = true"
        ),
    ),
    Refused(
        ("algorithm.dual_clip",),
        lambda c: 0 < c.algorithm.dual_clip <= 1,
        lambda c: (
            f"algorithm.dual_clip = {c.algorithm.dual_clip:g}: it bounds the ratio where the advantage is negative, on"
            " policy too unless it is above 1. Set it to 3, say, or to 0 (off)"
        ),
    ),
    Refused(
        ("algorithm.clip_low", "algorithm.loss"),
        lambda c: c.algorithm.clip_low > 1 and c.algorithm.loss in _BOUNDS_AS_SHARES,
        lambda c: (
            f'algorithm.clip_low = {c.algorithm.clip_low:g} with algorithm.loss = "{c.algorithm.loss}": nothing falls'
            " by more than 1. Set it to 1 (no bound) or less"
        ),
    ),
    Refused(
        ("algorithm.clip_high", "algorithm.loss"),
        lambda c: c.algorithm.clip_high > 1 and c.algorithm.loss == "dppo_tv",
        lambda c: (
            f'algorithm.clip_high = {c.algorithm.clip_high:g} with algorithm.loss = "dppo_tv": a probability never'
            " rises by more than 1. Set it to 1 (no bound) or less"
        ),
    ),
    Refused(
        ("algorithm.loss_options",),
        lambda c: any(name in _NOT_FREE for name in c.algorithm.loss_options),
        lambda c: "\n".join(
            f"algorithm.loss_options.{name} is set by {_NOT_FREE[name]}. Remove it from algorithm.loss_options"
            for name in c.algorithm.loss_options
            if name in _NOT_FREE
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

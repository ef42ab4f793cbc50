"""The rules about off-policy correction: which ratio the loss holds to the policy that sampled.

They are about [algorithm], and about whatever makes rollouts off-policy.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

from rollover.config.logits import LogitsConfig
from rollover.config.table import Inert, Refused, Rule, value_of, wrong
from rollover.functions import is_number
from rollover.suggest import did_you_mean

Correction = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop", "segment_truncate",
    "segment_mask",
]  # fmt: skip
REJECTIONS = tuple(
    f"{level}_{kind}"
    for level in ("token", "sequence_sum", "sequence_mean", "sequence_max")
    for kind in ("k1", "k2", "k3")
)
"""What algorithm.rejection may name: over what an estimate is taken, and which."""
_UPDATES = ("train.minibatches_per_step", "train.epochs_per_step")


def _wrong_bound(name: str, bound: Any) -> str:
    """Return the error of a bound of algorithm.rejection, with the allowed values; "" if it is valid."""
    if name not in REJECTIONS:
        return f"it is none of {', '.join(REJECTIONS)}{did_you_mean(name, REJECTIONS)}"
    if is_number(bound):
        return "" if bound > 0 else "the largest divergence that is kept must be above 0"
    pair = isinstance(bound, list | tuple) and len(bound) == 2 and all(map(is_number, bound))
    if not pair or not name.endswith("k1"):
        also = ", or the lowest and the largest: [-0.1, 0.2]" if name.endswith("k1") else ""
        return f"give the largest divergence that is kept, 0.1 for instance{also}"
    return "" if bound[0] <= bound[1] else "the lowest is above the largest"


_SAMPLING = (
    "rollout.top_p",
    "rollout.top_k",
    "rollout.min_p",
    *(f"rollout.logits.{n}" for n in LogitsConfig.model_fields),
)


def _alters_sampling(config: Any) -> bool:
    rollout = config.rollout
    return rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0 or rollout.logits.alters


def _forgets_minibatches(config: Any) -> bool:
    """Whether later updates of a step may be trained as if the earlier ones had changed nothing."""
    return config.train.updates_per_step > 1 and not config.algorithm.follows_updates


def _several_updates(train: Any) -> tuple[str, str]:
    """Return (the options because of which a step has several updates, with values; the same, set so that it has
    one)."""
    counts = {name: getattr(train, name) for name in ("minibatches_per_step", "epochs_per_step")}
    above = {f"train.{name}": num for name, num in counts.items() if num > 1}
    return " and ".join(f"{key} = {num}" for key, num in above.items()), " and ".join(f"{key} = 1" for key in above)


def ratio_is_one(config: Any) -> bool:
    """Whether the current/proximal ratio is 1 at every token: a step has one update, and it begins with the proximal
    policy."""
    algorithm = config.algorithm
    all_fresh = not config.staleness_bound and not config.replay.size
    begins_with = algorithm.proximal == "step_start" or (algorithm.proximal == "snapshot" and all_fresh)
    return config.train.updates_per_step == 1 and algorithm.loss_traits.ratio is True and begins_with


OF_RATIO = ("algorithm.loss", "algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip")
"""What acts on that ratio."""


def _forgotten(config: Any) -> str:
    several, one = _several_updates(config.train)
    nothing_else = f"accounts for what the earlier updates of a step changed. Set {one},"
    if config.algorithm.loss_traits.ratio is None:
        return (
            f"{several} with a custom loss: it is not known whether it holds the ratio of"
            f" current and old log-probs (ratio_BT), and nothing else {nothing_else} or (if it does) set"
            " algorithm.allow_uncorrected = true"
        )
    return (
        f'{several} with algorithm.loss = "{config.algorithm.loss}" and algorithm.correction ='
        f' "none": nothing {nothing_else} algorithm.correction = "token_truncate", or (if you mean it)'
        " algorithm.allow_uncorrected = true"
    )


def _uncorrected(
    keys: tuple[str, ...],
    when: Callable[[Any], bool],
    what: Callable[[Any], str],
    why: str,
    fix: str,
) -> Refused:
    """Return the rule that `what` needs the ratio to the sampling policy, which the loss is not known to hold."""

    def message(config: Any) -> str:
        algorithm = config.algorithm
        if algorithm.weight != "none" or (algorithm.loss_traits.ratio is None and algorithm.proximal != "step_start"):
            cause = f'a custom loss and algorithm.proximal = "{algorithm.proximal}"'
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


_OF_WEIGHTS = (
    *("algorithm.correction_cap", "algorithm.correction_floor", "algorithm.correction_normalize"),
    "algorithm.ess_step_scaling",
)
_WHOLE_STEP = {
    "algorithm.correction_normalize": lambda c: c.algorithm.correction_normalize,
    "algorithm.top_entropy_share": lambda c: c.algorithm.top_entropy_share < 1,
}
"""What is taken over the tokens of a whole step or minibatch, and when it is on."""

RULES: tuple[Rule, ...] = (
    *(
        Refused(
            (key, "train.streaming_min_groups"),
            lambda c, on=on: on(c) and c.train.streaming_min_groups > 0,
            lambda c, key=key: (
                f"{key} = {json.dumps(value_of(c, key))} with train.streaming_min_groups: it depends on all tokens of"
                " the step, which are not known yet. Set one of the two back to its default"
            ),
        )
        for key, on in _WHOLE_STEP.items()
    ),
    Refused(
        ("algorithm.correction_normalize", "algorithm.loss"),
        lambda c: c.algorithm.correction_normalize and c.algorithm.loss == "vespo",
        'algorithm.correction_normalize with algorithm.loss = "vespo": its weights are inside of a function, not a'
        " factor that a mean could divide. Set it to false",
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
        lambda c: f'with algorithm.loss = "{c.algorithm.loss}", which holds the weight of token_truncate itself',
        "Use loss = clip for another correction",
    ),
    Inert(
        _OF_WEIGHTS,
        ("algorithm.proximal",),
        lambda c: c.algorithm.proximal_policy == "behavior",
        'with algorithm.proximal = "behavior": the importance weight proximal/behavior is 1 everywhere',
    ),
    Inert(
        _OF_WEIGHTS,
        ("algorithm.correction",),
        lambda c: c.algorithm.weight == "none" and c.algorithm.proximal_policy != "behavior",
        'with algorithm.correction = "none": all weights are 1',
    ),
    wrong(
        ("algorithm.rejection",),
        lambda c: "\n".join(
            f"algorithm.rejection.{name} = {bound!r}: {why}"
            for name, bound in c.algorithm.rejection.items()
            if (why := _wrong_bound(name, bound))
        ),
    ),
    Inert(
        ("algorithm.allow_uncorrected",),
        ("algorithm.correction", "algorithm.loss", "algorithm.proximal", *_UPDATES),
        lambda c: c.algorithm.corrects and not _forgets_minibatches(c),
        "as the loss holds the ratio to the policy that sampled",
    ),
    Inert(
        ("algorithm.allow_uncorrected",),
        (
            *("rollout.max_staleness", *_SAMPLING, "replay.size"),
            *_UPDATES,
        ),
        lambda c: (
            not (
                c.rollout.max_staleness
                or _alters_sampling(c)
                or c.run.train_on_recorded
                or c.replay.size
                or _forgets_minibatches(c)
            )
        ),
        "with rollout.max_staleness = 0, untruncated sampling, no replay and one update a step (or a loss that is"
        " known to hold the ratio to the step's start): there is nothing to correct",
    ),
    _uncorrected(
        ("rollout.max_staleness",),
        lambda c: c.rollout.max_staleness > 0,
        lambda c: f"rollout.max_staleness = {c.rollout.max_staleness}",
        "tokens of older policy versions would be trained as if they were fresh",
        "Set rollout.max_staleness = 0",
    ),
    _uncorrected(
        _SAMPLING,
        _alters_sampling,
        lambda _: "truncated sampling (rollout.top_p, top_k or min_p) or processed logits (rollout.logits)",
        "log-probs of the truncated or processed distribution are not those of the policy",
        "Sample from the policy itself",
    ),
    _uncorrected(
        ("replay.size",),
        lambda c: c.replay.size > 0,
        lambda c: f"replay.size = {c.replay.size}",
        "tokens of older policy versions would be trained as if they were fresh",
        "Remove replay.size",
    ),
    _uncorrected(
        ("run.train_on_recorded",),
        lambda c: bool(c.run.train_on_recorded),
        lambda _: "run.train_on_recorded",
        "recorded rollouts were sampled by another policy and would be trained as if they were fresh",
        "Remove run.train_on_recorded",
    ),
    Refused(
        (*_UPDATES, "algorithm.loss", "algorithm.correction"),
        lambda c: _forgets_minibatches(c) and not c.algorithm.allow_uncorrected,
        _forgotten,
    ),
    Refused(
        ("algorithm.proximal", "run.train_on_recorded"),
        lambda c: c.algorithm.proximal == "snapshot" and bool(c.run.train_on_recorded),
        'algorithm.proximal = "snapshot" with run.train_on_recorded: the weights that sampled recorded rollouts are'
        ' not kept. Set algorithm.proximal = "step_start"',
    ),
    Refused(
        ("algorithm.proximal", "rollout.max_staleness", "replay.size"),
        lambda c: (
            c.algorithm.proximal_policy == "interpolated"
            and c.staleness_bound <= 1
            and not (c.replay.size or c.run.train_on_recorded)
        ),
        lambda c: (
            f'algorithm.proximal = "interpolated" with a staleness of {c.staleness_bound} at most: at 0 and 1 that is'
            ' the behavior policy itself. Set algorithm.proximal = "behavior", or rollout.max_staleness to 2 or more'
        ),
    ),
)

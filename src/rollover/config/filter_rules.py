"""The rules about [filters]: options without effect, and combinations that are refused."""

from __future__ import annotations

from rollover.config.rule import Inert, Refused

_BY_METRIC = ("filters.zero_variance", "filters.pass_rate_above", "filters.pass_rate_below")
_DROPPING = (
    *_BY_METRIC, "filters.max_truncated_share", "filters.max_error_share", "filters.max_overlong_share",
    "filters.custom",
)  # fmt: skip
_MASKS = ("filters.mask_truncated", "filters.mask_overlong")

INERT: tuple[Inert, ...] = (
    Inert(
        (*_DROPPING, "filters.give_up_after_steps"),
        ("run.replay_rollouts", "tasks.producer"),
        lambda c: bool(c.run.replay_rollouts or c.tasks.producer),
        "with run.replay_rollouts or tasks.producer: their groups are trained as they are",
    ),
    Inert(
        ("filters.give_up_after_steps",),
        (*_DROPPING, *_MASKS),
        lambda c: not c.filters.drops,
        "as no filter drops groups",
        "Set filters.zero_variance, say",
    ),
    Inert(
        ("filters.metric",),
        _BY_METRIC,
        lambda c: not c.filters.by_metric,
        "without filters.zero_variance or a bound of the pass rate",
        "Set filters.zero_variance, say",
    ),
    Inert(
        ("filters.pass_threshold",),
        ("filters.pass_rate_above", "filters.pass_rate_below"),
        lambda c: not c.filters.by_pass_rate,
        "without a bound of the pass rate",
        "Set filters.pass_rate_above, say",
    ),
    Inert(
        ("filters.overlong_tokens",),
        ("filters.max_overlong_share", "filters.mask_overlong"),
        lambda c: not c.filters.by_length,
        "without filters.max_overlong_share or filters.mask_overlong: nothing looks at it",
        "Set filters.mask_overlong, say",
    ),
    Inert(
        ("filters.mask_in_baseline",),
        _MASKS,
        lambda c: not c.filters.masks,
        "without filters.mask_truncated or filters.mask_overlong: no rollout is masked",
        "Set filters.mask_truncated",
    ),
    Inert(
        ("filters.mask_in_baseline",),
        ("algorithm.advantage",),
        lambda c: c.algorithm.advantage in ("remax", "gae"),
        "with algorithm.advantage = remax or gae, whose baseline is not over other rollouts' rewards",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        ("filters.max_overlong_share", "filters.mask_overlong", "filters.overlong_tokens", "rollout.max_new_tokens"),
        lambda c: c.filters.by_length and not 0 < c.filters.overlong_tokens < c.rollout.max_new_tokens,
        lambda c: (
            f"filters.overlong_tokens = {c.filters.overlong_tokens} with filters.max_overlong_share or"
            " filters.mask_overlong: it must be above 0 and below rollout.max_new_tokens ="
            f" {c.rollout.max_new_tokens}, which no rollout exceeds. Set it"
        ),
    ),
    Refused(
        ("filters.pass_rate_above", "filters.pass_rate_below"),
        lambda c: c.filters.pass_rate_above >= c.filters.pass_rate_below,
        lambda c: (
            f"filters.pass_rate_above = {c.filters.pass_rate_above:g} is not below filters.pass_rate_below ="
            f" {c.filters.pass_rate_below:g}: every group would be dropped. Lower it"
        ),
    ),
    Refused(
        ("filters.zero_variance", "rollout.group_size"),
        lambda c: c.filters.zero_variance and c.rollout.group_size < 2,
        lambda c: (
            "filters.zero_variance with rollout.group_size = 1: a rollout alone has no variance, every group would be"
            " dropped. Set rollout.group_size to 2 or more, or remove filters.zero_variance"
        ),
    ),
)

"""[filters], [replay] and [reroll]: which groups are trained, once more, or not at all; and the rules about them."""

from typing import Literal

from rollover.config.table import Inert, Refused, Rule, Table, option
from rollover.config.traits import with_estimator


class FiltersConfig(Table):
    """[filters]: groups that are dropped when their rewards are there, and rollouts that leave the loss
    (docs/algorithms.md). All off by default."""

    zero_variance: bool = option(
        False, "Drop groups whose rewards are all the same; others are generated in their place (dynamic sampling)."
    )
    pass_rate_above: float = option(-1.0, "Keep groups whose pass rate is above this; below 0: no bound.", ge=-1, lt=1)
    pass_rate_below: float = option(2.0, "Keep groups whose pass rate is below this; above 1: no bound.", gt=0, le=2)
    pass_threshold: float = option(1.0, "pass rate, tasks.curriculum: a rollout passes with at least this.")
    metric: str = option(
        "score",
        "zero_variance, pass rate, tasks.curriculum: what they look at: score, shaped_score (with what overlong_* and"
        " other terms of [rewards] add), or another entry of what the reward function returned.",
    )
    max_truncated_share: float = option(
        1.0,
        "Drop groups of which a larger share was cut off (as of mask_truncated); 1 = off.",
        ge=0,
        le=1,
    )
    max_error_share: float = option(
        1.0, "Drop groups of which a larger share ended with an error or has no reward; 1 = off.", ge=0, le=1
    )
    max_overlong_share: float = option(
        1.0, "Drop groups of which a larger share has more than overlong_tokens tokens; 1 = off.", ge=0, le=1
    )
    overlong_tokens: int = option(
        0, "max_overlong_share, mask_overlong: tokens after the prompt above which a rollout is overlong.", ge=0
    )
    custom: str = option(
        "",
        "Your own function (module:function or path.py:function) of a group: why it is dropped, or None.",
        entry_points="filters",
    )
    give_up_after_steps: int = option(
        10, "The run ends when this many steps' worth of groups in a row were dropped by filters; 0 = never.", ge=0
    )

    mask_truncated: bool = option(
        False,
        "Rollouts that were cut off, at rollout.max_new_tokens or as an agent's last call asked (max_tokens), leave the"
        " loss (overlong filtering); a group without another one is dropped.",
    )
    mask_overlong: bool = option(
        False, "Rollouts of more than overlong_tokens tokens leave the loss; a group without another one is dropped."
    )
    mask_in_baseline: bool = option(
        True,
        "The rewards of masked rollouts count in their group's statistics.",
        unless=with_estimator(lambda traits: traits.greedy or traits.over_tokens),
    )

    @property
    def by_pass_rate(self) -> bool:
        return self.pass_rate_above >= 0 or self.pass_rate_below <= 1

    @property
    def by_metric(self) -> bool:
        """Whether a filter looks at `metric`."""
        return self.zero_variance or self.by_pass_rate

    @property
    def by_length(self) -> bool:
        """Whether something looks at `overlong_tokens`."""
        return self.max_overlong_share < 1 or self.mask_overlong

    @property
    def drops(self) -> bool:
        """Whether groups may be dropped."""
        shares = (self.max_truncated_share, self.max_error_share, self.max_overlong_share)
        return self.by_metric or any(share < 1 for share in shares) or bool(self.custom) or self.masks

    @property
    def masks(self) -> bool:
        return self.mask_truncated or self.mask_overlong


class ReplayConfig(Table):
    """[replay]: trained groups of high signal, trained again in place of groups without any (docs/replay.md)."""

    only_if = ("replay.size",)

    size: int = option(0, "Trained groups that are kept, those of the largest score; 0 = off.", ge=0)
    max_staleness: int = option(
        4,
        "Bound on trainer_version - policy_version of every replayed token in the loss. It is above the"
        " bound of fresh ones (rollout.max_staleness).",
        ge=1,
    )


class RerollConfig(Table):
    """[reroll]: tasks whose rollouts all failed are given again, later in the run (docs/replay.md)."""

    only_if = ("reroll.max_groups",)

    max_groups: int = option(0, "Failed tasks given again per step, at most; 0 = off.", ge=0)
    start_fraction: float = option(
        0.5, "Share of train.num_steps after which failed tasks are given again.", ge=0, lt=1
    )
    failed_at_most: float | Literal["equal_zero"] = option(
        0.0,
        "A task has failed if all its rollouts have the same reward, and it is not above this. equal_zero: the same"
        " score of every function of rewards.functions, and it is 0 (Axolotl's rule).",
    )
    size: int = option(1000, "Failed tasks that wait, each once; a further one is dropped and counted.", ge=1)


_BY_METRIC = ("filters.zero_variance", "filters.pass_rate_above", "filters.pass_rate_below")
DROPPING = (
    *_BY_METRIC, "filters.max_truncated_share", "filters.max_error_share", "filters.max_overlong_share",
    "filters.custom",
)  # fmt: skip
_MASKS = ("filters.mask_truncated", "filters.mask_overlong")

RULES: tuple[Rule, ...] = (
    Inert(
        (*DROPPING, "filters.give_up_after_steps"),
        ("run.train_on_recorded", "tasks.producer"),
        lambda c: bool(c.run.train_on_recorded or c.tasks.producer),
        "with run.train_on_recorded or tasks.producer: their groups are trained as they are",
    ),
    Inert(
        ("filters.give_up_after_steps",),
        (*DROPPING, *_MASKS),
        lambda c: not c.filters.drops,
        "as no filter drops groups",
        "Set filters.zero_variance, say",
    ),
    Inert(
        ("filters.metric",),
        (*_BY_METRIC, "tasks.curriculum.kind"),
        lambda c: not (c.filters.by_metric or c.tasks.curriculum.kind),
        "without filters.zero_variance, a bound of the pass rate or tasks.curriculum",
        "Set filters.zero_variance, say",
    ),
    Inert(
        ("filters.pass_threshold",),
        ("filters.pass_rate_above", "filters.pass_rate_below", "tasks.curriculum.kind"),
        lambda c: not (c.filters.by_pass_rate or c.tasks.curriculum.kind),
        "without a bound of the pass rate or tasks.curriculum",
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
        ("replay.max_staleness", "rollout.max_staleness"),
        lambda c: c.replay.size > 0 and c.replay.max_staleness <= c.staleness_bound,
        lambda c: (
            f"replay.max_staleness = {c.replay.max_staleness} is not above the bound of fresh rollouts, which is"
            f" {c.staleness_bound}: a group that waited for its step would be too old to be replayed. Set it to"
            f" {c.staleness_bound + 1} or more"
        ),
    ),
    Refused(
        ("replay.size", "algorithm.advantage"),
        lambda c: c.replay.size > 0 and c.algorithm.advantage_traits.over_tokens,
        lambda c: (
            f'replay.size with algorithm.advantage = "{c.algorithm.advantage}": whether a group has a signal is known'
            " once the step has estimated its tokens. Remove replay.size"
        ),
    ),
    Refused(
        ("replay.size", "rollout.group_size"),
        lambda c: c.replay.size > 0 and c.rollout.group_size < 2,
        "replay.size with rollout.group_size = 1: a group's score is 0 without a spread of its rewards, so that"
        " none is kept. Set rollout.group_size to 2 or more, or remove replay.size",
    ),
    Refused(
        ("reroll.max_groups", "rollout.groups_per_step"),
        lambda c: c.reroll.max_groups > c.rollout.groups_per_step,
        lambda c: (
            f"reroll.max_groups = {c.reroll.max_groups} is above rollout.groups_per_step ="
            f" {c.rollout.groups_per_step}: nothing but failed tasks would be left. Lower it"
        ),
    ),
)

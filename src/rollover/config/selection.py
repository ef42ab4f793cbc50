"""[filters], [replay] and [reroll]: which groups are trained, once more, or not at all; and the rules about them."""

from typing import Literal

from rollover.config.table import Inert, Refused, Rule, Table, option
from rollover.config.traits import with_estimator


class FiltersConfig(Table):
    """[filters]: groups dropped after scoring, and rollouts masked in the loss (docs/algorithms.md). All off by
    default."""

    zero_variance: bool = option(
        False, "Drop groups whose rewards are all equal; other tasks replace them (dynamic sampling)."
    )
    pass_rate_above: float = option(-1.0, "Keep groups whose pass rate is above this; below 0: no bound.", ge=-1, lt=1)
    pass_rate_below: float = option(2.0, "Keep groups whose pass rate is below this; above 1: no bound.", gt=0, le=2)
    pass_threshold: float = option(1.0, "Pass rate and tasks.curriculum: lowest reward of a passing rollout.")
    metric: str = option(
        "score",
        "Value used by zero_variance, pass rates and tasks.curriculum: score, shaped_score (with overlong_* and"
        " other shaping terms of [rewards]), or another entry of the reward function's result.",
    )
    max_truncated_share: float = option(
        1.0,
        "Drop groups with a larger share of truncated rollouts (see mask_truncated); 1 = off.",
        ge=0,
        le=1,
    )
    max_error_share: float = option(
        1.0, "Drop groups with a larger share of rollouts that failed or have no reward; 1 = off.", ge=0, le=1
    )
    max_overlong_share: float = option(
        1.0, "Drop groups with a larger share of rollouts longer than overlong_tokens; 1 = off.", ge=0, le=1
    )
    overlong_tokens: int = option(
        0, "max_overlong_share, mask_overlong: tokens after the prompt above which a rollout is overlong.", ge=0
    )
    custom: str = option(
        "",
        "Custom function (module:function or path.py:function) from a group to the reason for dropping it, or None.",
        entry_points="filters",
    )
    give_up_after_steps: int = option(
        10, "End the run when filters drop this many steps' worth of consecutive groups; 0 = never.", ge=0
    )

    mask_truncated: bool = option(
        False,
        "Mask rollouts that were truncated at rollout.max_new_tokens, or at max_tokens of an agent's last call"
        " (overlong filtering). A group without other rollouts is dropped.",
    )
    mask_overlong: bool = option(
        False, "Mask rollouts longer than overlong_tokens. A group without other rollouts is dropped."
    )
    mask_in_baseline: bool = option(
        True,
        "Include the rewards of masked rollouts in their group's statistics.",
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
    """[replay]: buffer of trained groups with a strong signal, which replace groups without one (docs/replay.md)."""

    only_if = ("replay.size",)

    size: int = option(0, "Capacity of the replay buffer in trained groups, those of the largest score; 0 = off.", ge=0)
    max_staleness: int = option(
        4,
        "Bound on trainer_version - policy_version of every replayed token in the loss, above that of fresh tokens"
        " (rollout.max_staleness).",
        ge=1,
    )


class RerollConfig(Table):
    """[reroll]: repeated sampling of tasks whose rollouts all failed, later in the run (docs/replay.md)."""

    only_if = ("reroll.max_groups",)

    max_groups: int = option(0, "Maximum number of failed tasks that are sampled again per step; 0 = off.", ge=0)
    start_fraction: float = option(
        0.5, "Share of train.num_steps after which failed tasks are sampled again.", ge=0, lt=1
    )
    failed_at_most: float | Literal["equal_zero"] = option(
        0.0,
        "A task has failed if all its rollouts have the same reward, at most this. equal_zero: the same score 0 of"
        " every function of rewards.functions (Axolotl's rule).",
    )
    size: int = option(
        1000, "Capacity of the queue of distinct failed tasks. Further ones are dropped and counted.", ge=1
    )


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

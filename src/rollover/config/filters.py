from pydantic import Field

from rollover.config.base import Table


class FiltersConfig(Table):
    """[filters]: groups that are dropped when their rewards are there, and rollouts that leave the loss
    (docs/algorithms.md). All off by default."""

    zero_variance: bool = Field(
        default=False,
        description="Drop groups whose rewards are all the same; others are generated in their place (dynamic"
        " sampling).",
    )
    pass_rate_above: float = Field(
        default=-1.0, ge=-1, lt=1, description="Keep groups whose pass rate is above this; below 0: no bound."
    )
    pass_rate_below: float = Field(
        default=2.0, gt=0, le=2, description="Keep groups whose pass rate is below this; above 1: no bound."
    )
    pass_threshold: float = Field(default=1.0, description="pass rate: a rollout passes with at least this.")
    metric: str = Field(
        default="score",
        description="zero_variance, pass rate: what they look at: score, or another entry of what the reward function"
        " returned.",
    )
    max_truncated_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Drop groups of which a larger share ended at rollout.max_new_tokens; 1 = off.",
    )
    max_error_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Drop groups of which a larger share ended with an error or has no reward; 1 = off.",
    )
    max_overlong_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Drop groups of which a larger share has more than overlong_tokens tokens; 1 = off.",
    )
    overlong_tokens: int = Field(
        default=0,
        ge=0,
        description="max_overlong_share, mask_overlong: tokens after the prompt above which a rollout is overlong.",
    )
    custom: str = Field(
        default="",
        description="Your own function (module:function or path.py:function) of a group: why it is dropped, or None.",
    )
    give_up_after_steps: int = Field(
        default=10,
        ge=1,
        description="The run ends when so many steps' worth of groups in a row were dropped by filters.",
    )

    mask_truncated: bool = Field(
        default=False,
        description="Rollouts that ended at rollout.max_new_tokens leave the loss (overlong filtering); a group without"
        " another one is dropped.",
    )
    mask_overlong: bool = Field(
        default=False,
        description="Rollouts of more than overlong_tokens tokens leave the loss; a group without another one is"
        " dropped.",
    )
    mask_in_baseline: bool = Field(
        default=True, description="The rewards of masked rollouts count in their group's statistics."
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

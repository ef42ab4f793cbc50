"""The rules about advantage estimators: which of them read what, and what they need of groups and rewards."""

from typing import Any

from rollover.config.table import Inert, Refused, Rule, is_own
from rollover.config.traits import AdvantageTraits, estimator
from rollover.functions import is_number


class Estimation:
    """Requirements of algorithm.advantage on a step: a part of the table [algorithm]."""

    @property
    def advantage_traits(self: Any) -> AdvantageTraits:
        return estimator(self.advantage)

    @property
    def needs_critic(self: Any) -> bool:
        return self.advantage_traits.critic

    @property
    def needs_statistics(self: Any) -> bool:
        """Whether statistics of the policy's distribution at each token are asked for, at the start of a step."""
        return self.advantage_traits.statistics or self.top_entropy_share < 1


def _never_negative(config: Any) -> bool:
    algorithm = config.algorithm
    others = algorithm.after_scoring or is_own(algorithm.loss) or config.distill.teacher
    return algorithm.advantage_traits.never_negative and not others


RULES: tuple[Rule, ...] = (
    Inert(
        ("algorithm.clip_low", "algorithm.dual_clip"),
        ("algorithm.advantage", "distill.teacher"),
        lambda c: _never_negative(c) and c.algorithm.loss != "cispo",
        'with algorithm.advantage = "grpo_passk": it concerns negative advantages, and none is',
    ),
    Inert(
        ("algorithm.off_policy_mask_above",),
        ("algorithm.advantage", "distill.teacher"),
        _never_negative,
        'with algorithm.advantage = "grpo_passk": it concerns negative advantages, and none is',
    ),
    Refused(
        ("algorithm.reward_weights",),
        lambda c: not all(is_number(w) for w in c.algorithm.reward_weights.values()),
        lambda c: (
            f"algorithm.reward_weights = {c.algorithm.reward_weights}: every weight must be a number, for instance"
            " { score = 1.0, format = 0.5 }"
        ),
    ),
    Refused(
        ("algorithm.advantage", "rollout.greedy_baseline"),
        lambda c: c.algorithm.advantage_traits.greedy and not c.rollout.greedy_baseline,
        lambda c: (
            f'algorithm.advantage = "{c.algorithm.advantage}" without rollout.greedy_baseline: there is no greedy'
            " rollout to compare with, all advantages would be 0. Set rollout.greedy_baseline = true"
        ),
    ),
    Refused(
        ("rollout.group_size", "algorithm.advantage"),
        lambda c: (
            c.rollout.group_size < 2 and c.algorithm.advantage_traits.compares_siblings and not c.distill.replaces
        ),
        lambda c: (
            f'rollout.group_size = {c.rollout.group_size} with algorithm.advantage = "{c.algorithm.advantage}": a'
            " baseline needs at least 2 sibling rollouts. Set rollout.group_size to 2 or more"
        ),
    ),
    Refused(
        ("rewards.min_valid", "rollout.group_size"),
        lambda c: (
            c.min_valid_rewards > c.rollout.group_size
            and (c.rollout.group_size >= 2 or not c.algorithm.advantage_traits.compares_siblings)
        ),
        lambda c: (
            f"rewards.min_valid = {c.rewards.min_valid} is above rollout.group_size = {c.rollout.group_size}: every"
            " group would be dropped. Lower it"
        ),
    ),
    Refused(
        ("rewards.min_valid", "algorithm.advantage"),
        lambda c: 0 < c.min_valid_rewards < 2 and c.algorithm.advantage_traits.compares_siblings,
        lambda c: (
            f'rewards.min_valid = {c.rewards.min_valid} with algorithm.advantage = "{c.algorithm.advantage}": one'
            " reward has no sibling to be compared with. Set rewards.min_valid to 2 or more"
        ),
    ),
    Refused(
        ("algorithm.advantage", "workflow.group_by"),
        lambda c: c.algorithm.advantage_traits.statistics and bool(c.workflow.group_by),
        lambda c: (
            f'algorithm.advantage = "{c.algorithm.advantage}" with workflow.group_by: its baselines are over the'
            " rollouts of a group and role. Remove workflow.group_by, or use another estimator"
        ),
    ),
    Refused(
        ("algorithm.passk", "rollout.group_size"),
        lambda c: "k" in c.algorithm.advantage_traits.options and c.algorithm.passk > c.rollout.group_size,
        lambda c: (
            f"algorithm.passk = {c.algorithm.passk} is above rollout.group_size = {c.rollout.group_size}: there are"
            " not so many siblings. Lower it"
        ),
    ),
)

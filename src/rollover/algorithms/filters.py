"""Which finished groups are trained on, and which rollouts are in the loss; reports what is left out, and why.

A filter has a name, its `reason`, and a function that returns why a group (or rollout) is left out, or None to keep it.
The lifecycle filters groups when they have their rewards (`first_match`); rollouts are filtered when the batch is built
(`mask_rollouts`). A share of a group counts its trajectories, however many rollouts (contexts) each of them has.
Greedy baselines and untrained roles are ignored. Plain values, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollover.config import FiltersConfig
from rollover.functions import CustomFunction, custom_function, described
from rollover.trajectories import Trajectory, episodes_of
from rollover.types import Group, Rollout, StopReason

Metric = str | Callable[[Trajectory], float]
"""score, an entry of what the reward function returned, or a function of a trajectory whose reward is not missing."""
HasSignal = Callable[[Group, Metric], bool | None]
OfRole = Callable[[str], bool]
_WHY = "a text that says why to drop the group, or None to keep it"


@dataclass(frozen=True)
class GroupFilter:
    """`why` returns in words why a group is dropped, or None to keep it. `reason` names the filter in counts."""

    reason: str
    why: Callable[[Group], str | None]


def first_match(group: Group, filters: Sequence[GroupFilter]) -> tuple[str, str] | None:
    """Return (reason, detail) of the first filter that matches; None: the group is kept."""
    matches = ((f.reason, detail) for f in filters if (detail := f.why(group)) is not None)
    return next(matches, None)


def build_group_filter(
    config: FiltersConfig,
    *,
    taught: OfRole = lambda role: False,
    has_signal: HasSignal | None = None,
    untrained: Collection[str] = (),
    metric: Metric = "",
) -> Callable[[Group], tuple[str, str] | None] | None:
    """Return `first_match` over the filters that [filters] configures; None without any.

    Arguments and ValueErrors as in `group_filters`.
    """
    filters = group_filters(config, taught=taught, has_signal=has_signal, untrained=untrained, metric=metric)
    return (lambda group: first_match(group, filters)) if filters else None


def group_filters(
    config: FiltersConfig,
    *,
    taught: OfRole = lambda role: False,
    has_signal: HasSignal | None = None,
    untrained: Collection[str] = (),
    metric: Metric = "",
) -> list[GroupFilter]:
    """Return the group filters that [filters] configures, in the order in which they are applied.

    ValueError if `custom` names no function; only that one sees `untrained` roles. `taught`: see `all_masked`.
    `has_signal`: see `zero_variance`. `metric`: replaces `config.metric`.
    """
    metric = metric or config.metric
    chosen: list[GroupFilter] = []
    if config.max_error_share < 1:
        chosen.append(error(config.max_error_share))
    if config.max_truncated_share < 1:
        chosen.append(truncated(config.max_truncated_share))
    if config.max_overlong_share < 1:
        chosen.append(overlong(config.overlong_tokens, config.max_overlong_share))
    if config.by_pass_rate:
        low = config.pass_rate_above if config.pass_rate_above >= 0 else None
        high = config.pass_rate_below if config.pass_rate_below <= 1 else None
        chosen.append(pass_rate(low, high, threshold=config.pass_threshold, metric=metric))
    if config.zero_variance:
        chosen.append(zero_variance(metric, has_signal))
    chosen = [_of_trained(each, untrained) for each in chosen]
    if config.custom:
        chosen.append(custom(custom_function("filters.custom", config.custom, _WHY), "custom"))
    if config.masks:
        chosen.append(_of_trained(all_masked(rollout_filters(config), taught=taught), untrained))
    return chosen


def rollout_filters(config: FiltersConfig) -> list[RolloutFilter]:
    """Return the rollout filters that [filters] configures."""
    chosen: list[RolloutFilter] = []
    if config.mask_truncated:
        chosen.append(mask_truncated(in_baseline=config.mask_in_baseline))
    if config.mask_overlong:
        chosen.append(mask_overlong(config.overlong_tokens, in_baseline=config.mask_in_baseline))
    return chosen


def zero_variance(metric: Metric = "score", has_signal: HasSignal | None = None) -> GroupFilter:
    """Drop a group whose valid siblings all have the same reward, or that has fewer than two: nothing to learn from.
    A group of one (rollout.group_size = 1, of estimators that compare no siblings) is kept if it has a reward, as in
    verl.

    Values are compared in float32, as advantages are computed, so that the groups dropped are those whose GRPO
    advantages are all 0. `metric`: "score", or a name in the rewards' extras (verl's filter_groups.metric), for scores
    with a part that always differs, such as a penalty on length.
    `has_signal`, of a group and `metric`, answers for groups whose advantages do not follow from one comparison of
    scores: several roles, turns, advantages that came with the trajectories; None: look at `metric`.
    """

    def why(group: Group) -> str | None:
        if has_signal is not None and (found := has_signal(group, metric)) is not None:
            return None if found else "no trajectory has an advantage that is not 0"
        values = _values(group, metric)
        if len(values) == 1 == len(_sampled(group)):
            return None
        if len(values) < 2:
            return f"{len(values)} of {len(_sampled(group))} trajectories have a {metric}"
        low, high = np.float32(min(values)), np.float32(max(values))
        return f"all {len(values)} trajectories have {metric} {low:g}" if low == high else None

    return GroupFilter("zero_variance", why)


def pass_rate(
    low: float | None = 0.0, high: float | None = 1.0, *, threshold: float = 1.0, metric: Metric = "score"
) -> GroupFilter:
    """Keep a group if low < pass rate < high; a trajectory passes with `metric` >= threshold. None: no such bound.

    The pass rate is over the valid trajectories; a group without one is dropped. 0 and 1: dynamic sampling of DAPO
    (arXiv 2503.14476, section 3.2).
    """
    bounds = [b for b in (low, high) if b is not None]
    if any(not 0 <= b <= 1 for b in bounds) or bounds != sorted(set(bounds)):
        raise ValueError(f"low = {low} and high = {high}: pass rates between them need 0 <= low < high <= 1")

    def why(group: Group) -> str | None:
        rate = pass_rate_of(group, threshold=threshold, metric=metric)
        if rate is None:
            return f"no trajectory has a {metric}"
        if low is not None and rate <= low:
            return f"pass rate {rate:g} is not above {low:g}"
        if high is not None and rate >= high:
            return f"pass rate {rate:g} is not below {high:g}"
        return None

    return GroupFilter("pass_rate", why)


def truncated(max_share: float) -> GroupFilter:
    """Drop a group if more than `max_share` of its trajectories ended a context at the length limit. 0: if any did."""
    return _share("truncated", "ended at the length limit", lambda t: any(map(_is_truncated, t.rollouts)), max_share)


def overlong(max_tokens: int, max_share: float = 0.0) -> GroupFilter:
    """Drop a group if more than `max_share` of its trajectories have a context of more than `max_tokens` tokens after
    the prompt.

    The environment's tokens count. Unlike `truncated` it can be set below the limit of generation.
    """
    what = f"have more than {max_tokens} tokens"
    return _share("overlong", what, lambda t: any(r.num_tokens > max_tokens for r in t.rollouts), max_share)


def error(max_share: float) -> GroupFilter:
    """Drop a group if more than `max_share` of its trajectories ended with an error or have no reward. 0: if any."""
    return _share("error", "ended with an error or have no reward", _is_failed, max_share)


def all_masked(masks: Sequence[RolloutFilter], *, taught: OfRole = lambda role: False) -> GroupFilter:
    """Drop a group whose rollouts are all masked or have no reward: it would take the place of a group with a loss.

    A step of such groups alone would train nothing. `taught`: whether a role is in the loss without a reward, too.
    """

    def has_loss(trajectory: Trajectory) -> bool:
        missing = not trajectory.valid and not taught(trajectory.role)
        return not missing and any(all(mask.why(r) is None for mask in masks) for r in trajectory.rollouts)

    def why(group: Group) -> str | None:
        sampled = _sampled(group)
        return None if any(map(has_loss, sampled)) else f"all {len(sampled)} trajectories are masked or have no reward"

    return GroupFilter("all_masked", why)


def custom(function: Callable[[Group], str | None], reason: str | None = None) -> GroupFilter:
    """Wrap a custom filter: `function(group)` returns why to drop the group, or None to keep it.

    `reason` defaults to the function's name.
    """
    name = reason or getattr(function, "__name__", "custom")
    own = CustomFunction.over(function, "filter", _WHY)

    def why(group: Group) -> str | None:
        answer = own(replace(group, rollouts=list(group.rollouts)))  # a copy: it may sort the list
        if answer is not None and not isinstance(answer, str):
            raise own.refused(described(answer))  # a bool could mean "keep" as well as "drop"
        return answer

    return GroupFilter(name, why)


@dataclass(frozen=True)
class RolloutFilter:
    """Masks rollouts. `in_baseline`: their rewards still count in their group's statistics."""

    reason: str
    why: Callable[[Rollout], str | None]
    in_baseline: bool = True


@dataclass(frozen=True)
class MaskedRollout:
    rollout: Rollout
    reason: str
    detail: str
    in_baseline: bool


@dataclass(frozen=True)
class Masked:
    """The rollouts taken out of the loss. The groups stay as they are."""

    rollouts: list[MaskedRollout] = field(default_factory=list)

    @property
    def out_of_loss(self) -> set[str]:
        """Ids of the rollouts whose tokens are context only."""
        return {m.rollout.rollout_id for m in self.rollouts}

    @property
    def out_of_baseline(self) -> set[str]:
        """Ids of those whose rewards count as missing."""
        return {m.rollout.rollout_id for m in self.rollouts if not m.in_baseline}

    @property
    def counts(self) -> dict[str, int]:
        """Rollouts masked per reason."""
        return dict(Counter(m.reason for m in self.rollouts))


def mask_rollouts(groups: Iterable[Group], filters: Sequence[RolloutFilter]) -> Masked:
    """Return the rollouts that a filter matches; the first match is the reason. Any can exclude the baseline."""
    result = Masked()
    for rollout in (r for g in groups for r in g.rollouts if not r.greedy):
        matches = [(f, detail) for f in filters if (detail := f.why(rollout)) is not None]
        if matches:
            in_baseline = all(f.in_baseline for f, _ in matches)
            result.rollouts.append(MaskedRollout(rollout, matches[0][0].reason, matches[0][1], in_baseline))
    return result


def mask_truncated(*, in_baseline: bool = True) -> RolloutFilter:
    """Mask rollouts that ended at the length limit: overlong filtering of DAPO (arXiv 2503.14476, section 3.4).

    TRL's and Axolotl's mask_truncated_completions. There the reward stays in the baseline, which is the default.
    `in_baseline=False` is for rewards that say nothing about an answer that was cut off.
    """
    what = "ended at the length limit"
    return RolloutFilter("truncated", lambda rollout: what if _is_truncated(rollout) else None, in_baseline)


def mask_overlong(max_tokens: int, *, in_baseline: bool = True) -> RolloutFilter:
    """Mask rollouts of more than `max_tokens` tokens after the prompt, the environment's included."""

    def why(rollout: Rollout) -> str | None:
        return f"{rollout.num_tokens} tokens, more than {max_tokens}" if rollout.num_tokens > max_tokens else None

    return RolloutFilter("overlong", why, in_baseline)


def pass_rate_of(group: Group, *, threshold: float, metric: Metric, untrained: Collection[str] = ()) -> float | None:
    """Return the share of trajectories with a `metric` of at least `threshold`; None if none has a `metric`.

    Greedy baselines and `untrained` roles are ignored.
    """
    if untrained:
        group = replace(group, rollouts=[r for r in group.rollouts if r.role not in untrained])
    values = _values(group, metric)
    return sum(v >= threshold for v in values) / len(values) if values else None


def _values(group: Group, metric: Metric) -> list[float]:
    """Return `metric` of each trajectory with a reward; NaN is missing."""
    values = []
    for trajectory in _sampled(group):
        if (value := value_of(trajectory, metric)) is not None:
            values.append(value)
    return values


def value_of(trajectory: Trajectory, metric: Metric) -> float | None:
    """Return the trajectory's `metric`; None where it is missing. ValueError where the reward has no such entry."""
    reward = trajectory.reward
    if reward is None or reward.score is None:
        return None
    if not isinstance(metric, str):
        return metric(trajectory)
    if metric == "acc" and not reward.extras:
        metric = "score"  # verl's name for the score of a reward that returns a number
    if metric != "score" and metric not in reward.extras:
        raise ValueError(
            f"filters.metric = {metric!r}: a reward has no such entry; use one of"
            f" {', '.join(['score', *sorted(reward.extras)])}"
        )
    value = reward.score if metric == "score" else reward.extras[metric]
    return None if np.isnan(value) else value


def _sampled(group: Group) -> list[Trajectory]:
    """Return the trajectories of a group without the greedy ones."""
    return [t for episode in episodes_of(group) for t in episode.trajectories if not t.greedy]


def _of_trained(each: GroupFilter, untrained: Collection[str]) -> GroupFilter:
    """Apply the filter to a group without the rollouts of `untrained` roles."""
    if not untrained:
        return each
    return replace(
        each,
        why=lambda group: each.why(replace(group, rollouts=[r for r in group.rollouts if r.role not in untrained])),
    )


def _is_truncated(rollout: Rollout) -> bool:
    return rollout.stop_reason is StopReason.LENGTH


def _is_failed(trajectory: Trajectory) -> bool:
    return not trajectory.valid or any(r.stop_reason is StopReason.ERROR for r in trajectory.rollouts)


def _share(reason: str, what: str, matches: Callable[[Trajectory], bool], max_share: float) -> GroupFilter:
    if not 0 <= max_share < 1:
        raise ValueError(f"max_share = {max_share}: give a share from 0 to below 1; at 1 no group would be dropped")

    def why(group: Group) -> str | None:
        sampled = _sampled(group)
        count = sum(map(matches, sampled))
        above = count / max(1, len(sampled)) > max_share
        return f"{count} of {len(sampled)} trajectories {what}" if above else None

    return GroupFilter(reason, why)

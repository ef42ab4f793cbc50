"""Filters: what each drops, on both sides of its bound, and what the report says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollover import Played, ready_episodes
from rollover.algorithms import advantage, filters
from rollover.algorithms.filters import (
    all_masked,
    error,
    first_match,
    group_filters,
    mask_overlong,
    mask_rollouts,
    overlong,
    pass_rate,
    rollout_filters,
    truncated,
    zero_variance,
)
from rollover.algorithms.grouping import Grouping
from rollover.config import FiltersConfig, WorkflowConfig
from rollover.types import Group, Prompt, Reward, Rollout, SamplingParams, Segment, StopReason, Task
from unit.rollout.world import make_segment

NAN = float("nan")


def rollout(score: float | None, *, stop: StopReason = StopReason.EOS, tokens: int = 4, sibling: int = 0, **extras):
    ids = np.arange(tokens, dtype=np.int32)
    segments = [Segment(ids, np.zeros(tokens, dtype=np.float32), 0, SamplingParams(), stop)]
    reward = Reward(score, extras, None if score is not None else "timeout")
    return Rollout(0, sibling, Task("t", "test", "reward", prompt="x"), segments, stop_reason=stop, reward=reward)


def group(*rollouts: Rollout, group_id: int = 0) -> Group:
    for i, r in enumerate(rollouts):
        r.group_id, r.sibling, r.rollout_id = group_id, i, f"{group_id}-{i}"
    return Group(group_id, Task("t", "test", "reward", prompt="x"), Prompt((5, 6)), list(rollouts))


def scored(*scores: float | None, group_id: int = 0) -> Group:
    return group(*(rollout(s) for s in scores), group_id=group_id)


def verdict(group_filter: filters.GroupFilter, of: Group) -> str | None:
    """The detail with which the filter drops the group."""
    match = first_match(of, [group_filter])
    return None if match is None else match[1]


@pytest.mark.parametrize(
    ("scores", "detail"),
    [
        ((1.0, 0.0), None),
        ((1.0, None, 0.5), None),
        ((0.5, 0.5, 0.5), "all 3 trajectories have score 0.5"),
        ((0.5, None, 0.5), "all 2 trajectories have score 0.5"),
        ((0.5, None), "1 of 2 trajectories have a score"),
        ((0.5,), None),  # a group of one
        ((None,), "0 of 1 trajectories have a score"),
        ((None, None), "0 of 2 trajectories have a score"),
        ((), "0 of 0 trajectories have a score"),
        ((1.0, 1.0 + 1e-12), "all 2 trajectories have score 1"),  # equal in float32
        ((1.0, 1.0 + 1e-6), None),
    ],
)
def test_zero_variance(scores, detail: str | None) -> None:
    assert verdict(filters.zero_variance(), scored(*scores)) == detail


@pytest.mark.parametrize("scores", [(0.1,) * 7, (0.1, 0.1, 0.3), (1.0, 1.0 + 1e-12), (2.0, None, 2.0), (None, 3.0)])
def test_zero_variance_drops_what_has_no_advantage(scores) -> None:
    values = torch.tensor([NAN if s is None else s for s in scores], dtype=torch.float64)
    useless = not advantage.grpo(values, torch.zeros(len(scores))).any()
    assert (verdict(filters.zero_variance(), scored(*scores)) is not None) == useless


def test_metrics_among_the_extras() -> None:
    """The score differs by a penalty on length; what is asked for is the accuracy."""
    of = group(rollout(0.9, acc=1.0), rollout(0.8, acc=1.0), rollout(None, acc=0.0), rollout(0.3, acc=NAN))
    assert verdict(filters.zero_variance(), of) is None
    assert verdict(filters.zero_variance("acc"), of) == "all 2 trajectories have acc 1"
    assert verdict(filters.pass_rate(metric="acc"), of) == "pass rate 1 is not below 1"
    with pytest.raises(ValueError, match=r"filters.metric = 'accuracy': .* one of score, acc$"):
        verdict(filters.zero_variance("accuracy"), of)


def test_acc_of_a_reward_that_is_a_number_is_its_score() -> None:
    """As verl's managers have it."""
    assert verdict(filters.zero_variance("acc"), group(rollout(1.0), rollout(1.0))) == "all 2 trajectories have acc 1"
    assert verdict(filters.zero_variance("acc"), group(rollout(1.0), rollout(0.0))) is None
    with pytest.raises(ValueError, match=r"one of score, format$"):
        verdict(filters.zero_variance("acc"), group(rollout(1.0, format=1.0), rollout(1.0, format=1.0)))


@pytest.mark.parametrize(
    ("arguments", "scores", "detail"),
    [
        ({}, (1.0, 0.0, 0.0), None),
        ({}, (0.0, 0.99), "pass rate 0 is not above 0"),
        ({}, (1.0, 1.5), "pass rate 1 is not below 1"),
        ({}, (1.0, 0.0, None), None),
        ({}, (1.0, None), "pass rate 1 is not below 1"),
        ({}, (None,), "no trajectory has a score"),
        ({"threshold": 0.5}, (0.5, 0.4), None),
        ({"threshold": 0.4}, (0.5, 0.4), "pass rate 1 is not below 1"),
        ({"low": 0.25, "high": 0.75}, (1.0, 1.0, 0.0, 0.0), None),
        ({"low": 0.25, "high": 0.75}, (1.0, 0.0, 0.0, 0.0), "pass rate 0.25 is not above 0.25"),
        ({"low": 0.25, "high": 0.75}, (1.0, 1.0, 1.0, 0.0), "pass rate 0.75 is not below 0.75"),
        ({"low": None, "high": 0.75}, (0.0, 0.0), None),
        ({"low": 0.25, "high": None}, (1.0, 1.0), None),
    ],
)
def test_pass_rate(arguments, scores, detail: str | None) -> None:
    assert verdict(filters.pass_rate(**arguments), scored(*scores)) == detail


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.8, 0.2), (-0.1, 1.0), (0.0, 1.1), (NAN, 1.0)])
def test_bounds_of_the_pass_rate_that_keep_nothing_are_errors(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low = .* and high = "):
        filters.pass_rate(low, high)


CUT, FAILED = StopReason.LENGTH, StopReason.ERROR
MIXED = group(
    rollout(1.0, stop=CUT, tokens=9),
    rollout(0.0, stop=CUT, tokens=8),
    rollout(None),
    rollout(0.0, stop=FAILED, tokens=1),
    rollout(0.0, tokens=7),
)


@pytest.mark.parametrize(
    ("group_filter", "detail"),
    [
        (filters.truncated(0.0), "2 of 5 trajectories ended at the length limit"),
        (filters.truncated(0.39), "2 of 5 trajectories ended at the length limit"),
        (filters.truncated(0.4), None),
        (filters.error(0.39), "2 of 5 trajectories ended with an error or have no reward"),
        (filters.error(0.4), None),
        (filters.overlong(8), "1 of 5 trajectories have more than 8 tokens"),
        (filters.overlong(9), None),
        (filters.overlong(7, max_share=0.39), "2 of 5 trajectories have more than 7 tokens"),
        (filters.overlong(7, max_share=0.4), None),
    ],
)
def test_shares(group_filter: filters.GroupFilter, detail: str | None) -> None:
    assert verdict(group_filter, MIXED) == detail


def test_a_share_at_the_bound_is_kept_whatever_rounding_does() -> None:
    """0.29 * 100 is 28.999999999999996."""
    of = group(*(rollout(0.0, stop=CUT if i < 29 else StopReason.EOS) for i in range(100)))
    assert verdict(filters.truncated(0.29), of) is None


@pytest.mark.parametrize("make", [filters.truncated, filters.error, lambda share: filters.overlong(5, share)])
@pytest.mark.parametrize("share", [-0.1, 1.0, 5])
def test_shares_that_never_drop_are_errors(make, share: float) -> None:
    with pytest.raises(ValueError, match=f"max_share = {share}"):
        make(share)


def test_a_group_without_rollouts_has_no_share() -> None:
    assert verdict(filters.truncated(0.0), group()) is None


def too_short(of: Group) -> str | None:
    shortest = min(r.num_tokens for r in of.rollouts)
    return f"{shortest} tokens" if shortest < 3 else None


def test_custom_filters_are_named_after_their_function() -> None:
    assert first_match(MIXED, [filters.custom(too_short)]) == ("too_short", "1 tokens")
    assert first_match(MIXED, [filters.custom(too_short, "short")]) == ("short", "1 tokens")
    assert verdict(filters.custom(too_short), scored(1.0)) is None


@pytest.mark.parametrize("answer", [True, False, 0])
def test_a_custom_filter_has_to_say_why(answer) -> None:
    with pytest.raises(ValueError, match=f"returned {answer} .*; it must return a text that says why to drop"):
        verdict(filters.custom(lambda _: answer, "mine"), scored(1.0))


def test_the_first_filter_gives_the_reason_and_later_ones_are_not_asked() -> None:
    asked: list[Group] = []
    chain = [filters.error(0.0), filters.zero_variance(), filters.custom(asked.append)]
    for dropped, reason in ((scored(1.0, 1.0), "zero_variance"), (scored(None), "error"), (MIXED, "error")):
        match = first_match(dropped, chain)
        assert match is not None and match[0] == reason and asked == []
    kept = scored(1.0, 0.0)
    assert first_match(kept, chain) is None and [group.rollouts for group in asked] == [kept.rollouts]
    assert first_match(MIXED, []) is None


def test_masked_rollouts_are_reported_and_their_groups_stay_as_they_are() -> None:
    before = list(MIXED.rollouts)
    result = mask_rollouts([scored(1.0, group_id=4), MIXED], [filters.mask_truncated(), filters.mask_overlong(6)])
    assert [(m.rollout.rollout_id, m.reason, m.detail) for m in result.rollouts] == [
        ("0-0", "truncated", "ended at the length limit"),
        ("0-1", "truncated", "ended at the length limit"),
        ("0-4", "overlong", "7 tokens, more than 6"),
    ]
    assert result.out_of_loss == {"0-0", "0-1", "0-4"} and result.out_of_baseline == set()
    assert result.counts == {"truncated": 2, "overlong": 1} and MIXED.rollouts == before


@pytest.mark.parametrize(
    ("stops", "scores", "dropped"),
    [
        ((StopReason.LENGTH, StopReason.LENGTH), (1.0, 0.0), True),
        ((StopReason.LENGTH, StopReason.EOS), (1.0, 0.0), False),
        ((StopReason.LENGTH, StopReason.EOS), (1.0, None), True),
    ],
)
def test_a_group_with_no_rollout_left_in_the_loss_is_dropped(stops, scores, dropped: bool) -> None:
    chosen = group_filters(FiltersConfig(mask_truncated=True))
    of = group(*(rollout(score, stop=stop) for score, stop in zip(scores, stops, strict=True)))
    expected = ("all_masked", "all 2 trajectories are masked or have no reward")
    assert first_match(of, chosen) == (expected if dropped else None)
    greedy = rollout(1.0)
    greedy.greedy = True  # trained by nobody, so that it keeps no group
    assert (first_match(group(*of.rollouts, greedy), chosen) is not None) == dropped


def test_a_rollout_leaves_the_baseline_if_any_of_its_filters_says_so() -> None:
    chain = [filters.mask_truncated(), filters.mask_overlong(8, in_baseline=False)]
    result = mask_rollouts([MIXED], chain)
    assert [(m.rollout.rollout_id, m.in_baseline) for m in result.rollouts] == [("0-0", False), ("0-1", True)]
    assert result.out_of_baseline == {"0-0"} and result.counts == {"truncated": 2}
    assert mask_rollouts([MIXED], [filters.mask_truncated(in_baseline=False)]).out_of_baseline == {"0-0", "0-1"}


GREEDY = SamplingParams(temperature=0.0)


def with_greedy(score: float, tokens: int = 4, stop: StopReason = StopReason.EOS) -> Rollout:
    """A greedy baseline, the last sibling of its group."""
    baseline = rollout(score, stop=stop, tokens=0)
    baseline.add(Segment(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), 0, GREEDY, stop))
    return baseline


def test_greedy_baselines_are_not_looked_at() -> None:
    cut = StopReason.LENGTH
    of = group(rollout(1.0), rollout(1.0), with_greedy(0.0, tokens=9, stop=cut))
    assert verdict(filters.zero_variance(), of) == "all 2 trajectories have score 1"
    assert verdict(filters.pass_rate(), of) == "pass rate 1 is not below 1"
    assert [verdict(f, of) for f in (filters.truncated(0), filters.overlong(8))] == [None, None]
    assert not mask_rollouts([of], [filters.mask_truncated(), filters.mask_overlong(8)]).rollouts
    lost = group(rollout(None), rollout(1.0), rollout(0.0), with_greedy(1.0))
    assert verdict(filters.error(0.3), lost) == "1 of 3 trajectories ended with an error or have no reward"


def test_all_filters_are_off_by_default() -> None:
    config = FiltersConfig()
    assert not (config.drops or config.masks) and group_filters(config) == [] and rollout_filters(config) == []


# Each setting of [filters] with what it must drop and what it must keep.
SETTINGS = {
    "zero_variance": ({"zero_variance": True}, scored(1.0, 1.0), scored(1.0, 0.0)),
    "metric": (
        {"zero_variance": True, "metric": "acc"},
        group(rollout(1.0, acc=1.0), rollout(0.5, acc=1.0)),
        group(rollout(1.0, acc=1.0), rollout(1.0, acc=0.0)),
    ),
    "above": ({"pass_rate_above": 0.0}, scored(0.0, 0.5), scored(1.0, 1.0)),
    "below": ({"pass_rate_below": 1.0}, scored(1.0, 1.0), scored(0.0, 0.0)),
    "below half": ({"pass_rate_below": 0.5}, scored(1.0, 0.0), scored(1.0, 0.0, 0.0)),
    "threshold": ({"pass_rate_above": 0.0, "pass_threshold": 0.5}, scored(0.4, 0.4), scored(0.5, 0.4)),
    "truncated": (
        {"max_truncated_share": 0.5},
        group(rollout(1.0, stop=StopReason.LENGTH), rollout(0.0, stop=StopReason.LENGTH)),
        group(rollout(1.0, stop=StopReason.LENGTH), rollout(0.0)),
    ),
    "error": ({"max_error_share": 0.4}, scored(None, 1.0), scored(None, 1.0, 0.0)),
    "overlong": (
        {"max_overlong_share": 0.0, "overlong_tokens": 6},
        group(rollout(1.0, tokens=7), rollout(0.0)),
        group(rollout(1.0, tokens=6), rollout(0.0)),
    ),
}


@pytest.mark.parametrize(("values", "dropped", "kept"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_drops_what_it_says(values: dict, dropped: Group, kept: Group) -> None:
    config = FiltersConfig.model_validate(values)
    chosen = group_filters(config)
    assert config.drops and len(chosen) == 1 and rollout_filters(config) == []
    match = first_match(dropped, chosen)
    assert match is not None and match[0] == chosen[0].reason
    assert first_match(kept, chosen) is None


def test_settings_are_asked_in_a_fixed_order(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def why(group): return 'never liked it'\n")
    config = FiltersConfig(
        zero_variance=True, pass_rate_above=0, pass_rate_below=1, max_truncated_share=0, max_error_share=0,
        max_overlong_share=0, overlong_tokens=8, custom="mine.py:why", mask_truncated=True,
    )  # fmt: skip
    chosen = group_filters(config)
    names = ["error", "truncated", "overlong", "pass_rate", "zero_variance", "custom", "all_masked"]
    assert [f.reason for f in chosen] == names
    assert first_match(scored(1.0, 1.0), chosen) == ("pass_rate", "pass rate 1 is not below 1")
    assert first_match(scored(1.0, 0.0), chosen) == ("custom", "never liked it")
    with pytest.raises(ValueError, match="no function 'whi'"):
        group_filters(FiltersConfig(custom="mine.py:whi"))


@pytest.mark.parametrize("in_baseline", [True, False])
def test_masks_of_the_configuration(in_baseline: bool) -> None:
    values = {"mask_truncated": True, "mask_overlong": True, "overlong_tokens": 6, "mask_in_baseline": in_baseline}
    masked = mask_rollouts([MIXED], rollout_filters(FiltersConfig.model_validate(values)))
    assert masked.counts == {"truncated": 2, "overlong": 1}
    assert masked.out_of_baseline == (set() if in_baseline else masked.out_of_loss)


@pytest.mark.parametrize("mask", [{"mask_truncated": True}, {"mask_overlong": True, "overlong_tokens": 6}])
def test_each_mask_may_leave_the_baseline(mask: dict) -> None:
    (chosen,) = rollout_filters(FiltersConfig.model_validate(mask | {"mask_in_baseline": False}))
    masked = mask_rollouts([MIXED], [chosen])
    assert len(masked.out_of_baseline) >= 2 and masked.out_of_baseline == masked.out_of_loss


def zero_variance_reason(episodes: list[list[tuple[str, Reward]]], advantage: str, **workflow: Any) -> str | None:
    segments = [make_segment(1, 0, StopReason.EOS), make_segment(2, 0, StopReason.EOS)]
    played = [[Played([((5,), segments)], reward, role) for role, reward in of] for of in episodes]
    group = ready_episodes(0, Task("t", "s", "r", prompt="x"), played)
    grouping = Grouping(WorkflowConfig.model_validate(workflow))
    return zero_variance(has_signal=lambda g, metric: grouping.has_signal(g, advantage, metric)).why(group)


@pytest.mark.parametrize(
    ("rewards", "advantage", "credit", "kept"),
    [
        ([Reward(1.0), Reward(1.0)], "grpo", "broadcast", False),
        ([Reward(1.0), Reward(0.0)], "grpo", "broadcast", True),
        ([Reward(1.0, advantages=[0.0, [0.0, 1.0]]), Reward(1.0, advantages=0.0)], "precomputed", "broadcast", True),
        ([Reward(1.0, advantages=0.0), Reward(0.0, advantages=[0.0, 0.0])], "precomputed", "broadcast", False),
        ([Reward(1.0, turns=[0.0, 1.0]), Reward(1.0)], "grpo", "turn_returns", True),
        ([Reward(1.0), Reward(1.0)], "grpo", "turn_returns", False),
    ],
)
def test_one_role(rewards: list[Reward], advantage: str, credit: str, kept: bool) -> None:
    assert (zero_variance_reason([[("a", r)] for r in rewards], advantage, credit=credit) is None) == kept


def test_one_role_with_a_signal_is_enough_and_scores_of_different_roles_are_none() -> None:
    equal = [[("a", Reward(1.0)), ("b", Reward(0.0))]] * 2
    assert zero_variance_reason(equal, "grpo") == "no trajectory has an advantage that is not 0"
    assert zero_variance_reason([equal[0], [("a", Reward(1.0)), ("b", Reward(1.0))]], "grpo") is None


@pytest.mark.parametrize(("metric", "why"), [("score", ""), ("right", "zero_variance")])
def test_roles_are_looked_at_by_the_metric_too(metric: str, why: str) -> None:
    """All are right, and their scores differ by a penalty on length."""
    grouping = Grouping(WorkflowConfig())
    rewards = [Reward(score, {"right": 1.0}) for score in (0.9, 0.8)]
    played = [[Played([((5,), [make_segment(1, 0, StopReason.EOS)])], r, role) for role in "ab"] for r in rewards]
    chosen = group_filters(
        FiltersConfig(zero_variance=True, metric=metric),
        has_signal=lambda g, metric: grouping.has_signal(g, "grpo", metric),
    )
    match = first_match(ready_episodes(0, Task("t", "s", "r", prompt="x"), played), chosen)
    assert ("" if match is None else match[0]) == why


def test_equal_scores_of_several_turns_differ_where_turns_are_discounted() -> None:
    """gamma 1/2: returns (1/2, 1) and (1/2, 1)."""
    equal = [[("a", Reward(1.0))]] * 2
    assert zero_variance_reason(equal, "grpo", credit="turn_returns", turn_gamma=0.5) is None
    assert zero_variance_reason(equal, "grpo", credit="turn_returns", turn_gamma=1.0) is not None
    assert zero_variance_reason([[("a", Reward(0.0))]] * 2, "grpo", credit="turn_returns", turn_gamma=0.5) is not None


def test_shares_count_a_trajectory_once_however_many_contexts_it_has() -> None:
    """One of two trajectories was cut off and has no reward; of their contexts three of four."""
    cut, whole = (((5,), [make_segment(9, 0, stop)]) for stop in (StopReason.LENGTH, StopReason.EOS))
    played = [[Played([cut] * 3, Reward(None, error="e"))], [Played([whole], Reward(0.0))]]
    group = ready_episodes(0, Task("t", "s", "r", prompt="x"), played)
    for made, what in (
        (truncated, "ended at the length limit"),
        (error, "ended with an error or have no reward"),
    ):
        assert made(0.6).why(group) is None
        assert made(0.4).why(group) == f"1 of 2 trajectories {what}"
    assert overlong(8, 0.9).why(group) == "2 of 2 trajectories have more than 8 tokens"
    masked = all_masked([mask_overlong(8)]).why(group)
    assert masked == "all 2 trajectories are masked or have no reward"


def test_roles_that_are_not_trained_keep_no_group_and_drop_none() -> None:
    """The solvers agree, and titles differ or fail: nothing of which is trained."""
    config = FiltersConfig(zero_variance=True, max_error_share=0.4, pass_rate_below=1.0)

    def reason(titles: tuple[float | None, float | None], solved: tuple[float, float], untrained: set[str]) -> str:
        context = ((5,), [make_segment(1, 0, StopReason.EOS)])
        episodes = [
            [Played([context], Reward(s), "solver"), Played([context], Reward(t, error=None if t else "e"), "title")]
            for s, t in zip(solved, titles, strict=True)
        ]
        grouping = Grouping(WorkflowConfig.model_validate({"roles": {"solver": {}, "title": {"trained": False}}}))
        chosen = group_filters(
            config, has_signal=lambda g, metric: grouping.has_signal(g, "grpo", metric), untrained=untrained
        )
        match = first_match(ready_episodes(0, Task("t", "s", "r", prompt="x"), episodes), chosen)
        return "" if match is None else match[0]

    assert reason((0.25, 0.5), (0.0, 0.0), {"title"}) == "zero_variance"
    assert reason((None, None), (0.0, 1.0), {"title"}) == ""
    assert reason((None, None), (0.0, 1.0), set()) == "error"


def test_a_pass_rate_counts_a_trajectory_once_however_many_contexts_it_has() -> None:
    context = ((5,), [make_segment(1, 0, StopReason.EOS)])
    played = [[Played([context], Reward(1.0))], [Played([context] * 3, Reward(0.0))]]
    group = ready_episodes(0, Task("t", "s", "r", prompt="x"), played)
    assert pass_rate(0.4, 0.6).why(group) is None
    assert pass_rate(0.5, None).why(group) == "pass rate 0.5 is not above 0.5"

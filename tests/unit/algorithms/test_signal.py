"""filters.zero_variance looks at advantages: several roles, turns, and what came with the trajectories."""

from __future__ import annotations

from typing import Any

import pytest

from rollover import Played, ready_episodes
from rollover.algorithms.filters import (
    all_masked,
    error,
    first_match,
    group_filters,
    mask_overlong,
    overlong,
    pass_rate,
    truncated,
    zero_variance,
)
from rollover.algorithms.grouping import Grouping
from rollover.config import FiltersConfig, WorkflowConfig
from rollover.types import Reward, StopReason, Task
from unit.rollout.world import make_segment


def dropped(episodes: list[list[tuple[str, Reward]]], advantage: str, **workflow: Any) -> str | None:
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
    assert (dropped([[("a", r)] for r in rewards], advantage, credit=credit) is None) == kept


def test_one_role_with_a_signal_is_enough_and_scores_of_different_roles_are_none() -> None:
    equal = [[("a", Reward(1.0)), ("b", Reward(0.0))]] * 2
    assert dropped(equal, "grpo") == "no trajectory has an advantage that is not 0"
    assert dropped([equal[0], [("a", Reward(1.0)), ("b", Reward(1.0))]], "grpo") is None


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
    assert dropped(equal, "grpo", credit="turn_returns", turn_gamma=0.5) is None
    assert dropped(equal, "grpo", credit="turn_returns", turn_gamma=1.0) is not None
    assert dropped([[("a", Reward(0.0))]] * 2, "grpo", credit="turn_returns", turn_gamma=0.5) is not None


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

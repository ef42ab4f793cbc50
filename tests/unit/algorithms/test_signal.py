"""filters.zero_variance looks at advantages: several roles, turns, and what came with the trajectories."""

from __future__ import annotations

from typing import Any

import pytest

from rollover import Played, ready_episodes
from rollover.algorithms.filters import pass_rate, zero_variance
from rollover.algorithms.grouping import Grouping
from rollover.config import WorkflowConfig
from rollover.types import Reward, StopReason, Task
from unit.rollout.world import make_segment


def dropped(episodes: list[list[tuple[str, Reward]]], advantage: str, **workflow: Any) -> str | None:
    segments = [make_segment(1, 0, StopReason.EOS), make_segment(2, 0, StopReason.EOS)]
    played = [[Played([((5,), segments)], reward, role) for role, reward in of] for of in episodes]
    group = ready_episodes(0, Task("t", "s", "r", prompt="x"), played)
    grouping = Grouping(WorkflowConfig.model_validate(workflow))
    return zero_variance(has_signal=lambda g: grouping.has_signal(g, advantage)).why(group)


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


def test_equal_scores_of_several_turns_differ_where_turns_are_discounted() -> None:
    """gamma 1/2: returns (1/2, 1) and (1/2, 1)."""
    equal = [[("a", Reward(1.0))]] * 2
    assert dropped(equal, "grpo", credit="turn_returns", turn_gamma=0.5) is None
    assert dropped(equal, "grpo", credit="turn_returns", turn_gamma=1.0) is not None
    assert dropped([[("a", Reward(0.0))]] * 2, "grpo", credit="turn_returns", turn_gamma=0.5) is not None


def test_a_pass_rate_counts_a_trajectory_once_however_many_contexts_it_has() -> None:
    context = ((5,), [make_segment(1, 0, StopReason.EOS)])
    played = [[Played([context], Reward(1.0))], [Played([context] * 3, Reward(0.0))]]
    group = ready_episodes(0, Task("t", "s", "r", prompt="x"), played)
    assert pass_rate(0.4, 0.6).why(group) is None
    assert pass_rate(0.5, None).why(group) == "pass rate 0.5 is not above 0.5"

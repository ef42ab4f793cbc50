"""Advantages against hand-computed values and the properties that define them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.algorithms.advantage import dr_grpo, grpo, rloo

NAN = float("nan")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_grpo_by_hand() -> None:
    rewards, groups = tensor(1.0, 0.0, 0.0, 1.0, 3.0), torch.tensor([7, 7, 7, 2, 2])
    # Group 7: mean 1/3, sample variance 1/3. Group 2: mean 2, sample variance 2.
    sample = tensor(2 / 3, -1 / 3, -1 / 3, -1.0, 1.0) / (
        torch.cat([torch.full((3,), math.sqrt(1 / 3)), torch.full((2,), math.sqrt(2))]) + 1e-4
    )
    population = tensor(2 / 3, -1 / 3, -1 / 3, -1.0, 1.0) / (
        torch.cat([torch.full((3,), math.sqrt(2 / 9)), torch.full((2,), 1.0)]) + 1e-4
    )
    torch.testing.assert_close(grpo(rewards, groups), sample)
    torch.testing.assert_close(grpo(rewards, groups, std="population"), population)
    torch.testing.assert_close(
        grpo(rewards, groups, std="batch"), tensor(2 / 3, -1 / 3, -1 / 3, -1.0, 1.0) / (rewards.std() + 1e-4)
    )
    torch.testing.assert_close(dr_grpo(rewards, groups), tensor(2 / 3, -1 / 3, -1 / 3, -1.0, 1.0))


def test_eps_is_added_to_the_standard_deviation() -> None:
    got = grpo(tensor(0.0, 2.0), torch.tensor([0, 0]), std="population", eps=1.0)
    torch.testing.assert_close(got, tensor(-0.5, 0.5))


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards, groups = tensor(1.0, 2.0, 6.0, 4.0, NAN, 0.0), torch.tensor([0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(rloo(rewards, groups), tensor(1 - 4.0, 2 - 3.5, 6 - 1.5, 4.0, 0.0, -4.0))


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_one_valid_rollout_has_no_baseline(estimator) -> None:
    rewards, groups = tensor(5.0, NAN, 3.0), torch.tensor([0, 0, 1])
    assert estimator(rewards, groups).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("std", ["sample", "population", "batch", "none"])
def test_a_missing_reward_changes_no_statistic(std) -> None:
    rewards, groups = tensor(1.0, NAN, 4.0, 0.5, 2.0, NAN), torch.tensor([0, 0, 0, 1, 1, 2])
    valid = ~rewards.isnan()
    got = grpo(rewards, groups, std=std)
    torch.testing.assert_close(got[valid], grpo(rewards[valid], groups[valid], std=std))
    assert got[~valid].tolist() == [0.0, 0.0]


@given(st.floats(-100, 100, width=32), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    """Rounding of the mean must not become a gradient (0.1 * 8 / 8 is not 0.1 in float32)."""
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
    for advantages in (grpo(rewards, groups), grpo(rewards, groups, std="population"), rloo(rewards, groups)):
        assert torch.equal(advantages, torch.zeros(size))


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=24), st.randoms())
def test_permutation_shift_and_zero_mean(rows: list[tuple[int, float]], random) -> None:
    groups, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows])
    order = torch.tensor(random.sample(range(len(rows)), len(rows)))
    advantages = dr_grpo(rewards, groups)
    torch.testing.assert_close(dr_grpo(rewards[order], groups[order]), advantages[order], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(dr_grpo(rewards + 3, groups), advantages, atol=1e-4, rtol=1e-4)
    for g in groups.unique():
        assert abs(float(advantages[groups == g].sum())) < 1e-3

"""Advantages against hand-computed values and the properties that define them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.algorithms.advantage import (
    Estimator,
    ScoredBatch,
    ScoredUnit,
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    max_rl,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reinforce_plus_plus_tokens,
    remax,
    rewards_of,
    rloo,
    sum_then_normalize,
    whiten,
)
from rollover.config import AlgorithmConfig
from rollover.config.traits import ADVANTAGES
from rollover.rewards.built_in import composite_spec
from rollover.types import Reward
from samples import rollout, segment

NAN = float("nan")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def lengths_of(rewards_N: torch.Tensor) -> torch.Tensor:
    """Lengths that differ, and go with the rollout wherever a test moves it."""
    return (1 + (rewards_N.nan_to_num(0.0) * 7).abs().floor()).long() % 9 + 1


Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BY_GROUP: dict[str, Formula] = {
    **{f"grpo_{std}": lambda r, g, s=std: grpo(r, g, std=s) for std in ("sample", "population", "batch", "none")},
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": lambda r, g: opo(r, lengths_of(r), g),
    "max_rl": max_rl,
    "gpg": gpg,
    "passk_2": lambda r, g: grpo_passk(r, g, k=2),
    "passk_3_std": lambda r, g: grpo_passk(r, g, k=3, std="sample"),
    "sum_then_normalize": lambda r, g: sum_then_normalize(torch.stack([r, 2 * r], -1), g, tensor(0.5, 2.0)),
    "gdpo": lambda r, g: gdpo(torch.stack([r, r * r], -1), g, tensor(1.0, 0.5)),
    "gdpo_none": lambda r, g: gdpo(torch.stack([r, r * r], -1), g, std="none"),
    "gdpo_lengths": lambda r, g: gdpo(r[:, None], g, lengths_N=lengths_of(r)),
    "rpp_baseline": reinforce_plus_plus_baseline,
    "rpp_baseline_lengths": lambda r, g: reinforce_plus_plus_baseline(r, g, lengths_N=lengths_of(r)),
}
BY_BATCH: dict[str, Formula] = {
    "rpp": lambda r, g: reinforce_plus_plus(r),
    "rpp_lengths": lambda r, g: reinforce_plus_plus(r, lengths_N=lengths_of(r)),
}
ALL = {**BY_GROUP, **BY_BATCH}
of_all = pytest.mark.parametrize("name", ALL)
of_groups = pytest.mark.parametrize("name", BY_GROUP)

REWARDS = tensor(1.0, NAN, 4.0, 0.5, 2.0, NAN, 3.0, 0.0, 1.0, 1.0)
GROUPS = torch.tensor([8, 8, 8, -1, -1, 3, 8, -1, 5, 5])


# What every estimator keeps to


@of_all
def test_a_missing_reward_changes_no_statistic(name: str) -> None:
    valid = ~REWARDS.isnan()
    got = ALL[name](REWARDS, GROUPS)
    torch.testing.assert_close(got[valid], ALL[name](REWARDS[valid], GROUPS[valid]))
    assert got[~valid].tolist() == [0.0, 0.0]
    assert got[valid].abs().max() > 0.3


@of_groups
def test_one_valid_rollout_has_no_baseline(name: str) -> None:
    rewards, groups = tensor(5.0, NAN, 3.0, 1.0, 2.0), torch.tensor([0, 0, 1, 2, 2])
    got = BY_GROUP[name](rewards, groups)
    assert got[:3].tolist() == [0.0, 0.0, 0.0] and got[3:].abs().max() > 0
    # Nor does it enter any statistic that needs a baseline; grpo's "batch" is over the raw rewards.
    if name != "grpo_batch":
        torch.testing.assert_close(got[3:], BY_GROUP[name](rewards[3:], groups[3:]))


@of_all
@settings(max_examples=20)
@given(st.floats(0, 100, width=32), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(name: str, reward: float, size: int) -> None:
    """Rounding of the mean must not become a gradient (0.1 * 8 / 8 is not 0.1 in float32)."""
    rewards = torch.full((size,), reward)
    assert torch.equal(ALL[name](rewards, torch.zeros(size, dtype=torch.long)), torch.zeros(size))


@of_all
@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=24), st.randoms())
def test_order_and_names_of_groups_do_not_matter(name: str, rows: list[tuple[int, int]], random) -> None:
    groups, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r / 4 for _, r in rows])
    order = torch.tensor(random.sample(range(len(rows)), len(rows)))
    advantages = ALL[name](rewards, groups)
    got = ALL[name](rewards[order], 1000 - 7 * groups[order])
    torch.testing.assert_close(got, advantages[order], atol=1e-4, rtol=1e-4)


@of_all
def test_float32_out_whatever_goes_in_and_no_gradient(name: str) -> None:
    whole, groups = tensor(3.0, 0.0, 1.0, 1.0), torch.tensor([0, 0, 1, 1])
    expected = ALL[name](whole, groups)
    for rewards in (whole.double(), whole.long(), whole.clone().requires_grad_(True)):
        got = ALL[name](rewards, groups.int())
        assert got.dtype == torch.float32 and not got.requires_grad
        torch.testing.assert_close(got, expected)


@of_all
def test_no_rollouts_and_no_rewards(name: str) -> None:
    assert ALL[name](torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    assert ALL[name](tensor(NAN, NAN), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


# Of the others, the lengths or the second reward made here change with the rewards; max_rl divides by their mean, gpg
# counts those that are not 0.
@pytest.mark.parametrize(
    "name", sorted(ALL.keys() - {"max_rl", "gpg", "opo", "gdpo", "gdpo_none"} - {n for n in ALL if "len" in n})
)
def test_a_shift_of_all_rewards_cancels(name: str) -> None:
    torch.testing.assert_close(ALL[name](REWARDS + 64, GROUPS), ALL[name](REWARDS, GROUPS), atol=1e-4, rtol=1e-4)


@of_groups
def test_group_ids_of_another_shape_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"group_N has shape \(2,\)|lengths_N has shape"):
        BY_GROUP[name](tensor(1.0, 2.0, 3.0), torch.tensor([0, 1]))


# GRPO, Dr. GRPO, RLOO


def test_grpo_by_hand() -> None:
    rewards, groups = tensor(1.0, 0.0, 0.0, 1.0, 3.0), torch.tensor([7, 7, 7, 2, 2])
    # Group 7: mean 1/3, sample variance 1/3. Group 2: mean 2, sample variance 2.
    centred = tensor(2 / 3, -1 / 3, -1 / 3, -1.0, 1.0)
    sample = torch.cat([torch.full((3,), math.sqrt(1 / 3)), torch.full((2,), math.sqrt(2))])
    population = torch.cat([torch.full((3,), math.sqrt(2 / 9)), torch.full((2,), 1.0)])
    torch.testing.assert_close(grpo(rewards, groups), centred / (sample + 1e-4))
    torch.testing.assert_close(grpo(rewards, groups, std="population"), centred / (population + 1e-4))
    torch.testing.assert_close(grpo(rewards, groups, std="batch"), centred / (rewards.std() + 1e-4))
    torch.testing.assert_close(dr_grpo(rewards, groups), centred)


def test_eps_is_added_to_the_standard_deviation() -> None:
    rewards, groups = tensor(0.0, 2.0), torch.tensor([0, 0])
    torch.testing.assert_close(grpo(rewards, groups, std="population", eps=1.0), tensor(-0.5, 0.5))
    torch.testing.assert_close(reinforce_plus_plus(rewards, eps=1.0), tensor(-1.0, 1.0) / (math.sqrt(2) + 1))
    torch.testing.assert_close(
        grpo_passk(rewards, groups, k=2, std="sample", eps=1.0), tensor(0.0, 2.0) / (math.sqrt(2) + 1)
    )


@pytest.mark.parametrize("estimate", [reinforce_plus_plus, reinforce_plus_plus_baseline, grpo])
def test_eps_is_a_ten_thousandth_where_none_is_given(estimate: Callable[..., torch.Tensor]) -> None:
    """Rewards so close to each other that it decides: half of the standard deviation."""
    given = (tensor(0.0, math.sqrt(2) * 2e-4), torch.tensor([0, 0]))
    args = given[:1] if estimate is reinforce_plus_plus else given
    torch.testing.assert_close(estimate(*args), tensor(-1.0, 1.0) * math.sqrt(2) * 1e-4 / 3e-4)


def test_gpg_makes_up_for_rollouts_without_a_reward() -> None:
    rewards, groups = tensor(1.0, 0.0, 0.0, 0.0, NAN, 2.0), torch.tensor([0, 0, 1, 1, 1, 2])
    torch.testing.assert_close(gpg(rewards, groups), tensor(0.5, -0.5, 0, 0, 0, 0) * 5 / 2)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards, groups = tensor(1.0, 2.0, 6.0, 4.0, NAN, 0.0), torch.tensor([0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(rloo(rewards, groups), tensor(1 - 4.0, 2 - 3.5, 6 - 1.5, 4.0, 0.0, -4.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: grpo(tensor(1.0), torch.tensor([0]), std="sampled"),  # type: ignore[arg-type]
        lambda: grpo_passk(tensor(1.0), torch.tensor([0]), k=2, std="batch"),  # type: ignore[arg-type]
        lambda: sum_then_normalize(tensor(1.0)[None], torch.tensor([0]), std=None),  # type: ignore[arg-type]
    ],
)
def test_unknown_std_is_an_error(call) -> None:
    with pytest.raises(ValueError, match=r"^std = .* use "):
        call()


# The gradients that the estimators stand for: expectations over every possible group, by enumeration

VALUES = tensor(0.0, 1.0, 3.0)
LOGITS = torch.tensor([0.3, -0.8, 0.5])


def expected_gradient(estimator: Formula, rewards_of_action: torch.Tensor, n: int) -> torch.Tensor:
    """E[mean_i A_i grad log p(y_i)] of a softmax policy over three answers, groups of n."""
    p = LOGITS.softmax(0)
    total = torch.zeros(3)
    for actions in itertools.product(range(3), repeat=n):
        index = torch.tensor(actions)
        advantages = estimator(rewards_of_action[index], torch.zeros(n, dtype=torch.long))
        scores = torch.eye(3)[index] - p
        total += p[index].prod() * (advantages[:, None] * scores).mean(0)
    return total


def gradient(objective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_(True)
    return torch.autograd.grad(objective(logits.softmax(0)), logits)[0]


def best_of(p: torch.Tensor, k: int) -> torch.Tensor:
    """E[max of k rewards], from the distribution function of the maximum."""
    below = torch.cat([torch.zeros(1), p.cumsum(0)]) ** k
    return (VALUES * below.diff()).sum()


def test_rloo_is_unbiased_and_dr_grpo_shrinks_it() -> None:
    of_mean = gradient(lambda p: (p * VALUES).sum())
    torch.testing.assert_close(expected_gradient(rloo, VALUES, 4), of_mean)
    torch.testing.assert_close(expected_gradient(dr_grpo, VALUES, 4), of_mean * 3 / 4)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_passk_is_the_gradient_of_the_best_of_k(k: int, n: int) -> None:
    size = min(k, n)  # a group smaller than k is taken whole
    got = expected_gradient(lambda r, g: grpo_passk(r, g, k=k), VALUES, n)
    torch.testing.assert_close(got * size, gradient(lambda p: best_of(p, size)))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_max_rl_is_truncated_likelihood_gradient(n: int) -> None:
    """log p = -sum_k (1 - p)^k / k."""
    got = expected_gradient(max_rl, tensor(0.0, 0.0, 1.0), n)
    want = gradient(lambda p: torch.stack([-((1 - p[2]) ** k) / k for k in range(1, n)]).sum())
    torch.testing.assert_close(got, want)


# OPO, MaxRL, ReMax, Pass@k


def test_opo_subtracts_the_mean_reward_of_the_tokens() -> None:
    got = opo(tensor(1.0, 0.0, 5.0, 9.0, NAN), torch.tensor([1, 3, 2, 0, 70]), torch.tensor([4, 4, 9, 4, 4]))
    torch.testing.assert_close(got, tensor(0.75, -0.25, 0.0, 8.75, 0.0))


def test_opo_of_equal_lengths_is_dr_grpo() -> None:
    torch.testing.assert_close(opo(REWARDS, torch.full((10,), 7), GROUPS), dr_grpo(REWARDS, GROUPS))


def test_max_rl_by_hand() -> None:
    got = max_rl(tensor(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 1.0), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]))
    assert got.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.5, -0.5]


def test_max_rl_keeps_its_precision_at_small_pass_rates() -> None:
    rewards = torch.zeros(3000)
    rewards[17] = 1.0
    got = max_rl(rewards, torch.zeros(3000, dtype=torch.long))
    assert float(got[17]) == pytest.approx(2999, rel=1e-6) and float(got[0]) == pytest.approx(-1, rel=1e-6)


def test_max_rl_shifts_negative_rewards() -> None:
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    signs = tensor(1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, NAN)
    passed = tensor(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, NAN)
    assert max_rl(signs, groups).tolist() == max_rl(passed, groups).tolist() == [3, -1, -1, -1, 0, 0, 1, -1, 0]
    # A penalty in one group changes nothing in another.
    penalised = tensor(1.0, 0.0, 0.0, 0.0, -0.5, 0.0, 1.0, 0.0, NAN)
    assert max_rl(penalised, groups).tolist() == [3, -1, -1, -1, -1, 1, 1, -1, 0]


def test_remax_subtracts_the_greedy_reward() -> None:
    assert remax(tensor(1.0, 0.0, NAN, 2.0), tensor(0.5, 0.5, 0.5, NAN)).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert remax(torch.tensor([2, 0]), torch.tensor([1, 1])).dtype == torch.float32
    with pytest.raises(ValueError, match="greedy_rewards_N has shape"):
        remax(tensor(1.0, 0.0), tensor(1.0))


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7), st.integers(2, 7))
def test_passk_is_the_mean_over_all_subsets(rewards: list[int], k: int) -> None:
    size = min(k, len(rewards))
    expected = []
    for i, reward in enumerate(rewards):
        others = itertools.combinations(rewards[:i] + rewards[i + 1 :], size - 1)
        gains = [max(reward, *rest) - max(rest) for rest in others]
        expected.append(sum(gains) / len(gains))
    got = grpo_passk(torch.tensor(rewards), torch.zeros(len(rewards)).long(), k=k)
    torch.testing.assert_close(got, torch.tensor(expected))


def test_passk_of_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^k = 1: .*rloo"):
        grpo_passk(tensor(1.0, 0.0), torch.tensor([0, 0]), k=1)


# Several rewards


def test_gdpo_tells_apart_what_the_sum_does_not() -> None:
    """The paper's point: (1, 0) and (0, 1) of rewards of different rarity are equal as sums."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    groups = torch.zeros(4).long()
    summed, decoupled = sum_then_normalize(rewards, groups), gdpo(rewards, groups)
    assert float(summed[0]) == float(summed[1]) and float(decoupled[0] - decoupled[1]) > 0.25


def test_gdpo_does_not_depend_on_the_scale_of_a_reward() -> None:
    rewards, groups = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    scaled = rewards * tensor(100.0, 0.5, 3.0) + tensor(7.0, -1.0, 0.0)
    torch.testing.assert_close(gdpo(scaled, groups, eps=1e-9), gdpo(rewards, groups, eps=1e-9), atol=1e-4, rtol=1e-4)


def test_gdpo_takes_a_missing_reward_as_its_groups_mean() -> None:
    rewards = torch.tensor([[1.0, NAN], [0.0, 2.0], [0.0, 0.0], [1.0, 4.0], [NAN, NAN], [5.0, NAN]])
    groups = torch.tensor([0, 0, 0, 0, 0, 1])
    sums = grpo(rewards[:4, 0], groups[:4]) + torch.cat([tensor(0.0), grpo(rewards[1:4, 1], groups[1:4])])
    torch.testing.assert_close(gdpo(rewards, groups)[:4], reinforce_plus_plus(sums))
    assert gdpo(rewards, groups)[4:].tolist() == [0.0, 0.0]


def test_sum_lacking_reward_is_missing_unless_group_lacks_it() -> None:
    rewards = torch.tensor([[1.0, 4.0], [3.0, NAN], [2.0, 1.0], [NAN, NAN], [5.0, NAN], [7.0, NAN], [NAN, NAN]])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    exclude = grpo(tensor(5.0, NAN, 3.0, NAN, 5.0, 7.0, NAN), groups, std="none")
    zero = grpo(tensor(5.0, 3.0, 3.0, NAN, 5.0, 7.0, NAN), groups, std="none")
    torch.testing.assert_close(sum_then_normalize(rewards, groups, std="none"), exclude)
    torch.testing.assert_close(sum_then_normalize(rewards, groups, std="none", missing="zero"), zero)
    with pytest.raises(ValueError, match=r"^missing = 'drop'"):
        sum_then_normalize(rewards, groups, missing="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("combine", [gdpo, sum_then_normalize])
def test_reward_of_weight_zero_is_ignored(combine) -> None:
    rewards, groups = torch.tensor([[1.0, NAN], [3.0, 2.0], [0.0, 9.0]]), torch.tensor([0, 0, 0])
    torch.testing.assert_close(combine(rewards, groups, tensor(2.0, 0.0)), combine(rewards[:, :1], groups, tensor(2.0)))


@pytest.mark.parametrize("combine", [gdpo, sum_then_normalize])
def test_wrong_shapes_of_several_rewards_are_errors(combine) -> None:
    rewards, groups = torch.zeros(3, 2), torch.zeros(3).long()
    for arguments, name in [
        ((rewards[:, 0], groups), "rewards_NR"),
        ((rewards, groups, tensor(1.0)), "weights_R"),
        ((rewards, groups[:2]), "group_N"),
    ]:
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            combine(*arguments)


# REINFORCE++, GAE


def test_reinforce_plus_plus_by_hand() -> None:
    rewards = tensor(1.0, 2.0, 3.0, NAN)
    torch.testing.assert_close(reinforce_plus_plus(rewards, eps=1e-9), tensor(-1.0, 0.0, 1.0, 0.0))
    # Four tokens: mean 9/4, sample variance (25 + 1 + 2 * 9) / 16 / 3 = 11/12.
    got = reinforce_plus_plus(rewards, lengths_N=torch.tensor([1, 1, 2, 50]), eps=1e-9)
    torch.testing.assert_close(got, tensor(-1.25, -0.25, 0.75, 0.0) / math.sqrt(11 / 12))
    with pytest.raises(ValueError, match="lengths_N has shape"):
        reinforce_plus_plus(rewards, lengths_N=torch.tensor([1]))


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    rewards, groups = tensor(1.0, 0.0, 4.0, 4.0, 8.0), torch.tensor([0, 0, 1, 1, 2])
    # Centred: 1/2, -1/2, 0, 0, and a group of one that is left out: mean 0, sample variance 1/6.
    got = reinforce_plus_plus_baseline(rewards, groups, eps=1e-9)
    torch.testing.assert_close(got, tensor(0.5, -0.5, 0.0, 0.0, 0.0) * math.sqrt(6))
    # Six tokens: mean (1/2 - 3/2) / 6 = -1/6, sample variance (16 + 3 * 4 + 2 * 1) / 36 / 5 = 1/6.
    lengths = torch.tensor([1, 3, 1, 1, 9])
    got = reinforce_plus_plus_baseline(rewards, groups, lengths_N=lengths, eps=1e-9)
    torch.testing.assert_close(got, tensor(4 / 6, -2 / 6, 1 / 6, 1 / 6, 0.0) * math.sqrt(6))


@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([NAN, math.inf, 7.0]))
def test_masked_tokens_are_skipped_whatever_they_hold(seed: int, lam: float, junk: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 8, generator=generator) < 0.6
    rewards, values = (torch.randn(3, 8, generator=generator) for _ in range(2))
    got = gae(rewards.masked_fill(~mask, junk), values.masked_fill(~mask, junk), mask, gamma=0.9, lam=lam)
    for b in range(3):
        row = mask[b]
        alone = gae(rewards[b, row][None], values[b, row][None], torch.ones(1, int(row.sum())), gamma=0.9, lam=lam)
        for stream, expected in zip(got, alone, strict=True):
            torch.testing.assert_close(stream[b, row], expected[0])
            assert torch.equal(stream[b, ~row], torch.zeros(int((~row).sum())))
    assert whiten(got[0].masked_fill(~mask, junk), mask).equal(whiten(got[0], mask))
    tokens = reinforce_plus_plus_tokens(rewards.masked_fill(~mask, junk), mask, gamma=0.9)
    assert all(x.isfinite().all() and not x[~mask].any() for x in tokens)


def test_a_missing_reward_silences_its_row_alone() -> None:
    rewards, values = torch.tensor([[0.0, NAN], [0.0, 1.0], [2.0, NAN]]), torch.full((3, 2), 0.25)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0.0, 0.0], [0.75, 0.75], [1.75, 0.0]]
    assert returns.tolist() == [[0.25, 0.25], [1.0, 1.0], [2.0, 0.0]]
    got, _ = reinforce_plus_plus_tokens(rewards, mask, eps=1e-9)
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.0], [-1.0, -1.0], [2.0, 0.0]]) / math.sqrt(3))


def test_whiten_by_hand() -> None:
    got = whiten(torch.tensor([[1.0, 2.0, NAN], [3.0, 99.0, 99.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]), eps=1e-9)
    torch.testing.assert_close(got, torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))


def test_whiten_adds_1e_4_to_the_deviation() -> None:
    got = whiten(torch.tensor([[-3e-4, 0.0, 3e-4]]), torch.ones(1, 3))
    torch.testing.assert_close(got, torch.tensor([[-0.75, 0.0, 0.75]]))


def test_per_token_functions_take_any_dtype_and_pass_no_gradient() -> None:
    rewards, mask = torch.tensor([[1, 2], [0, 4]]), torch.tensor([[1, 1], [1, 0]])
    values = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    streams = [*gae(rewards, values, mask, gamma=1.0, lam=1.0), *reinforce_plus_plus_tokens(rewards, mask)]
    streams.append(whiten(values, mask))
    assert all(s.dtype == torch.float32 and not s.requires_grad for s in streams)
    assert streams[0].tolist() == [[2.0, 1.0], [-1.0, 0.0]]


def test_shapes_per_token_are_checked() -> None:
    x = torch.zeros(2, 3)
    for call, name in [
        (lambda: gae(x, x[:, :1], x, gamma=1.0, lam=1.0), "values_BT"),
        (lambda: gae(x, x, x[:1], gamma=1.0, lam=1.0), "mask_BT"),
        (lambda: reinforce_plus_plus_tokens(x, x[:1]), "mask_BT"),
        (lambda: whiten(x, x[:1]), "mask_BT"),
        (lambda: opo(x[0], torch.ones(1), torch.zeros(3)), "lengths_N"),
        (lambda: reinforce_plus_plus_baseline(x[0], torch.zeros(3), lengths_N=torch.ones(1)), "lengths_N"),
        (lambda: gdpo(x.T, torch.zeros(3), lengths_N=torch.ones(1)), "lengths_N"),
    ]:
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            call()


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_equal_rewards_are_exactly_without_signal(seed: int) -> None:
    """Whatever the statistics of the batch round to: skipping, replay and filters ask whether an advantage is 0."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(6).repeat_interleave(4)
    rewards = torch.rand(24, 2, generator=generator)
    rewards[4:12] = torch.rand(2, 2, generator=generator).repeat_interleave(4, 0)  # groups 1 and 2 agree
    for got in (gdpo(rewards, groups), reinforce_plus_plus_baseline(rewards[:, 0], groups)):
        assert not got[4:12].any() and got[:4].all() and got[12:].all()


# What each name in the configuration stands for, with these options.
OPTIONS = {
    "grpo": {"advantage_std": "population"},
    "gdpo": {"reward_weights": {"score": 1.0, "style": 0.5}, "advantage_std": "none", "advantage_counts": "tokens"},
    "sum_then_normalize": {"advantage_std": "population", "reward_weights": {"score": 1.0, "style": 0.5}},
    "grpo_passk": {"passk": 3, "passk_std": "sample"},
}
CONFIGURED: dict[str, Callable[[ScoredBatch], torch.Tensor]] = {
    "grpo": lambda s: grpo(s.rewards_N, s.group_N, std="population"),
    "dr_grpo": lambda s: dr_grpo(s.rewards_N, s.group_N),
    "rloo": lambda s: rloo(s.rewards_N, s.group_N),
    "gdpo": lambda s: gdpo(s.rewards_NR, s.group_N, s.weights_R, std="none", lengths_N=s.lengths_N),
    "gpg": lambda s: gpg(s.rewards_N, s.group_N),
    "sum_then_normalize": lambda s: sum_then_normalize(s.rewards_NR, s.group_N, s.weights_R, std="population"),
    "remax": lambda s: remax(s.rewards_N, s.greedy_rewards_N),
    "reinforce_plus_plus": lambda s: reinforce_plus_plus(s.rewards_N, lengths_N=s.lengths_N),
    "reinforce_plus_plus_baseline": lambda s: reinforce_plus_plus_baseline(
        s.rewards_N, s.group_N, lengths_N=s.lengths_N
    ),
    "opo": lambda s: opo(s.rewards_N, s.lengths_N, s.group_N),
    "grpo_passk": lambda s: grpo_passk(s.rewards_N, s.group_N, k=3, std="sample"),
    "max_rl": lambda s: max_rl(s.rewards_N, s.group_N),
    **{name: lambda s: s.rewards_N.nan_to_num(0.0) for name, traits in ADVANTAGES.items() if traits.over_tokens},
}


def test_every_configured_estimator_is_its_formula() -> None:
    """Bit for bit, on rewards and lengths that tell apart each argument that is passed and each that is not."""
    assert {*CONFIGURED, "precomputed"} == set(ADVANTAGES)
    rollouts = [
        rollout(group, sibling, score, [segment([8] * num_tokens)])
        for group, scores in enumerate([(3.0, 0.5, 0.0, 2.0), (1.0, 0.25, None, 0.0)])
        for sibling, (score, num_tokens) in enumerate(zip(scores, (4, 1, 2, 1), strict=True))
    ]
    for one in rollouts:
        if one.reward is not None and not one.reward.missing:
            one.reward = Reward(one.reward.score, {"style": float(one.sibling)})
    for name, expected in CONFIGURED.items():
        config = AlgorithmConfig.model_validate({"advantage": name, **OPTIONS.get(name, {})})
        units = [
            ScoredUnit(
                None if r.rollout_id == "0-3" else r.reward, r.group_id, r.num_tokens, {0: 0.75}.get(r.group_id, NAN)
            )
            for r in rollouts
        ]
        scored = ScoredBatch.from_units(units, config)
        assert scored.greedy_rewards_N[:4].tolist() == [0.75] * 4 and scored.rewards_N.isnan().sum() == 2
        assert torch.equal(Estimator(config, name)(scored), expected(scored)), name


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantage_counts_selects_batch_statistics(name: str) -> None:
    rewards, lengths = [3.0, 0.5, 0.0, 2.0], [4, 1, 2, 1]
    units = [ScoredUnit(Reward(r), i // 2, n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]

    def found(counts: str) -> torch.Tensor:
        config = AlgorithmConfig.model_validate({"advantage": name, "advantage_counts": counts})
        return Estimator(config, name)(ScoredBatch.from_units(units, config))

    assert torch.equal(found(""), found("rollouts" if name == "gdpo" else "tokens"))
    assert not torch.allclose(found("rollouts"), found("tokens"))
    assert abs(float(found("rollouts").sum())) < 1e-5 > abs(float((found("tokens") * torch.tensor(lengths)).sum()))


NAMED = composite_spec([{"function": "a.py:digits"}, {"function": "a.py:even", "name": "evens"}])
NAMED_REWARDS = [Reward(1.0, {"digits": 1.0}), Reward(1.5, {"digits": 1.0, "evens": 0.5})]


def test_inapplicable_reward_function_is_missing_reward() -> None:
    config = AlgorithmConfig.model_validate({"advantage": "gdpo", "reward_weights": {"digits": 1.0, "evens": 0.5}})
    found = rewards_of(NAMED_REWARDS, [NAMED] * 2, config).tolist()
    assert found[1] == [1.0, 0.5] and found[0][0] == 1.0 and math.isnan(found[0][1])


@pytest.mark.parametrize(("name", "named"), [("event", NAMED), ("evens", "a.py:digits")])
def test_a_name_that_no_function_has_is_an_error(name: str, named: str) -> None:
    config = AlgorithmConfig.model_validate({"advantage": "gdpo", "reward_weights": {name: 1.0}})
    with pytest.raises(ValueError, match=f"names '{name}', which the reward"):
        rewards_of(NAMED_REWARDS[:1], [named], config)


ALIGN = pytest.mark.parametrize("align", ["positions", "loss_tokens"])


def token_batch(seed: int = 0) -> dict[str, Any]:
    """Three groups with gaps in their rows; a reward at the last loss token of each."""
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(7, 9, generator=generator) < 0.7
    mask_BT[:, 1] = True
    last_B = (mask_BT * torch.arange(9)).amax(-1)
    rewards_BT = torch.zeros(7, 9).scatter(1, last_B[:, None], torch.randn(7, 1, generator=generator))
    return {
        "rewards_BT": rewards_BT,
        "mask_BT": mask_BT,
        "group_B": torch.tensor([4, 4, 4, 1, 1, 4, 9]),
        "logprobs_BT": -2 * torch.rand(7, 9, generator=generator),
        "squares_BT": torch.rand(7, 9, generator=generator),
    }


def test_optimal_token_baseline_by_hand() -> None:
    """W of both rows is 1 - 2 * 0.5 + 0.5 = 0.5 a token, four times that in row two, whose weights are 2."""
    rewards_BT = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1]])
    half_BT = torch.full((2, 3), 0.5)
    weights_BT = torch.tensor([[1.0] * 3, [2.0] * 3])
    got = optimal_token_baseline(
        rewards_BT, mask_BT, torch.tensor([7, 7]), half_BT.log(), half_BT, weights_BT=weights_BT
    )
    b = (0.5 * 3 + 2.0 * 1) / 2.5
    torch.testing.assert_close(got, torch.tensor([[3 - b, 3 - b, 0.0], [1 - b, 1 - b, 1.0]]))  # nobody has a third


def test_a_row_that_moved_the_policy_more_weighs_more() -> None:
    """At the first token both weigh the same; at the second, row two has sampled what was certain."""
    rewards_BT = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    sure = torch.tensor([[0.5, 0.5], [0.5, 1.0]])
    got = optimal_token_baseline(
        rewards_BT, torch.ones(2, 2), torch.zeros(2), sure.log(), torch.tensor([[0.5, 0.5], [0.5, 1.0]])
    )
    torch.testing.assert_close(got[0], torch.tensor([0.5, 1 - 1.0 / 1.5]))
    torch.testing.assert_close(got[1], torch.tensor([-0.5, -1.0 / 1.5]))


@ALIGN
def test_a_missing_reward_and_what_is_masked_change_nothing(align: Any) -> None:
    data = token_batch()
    expected = optimal_token_baseline(**data, align=align)
    noise: dict[str, Any] = {
        name: torch.where(data["mask_BT"], data[name], NAN) for name in data if name not in ("mask_BT", "group_B")
    }
    torch.testing.assert_close(optimal_token_baseline(**(data | noise), align=align), expected)
    assert not expected[~data["mask_BT"]].any()
    lost = data | {"rewards_BT": data["rewards_BT"].index_fill(0, torch.tensor([1]), NAN)}
    without: dict[str, Any] = {name: values[[0, 2, 3, 4, 5, 6]] for name, values in data.items()}
    got = optimal_token_baseline(**lost, align=align)
    torch.testing.assert_close(got[[0, 2, 3, 4, 5, 6]], optimal_token_baseline(**without, align=align))
    assert not got[1].any() and not torch.allclose(got[0], expected[0])


@ALIGN
def test_a_row_alone_in_its_group_has_no_baseline(align: Any) -> None:
    got = optimal_token_baseline(**token_batch(), align=align)
    assert not got[6].any() and got[:6].any(-1).all()


def test_alignment_is_by_place_or_by_number() -> None:
    data = token_batch()
    by_place, by_number = (optimal_token_baseline(**data, align=align) for align in ("positions", "loss_tokens"))
    assert not torch.allclose(by_place, by_number)
    whole: dict[str, Any] = data | {"mask_BT": torch.arange(9) < torch.tensor([9, 3, 7, 7, 2, 8, 5])[:, None]}
    by_place, by_number = (optimal_token_baseline(**whole, align=align) for align in ("positions", "loss_tokens"))
    torch.testing.assert_close(by_place, by_number)
    with pytest.raises(ValueError, match="align = 'rows'"):
        optimal_token_baseline(**data, align="rows")  # type: ignore[arg-type]


@ALIGN
def test_optimal_baseline_order_and_padding_do_not_matter(align: Any) -> None:
    data = token_batch()
    expected = optimal_token_baseline(**data, align=align)
    order = torch.tensor([5, 2, 6, 0, 3, 1, 4])
    moved = optimal_token_baseline(
        **dict[str, Any]({name: values[order] for name, values in data.items()}), align=align
    )
    torch.testing.assert_close(moved, expected[order])
    padded: dict[str, Any] = {n: v if v.ndim == 1 else torch.nn.functional.pad(v, (0, 3)) for n, v in data.items()}
    torch.testing.assert_close(optimal_token_baseline(**padded, align=align)[:, :9], expected)

"""What docs/algorithms.md says of bias and variance, on the enumerated bandit and on 10,000 rollouts of it."""

from __future__ import annotations

import pytest
import torch

import bandit
from bandit import DRAWS, EVERY_BT, NUM_PREFIXES, ROWS, SEGMENT_T, UNBIASED, T, V

BANDIT = bandit.make_bandit()
EXACT_PV = BANDIT.exact_gradient()
NORM = float(EXACT_PV.norm())
DRAWN_BT = BANDIT.draw(DRAWS, torch.Generator().manual_seed(11))
RESULTS = bandit.results(BANDIT)
BIASED = [row for row in ROWS if row != UNBIASED]
# What the product of an untruncated weight covers, for the token t: the set of tokens s.
SCOPES = {
    "none": lambda t, s: s < 0,
    "token, no cap": lambda t, s: s == t,
    "prefix, no cap": lambda t, s: s <= t,
    "segment, no cap": lambda t, s: SEGMENT_T[s] == SEGMENT_T[t],
    UNBIASED: lambda t, s: s >= 0,
}


def test_the_exact_gradient_is_that_of_the_expected_reward() -> None:
    logits_PV = BANDIT.current.clone().requires_grad_(True)
    expected_reward = (bandit.logprobs(logits_PV, EVERY_BT).sum(-1).exp() * BANDIT.reward).sum()
    (gradient_PV,) = torch.autograd.grad(expected_reward, logits_PV)
    torch.testing.assert_close(EXACT_PV, gradient_PV, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("row", SCOPES)
def test_an_untruncated_weight_replaces_the_policy_where_its_product_is_taken_and_nowhere_else(row: str) -> None:
    """Its expected gradient is the on-policy one of rollouts drawn from that mixture of policies, without weights."""
    current_BT, behavior_BT = bandit.logprobs(BANDIT.current, EVERY_BT), BANDIT.behavior_logprobs(EVERY_BT)
    expected_PV = torch.zeros_like(EXACT_PV)
    for t in range(T):
        covered_T = SCOPES[row](t, torch.arange(T))
        probability_S = torch.where(covered_T, current_BT, behavior_BT).sum(-1).exp()
        only_t_BT = torch.zeros_like(current_BT)
        only_t_BT[:, t] = 1.0
        expected_PV += BANDIT.mean_gradient(EVERY_BT, only_t_BT, probability_S)
    mean_PV, _ = BANDIT.moments(row)
    assert float((mean_PV - expected_PV).norm()) < 1e-5 * NORM


def test_only_the_untruncated_sequence_weight_is_unbiased() -> None:
    assert RESULTS[UNBIASED].bias < 1e-5
    for row in BIASED:
        assert RESULTS[row].bias > 0.4, row


@pytest.mark.parametrize("row", ROWS)
def test_ten_thousand_rollouts_agree_with_the_enumeration(row: str) -> None:
    """Along each direction the mean of the draws is within 4 standard errors of what was enumerated.

    Along the bias it is far from the exact gradient if the weights are biased, and near it if they are not.
    """
    mean_PV, variance = BANDIT.moments(row)
    weights_BT = BANDIT.weights(DRAWN_BT, *ROWS[row])
    generator = torch.Generator().manual_seed(7)
    random = [torch.randn(NUM_PREFIXES, V, generator=generator, dtype=torch.float64) for _ in range(3)]

    def scores(about_PV: torch.Tensor, directions: list[torch.Tensor]) -> list[float]:
        along = [BANDIT.along(DRAWN_BT, weights_BT, direction) for direction in directions]
        return [
            float((x.mean() - (about_PV * direction).sum()) / x.std() * DRAWS**0.5)
            for x, direction in zip(along, directions, strict=True)
        ]

    assert all(abs(score) < 4 for score in scores(mean_PV, [EXACT_PV, mean_PV, *random]))
    if row == UNBIASED:
        assert all(abs(score) < 4 for score in scores(EXACT_PV, [EXACT_PV, *random]))
    else:
        assert scores(EXACT_PV, [mean_PV - EXACT_PV])[0] > 5
    # Untruncated products are heavy-tailed: 10,000 draws still miss a part of their variance.
    drawn = float(BANDIT.squared_norms(DRAWN_BT, weights_BT).mean())
    assert drawn == pytest.approx(variance + float(mean_PV.square().sum()), rel=0.35 if row == UNBIASED else 0.2)


def test_the_page_has_the_table_of_the_script() -> None:
    text = bandit.DOC.read_text()
    shown = text.split(bandit.BEGIN)[1].split(bandit.END)[0].strip().splitlines()
    made = bandit.table(RESULTS).splitlines()
    assert shown[:2] == made[:2] and len(shown) == len(made)
    for of_page, of_script in zip(shown[2:], made[2:], strict=True):
        for old, new in zip(of_page.split("|"), of_script.split("|"), strict=True):
            try:
                # A last digit may round differently on another machine.
                assert float(old) == pytest.approx(float(new), rel=0.01, abs=0.021)
            except ValueError:
                assert old == new

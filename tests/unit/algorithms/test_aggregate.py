"""Aggregation: by hand, token-mean against seq-mean, and independence of the split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.algorithms.loss import aggregate

LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0], [4.0, 6.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]).bool()
GROUP = torch.tensor([5, 5, 5, 8])
SEQUENCE_MODES = ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MODES = ["token-mean", "token-sum", "prompt-mean", *SEQUENCE_MODES]


def test_norm_defaults_to_the_row_length() -> None:
    assert float(aggregate(LOSS, MASK, "seq-mean-token-sum-norm")) == pytest.approx(26 / 3 / 3)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))
def test_token_mean_is_seq_mean_at_equal_lengths(rows: int, length: int, seed: int) -> None:
    loss = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, length).bool()
    torch.testing.assert_close(
        aggregate(loss, mask, "token-mean"), aggregate(loss, mask, "seq-mean-token-mean"), atol=1e-5, rtol=1e-5
    )


def test_token_mean_is_not_seq_mean_at_unequal_lengths() -> None:
    assert abs(float(aggregate(LOSS, MASK, "token-mean") - aggregate(LOSS, MASK, "seq-mean-token-mean"))) > 1


@pytest.mark.parametrize("mode", MODES)
@given(split=st.integers(1, 3))
def test_any_split_sums_to_the_whole(mode, split: int) -> None:
    """With the global denominator, parts add up: loss and gradient. Garbage under the mask changes nothing."""
    loss = torch.where(MASK, LOSS, float("nan")).requires_grad_(True)
    denominator = {"token-mean": 6.0, "token-sum": None, "prompt-mean": 2.0}.get(mode, 3.0)
    group_tokens = torch.tensor([4, 4, 4, 2])
    whole = aggregate(loss, MASK, mode, group_B=GROUP, norm=4.0)
    parts = [
        aggregate(
            loss[i], MASK[i], mode, denominator=denominator, group_B=GROUP[i], group_tokens_B=group_tokens[i], norm=4.0
        )
        for i in (slice(split), slice(split, 4))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    (of_whole,) = torch.autograd.grad(whole, loss)
    (of_parts,) = torch.autograd.grad(parts[0] + parts[1], loss)
    torch.testing.assert_close(of_parts, of_whole)
    assert torch.equal(of_whole[~MASK], torch.zeros(6))


@pytest.mark.parametrize("mode", MODES)
def test_order_of_rows_and_padding_do_not_matter(mode) -> None:
    """With `norm` given: its default is the padded length."""
    whole = aggregate(LOSS, MASK, mode, group_B=GROUP, norm=4.0)
    order = torch.tensor([2, 3, 0, 1])
    permuted = aggregate(LOSS[order], MASK[order], mode, group_B=GROUP[order], norm=4.0)
    padded = aggregate(
        torch.nn.functional.pad(LOSS, (1, 2), value=7.0),
        torch.nn.functional.pad(MASK, (1, 2)),
        mode,
        group_B=GROUP,
        norm=4.0,
    )
    torch.testing.assert_close(permuted, whole)
    torch.testing.assert_close(padded, whole)


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("mode", ["token-mean", *SEQUENCE_MODES, "prompt-mean"])
def test_without_the_global_denominator_the_split_shows(mode, split: int) -> None:
    """So the test above does test something: means of parts do not add up to the mean of the whole."""
    whole = aggregate(LOSS, MASK, mode, group_B=GROUP)
    parts = [aggregate(LOSS[i], MASK[i], mode, group_B=GROUP[i]) for i in (slice(split), slice(split, 4))]
    assert float(parts[0] + parts[1]) != pytest.approx(float(whole), rel=1e-2)


def test_prompt_mean_weighs_prompts_and_token_mean_weighs_tokens() -> None:
    """Two groups of 4 and 2 tokens: equal weight to each group, against equal weight to each token."""
    loss = torch.tensor([[1.0, 1.0], [1.0, 1.0], [4.0, 4.0]])
    mask, groups = torch.ones(3, 2), torch.tensor([1, 1, 0])
    assert float(aggregate(loss, mask, "prompt-mean", group_B=groups)) == 2.5
    assert float(aggregate(loss, mask, "token-mean")) == 2.0
    mask[2] = 0  # a prompt without loss tokens is no prompt
    assert float(aggregate(loss, mask, "prompt-mean", group_B=groups)) == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_is_zero(mode) -> None:
    assert float(aggregate(LOSS, torch.zeros_like(MASK), mode, group_B=GROUP)) == 0.0


def test_errors() -> None:
    with pytest.raises(ValueError, match="not an aggregation: use one of token-mean, .*prompt-mean"):
        aggregate(LOSS, MASK, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group_B"):
        aggregate(LOSS, MASK, "prompt-mean")
    with pytest.raises(ValueError, match=r"mask_BT is \[4, 1\]"):
        aggregate(LOSS, MASK[:, :1], "token-mean")

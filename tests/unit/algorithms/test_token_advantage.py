"""The optimal token baseline against hand-computed values and the properties that define it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollover.algorithms.advantage import optimal_token_baseline

NAN = float("nan")
ALIGN = pytest.mark.parametrize("align", ["positions", "loss_tokens"])


def batch(seed: int = 0) -> dict[str, Any]:
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


def test_by_hand() -> None:
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
    data = batch()
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
    got = optimal_token_baseline(**batch(), align=align)
    assert not got[6].any() and got[:6].any(-1).all()


def test_alignment_is_by_place_or_by_number() -> None:
    data = batch()
    by_place, by_number = (optimal_token_baseline(**data, align=align) for align in ("positions", "loss_tokens"))
    assert not torch.allclose(by_place, by_number)
    whole: dict[str, Any] = data | {"mask_BT": torch.arange(9) < torch.tensor([9, 3, 7, 7, 2, 8, 5])[:, None]}
    by_place, by_number = (optimal_token_baseline(**whole, align=align) for align in ("positions", "loss_tokens"))
    torch.testing.assert_close(by_place, by_number)
    with pytest.raises(ValueError, match="align = 'rows'"):
        optimal_token_baseline(**data, align="rows")  # type: ignore[arg-type]


@ALIGN
def test_order_of_rows_and_padding_do_not_matter(align: Any) -> None:
    data = batch()
    expected = optimal_token_baseline(**data, align=align)
    order = torch.tensor([5, 2, 6, 0, 3, 1, 4])
    moved = optimal_token_baseline(
        **dict[str, Any]({name: values[order] for name, values in data.items()}), align=align
    )
    torch.testing.assert_close(moved, expected[order])
    padded: dict[str, Any] = {n: v if v.ndim == 1 else torch.nn.functional.pad(v, (0, 3)) for n, v in data.items()}
    torch.testing.assert_close(optimal_token_baseline(**padded, align=align)[:, :9], expected)

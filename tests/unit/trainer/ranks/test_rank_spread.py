"""Groups go to ranks whole, by their tokens, and always the same way."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollover.trainer.passes import row_tokens
from rollover.trainer.ranks.backend import spread
from rollover.types import Sample
from samples import random_samples


def tokens(samples: list[Sample]) -> int:
    """Of the rows that these samples make, a prompt of a group once."""
    return row_tokens([s for s in samples if s.mask.any()])


def of_group(samples: list[Sample], group: int) -> list[Sample]:
    return [s for s in samples if s.group_id == group]


@given(st.integers(0, 50), st.integers(0, 9), st.integers(1, 4), st.integers(1, 5))
def test_every_group_has_one_rank_and_ranks_have_about_as_much_to_do(
    seed: int, groups: int, size: int, num_ranks: int
) -> None:
    samples = random_samples(seed, groups, size)
    parts = spread(samples, num_ranks)
    assert len(parts) == num_ranks
    order = {s.rollout_id: i for i, s in enumerate(samples)}
    places = [[order[s.rollout_id] for s in part] for part in parts]
    assert sorted(place for part in places for place in part) == list(range(len(samples)))
    assert all(part == sorted(part) for part in places), "in the order in which they came"
    for group in range(groups):
        assert sum(bool(of_group(part, group)) for part in parts) == 1
    loads = [tokens(part) for part in parts]
    largest = max((tokens(of_group(samples, group)) for group in range(groups)), default=0)
    assert max(loads) - min(loads) <= largest, "or its last group had gone to another"


def test_the_same_samples_go_the_same_way_also_where_groups_are_equal() -> None:
    samples = random_samples(2, num_groups=1, size=2)
    equal = [replace(s, rollout_id=f"{g}-{i}", group_id=g) for g in (5, 3, 9) for i, s in enumerate(samples)]
    assert [[s.group_id for s in part] for part in spread(equal, 2)] == [[5, 5, 9, 9], [3, 3]]


def test_what_has_no_loss_token_is_work_for_nobody() -> None:
    samples = random_samples(4, num_groups=3)
    for s in of_group(samples, 0):
        s.mask[:] = False
    parts = spread(samples, 2)
    alone = next(part for part in parts if len({s.group_id for s in part if s.mask.any()}) == 1)
    assert {s.group_id for part in parts for s in part} == {0, 1, 2} and alone
    assert all(any(s.mask.any() for s in part) for part in parts)

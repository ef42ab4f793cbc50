from __future__ import annotations

from pathlib import Path

import pytest

from rollover.rollout.order import (
    ORDERS,
    RolloutView,
    fifo,
    load_order,
    longest_first,
    oldest_first,
    shortest_remaining,
)

VIEWS = [
    RolloutView("0-0", 0, 0, num_tokens=5, remaining=9, admitted_at=0, parked_since=3),
    RolloutView("0-1", 0, 1, num_tokens=9, remaining=5, admitted_at=0, parked_since=0),
    RolloutView("2-0", 2, 0, num_tokens=9, remaining=2, admitted_at=1, parked_since=2),
    RolloutView("3-0", 3, 0, num_tokens=1, remaining=2, admitted_at=1, parked_since=1),
]


def order(key) -> list[str]:
    forward, backward = sorted(VIEWS, key=key), sorted(reversed(VIEWS), key=key)
    assert forward == backward, "the order must be total"
    return [v.rollout_id for v in forward]


def test_oldest_first() -> None:
    assert order(oldest_first) == ["0-0", "0-1", "2-0", "3-0"]


def test_longest_first_breaks_ties_by_age() -> None:
    assert order(longest_first) == ["0-1", "2-0", "0-0", "3-0"]


def test_shortest_remaining_breaks_ties_by_age() -> None:
    assert order(shortest_remaining) == ["2-0", "3-0", "0-1", "0-0"]


def test_fifo() -> None:
    assert order(fifo) == ["0-1", "3-0", "2-0", "0-0"]


def own(folder: Path, returned: str) -> str:
    """The name of a user's order that returns this expression of `view`."""
    path = folder / "mine.py"
    path.write_text(f"def order(view):\n    return {returned}\n")
    return f"{path}:order"


@pytest.mark.parametrize("returned", ["()", "(-view.num_tokens,)", "(view.remaining, view.num_tokens > 5)"])
def test_a_users_order_is_made_total_by_admission(tmp_path: Path, returned: str) -> None:
    key = load_order(own(tmp_path, returned))
    assert all(key(view)[-2:] == (view.group_id, view.sibling) for view in VIEWS)
    expected = sorted(VIEWS, key=lambda view: (*eval(returned, {"view": view}), view.group_id, view.sibling))
    assert order(key) == [view.rollout_id for view in expected]


@pytest.mark.parametrize("returned", ['(1, "a")', '("a", 1)', "(1, 1.5)", "(None,)", "[1, 2]", "7", "None", '"ab"'])
def test_a_users_order_that_is_no_tuple_of_integers_is_refused(tmp_path: Path, returned: str) -> None:
    name = own(tmp_path, returned)
    with pytest.raises(ValueError) as refusal:
        load_order(name)(VIEWS[0])
    for part in ("rollout.order", name, f"returned {eval(returned)!r}", "tuple of integers"):
        assert part in str(refusal.value)


def test_the_names_of_ours_are_looked_up_first() -> None:
    assert all(load_order(name) is function for name, function in ORDERS.items())

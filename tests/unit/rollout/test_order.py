from __future__ import annotations

from rollover.config import rollout as config
from rollover.rollout.order import ORDERS, RolloutView, fifo, longest_first, oldest_first, shortest_remaining

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


def test_every_order_of_the_config_exists() -> None:
    assert set(config.ORDERS) == set(ORDERS)

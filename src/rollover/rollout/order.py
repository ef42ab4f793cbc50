"""Order of resumption: functions of a read-only view, smallest key first. Never touches a rollout.

To add one, write a function `RolloutView -> key` and name it in config/rollout.py, or name a custom one in the
configuration. Every key ends with the admission order, so that the order is total (`load_order` appends it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rollover.config.rollout import ORDERS as NAMES
from rollover.functions import custom_function, described


class RolloutView(NamedTuple):
    """Input of an order function.

    num_tokens: tokens so far. remaining: tokens left of the cumulative budget. admitted_at: trainer version at the
    admission of the group. parked_since: sequence number of the last parking (larger is later).
    """

    rollout_id: str
    group_id: int
    sibling: int
    num_tokens: int
    remaining: int
    admitted_at: int
    parked_since: int


OrderKey = tuple[int, ...]


def oldest_first(view: RolloutView) -> OrderKey:
    """Sort by admission, which bounds the wait of long answers."""
    return (view.admitted_at, view.group_id, view.sibling)


def longest_first(view: RolloutView) -> OrderKey:
    """Sort by most tokens so far: the tail starts early, as in longest-processing-time scheduling."""
    return (-view.num_tokens, view.group_id, view.sibling)


def shortest_remaining(view: RolloutView) -> OrderKey:
    """Sort by fewest remaining tokens of the budget."""
    return (view.remaining, view.group_id, view.sibling)


def fifo(view: RolloutView) -> OrderKey:
    """Sort by the order of parking."""
    return (view.parked_since, view.group_id, view.sibling)


# By the names that the configuration has: each is a function of this file.
ORDERS: dict[str, Callable[[RolloutView], OrderKey]] = {name: globals()[name] for name in NAMES}


def load_order(name: str) -> Callable[[RolloutView], OrderKey]:
    """Return the order of that name, or the custom function `module:function`. Raises ValueError if missing."""
    if name in ORDERS:
        return ORDERS[name]
    function = custom_function("rollout.order", name, "a tuple of integers for a RolloutView, smallest first")

    def key(view: RolloutView) -> OrderKey:
        own = function(view)
        if not isinstance(own, tuple) or not all(isinstance(part, int) for part in own):
            raise function.refused(described(own))
        return (*own, view.group_id, view.sibling)

    return key

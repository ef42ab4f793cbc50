"""Whose episodes wait for each other, where only so many may run at once.

An evaluation is played while training's episodes wait for the model: were they to share their places, it would wait for
these, and they for its end.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Places = TypeVar("_Places")


class Lane(enum.Enum):
    """What an Episode is played for."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class PerLane(Generic[_Places]):
    """What `make` makes, once for each lane of the running event loop: a program may step a run by several loops, one
    after the other."""

    def __init__(self, make: Callable[[], _Places]) -> None:
        self._make, self._loop = make, None
        self._of: dict[Lane, _Places] = {}

    def here(self, lane: Lane) -> _Places:
        """Of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._of = loop, {}
        if lane not in self._of:
            self._of[lane] = self._make()
        return self._of[lane]

    def __iter__(self) -> Iterator[_Places]:
        """All that there are of the last loop."""
        return iter(self._of.values())

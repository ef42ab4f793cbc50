"""What plays an Episode: a function of the user's own, a program, or an environment of verifiers.

Episodes of training and of an evaluation wait for each other in lanes of their own, where only so many may run at once:
an evaluation is played while training's episodes wait for the model. Were they to share their places, it would wait for
these, and they for its end.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from rollover.types import Reward

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


Answer = Reward | dict[str, Reward] | None
"""The reward of every trajectory that has none of its own, or that of each role."""
Waiting = Callable[[], AbstractContextManager[None]]
"""Inside it the time that passes is not the agent's."""


class Workflow(Protocol):
    """`spec`: as messages name it. `wanted`: names of the values that it is called with. `over_http`: whether it asks
    the gateway."""

    @property
    def spec(self) -> str: ...

    @property
    def wanted(self) -> Sequence[str]: ...

    @property
    def over_http(self) -> bool: ...

    async def __call__(self, values: Mapping[str, Any], waiting: Waiting = ..., lane: Lane = ..., /) -> Answer:
        """Play one. What it raises fails the Episode; cancelled, it leaves nothing behind that runs. What bounds how
        many run at once bounds each lane by itself."""
        ...

    def over(self, app: Any) -> Any:
        """The gateway's ASGI application `app`, as the agents of this workflow ask it."""
        ...

    async def start(self, base_url: str) -> None:
        """Begin to serve what it needs while it is played. `base_url`: the gateway's, which is up. ValueError where
        that cannot be."""
        ...

    async def close(self) -> None:
        """End what still runs of it."""
        ...


class AsksByKey:
    """A workflow whose agents name their trajectory by its key, and need nothing that is served besides."""

    def over(self, app: Any) -> Any:
        return app

    async def start(self, base_url: str) -> None:
        """Nothing."""

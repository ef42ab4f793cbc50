"""What plays an Episode: a function of the user's own, a program, or an environment of verifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rollover.types import Reward

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

    async def __call__(self, values: Mapping[str, Any], waiting: Waiting = ..., /) -> Answer:
        """Play one. What it raises fails the Episode; cancelled, it leaves nothing behind that runs."""
        ...

    def apart(self) -> Workflow:
        """For an evaluation, during which training's episodes wait for the model: what bounds how many run at once
        must not have those of the evaluation wait for them. `close` of this one closes it, too."""
        ...

    async def close(self) -> None:
        """End what still runs of it."""
        ...

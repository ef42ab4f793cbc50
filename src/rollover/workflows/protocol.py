"""What plays an Episode: a function of the user's own, a program, or an environment of verifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rollover.types import Reward
from rollover.workflows.lanes import Lane

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

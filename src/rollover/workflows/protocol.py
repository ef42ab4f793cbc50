"""What plays an Episode: a function of the user's own, or an environment of verifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollover.types import Reward


class Workflow(Protocol):
    """`spec`: as messages name it. `wanted`: names of the values that it is called with. `over_http`: whether it asks
    the gateway."""

    @property
    def spec(self) -> str: ...

    @property
    def wanted(self) -> Sequence[str]: ...

    @property
    def over_http(self) -> bool: ...

    async def __call__(self, values: Mapping[str, Any], /) -> Reward | None:
        """Play one. Returns the reward of every trajectory that has none of its own; what it raises fails the
        Episode."""
        ...

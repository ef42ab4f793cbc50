"""The user's function that is a workflow: which arguments it wants, by their names, and what its answer means."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rollover.functions import OwnFunction, described, own_function
from rollover.types import Reward

KEY = "workflow.function"
OVER_HTTP = ("client", "base_url", "api_key")
"""Parameters for which the gateway is served."""
PARAMETERS = ("task", "episode", *OVER_HTTP, "model")
_RETURNS = "a reward (a number, or a Reward) or None"


class WorkflowFunction:
    """`function`, an `async def` whose parameters are named as in PARAMETERS. ValueError, which names the fix, for
    another one."""

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        own, self.spec = OwnFunction.over(function, KEY, _RETURNS), spec
        self._own = OwnFunction(own.function, KEY, spec, _RETURNS)
        parameters = inspect.signature(own.function).parameters.values()
        if not inspect.iscoroutinefunction(inspect.unwrap(own.function)):
            raise ValueError(
                f"{KEY} = {spec!r} is no async def: it would stop every other episode while it runs. Write async def,"
                " and await what it calls"
            )
        wanted = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        self.wanted = [p.name for p in parameters if p.name in PARAMETERS and p.kind is not p.POSITIONAL_ONLY]
        if unknown := [name for name in wanted if name not in self.wanted]:
            raise ValueError(
                f"{KEY} = {spec!r} has the parameter {unknown[0]!r}, for which there is no value. Its parameters are"
                f" found by their names: {', '.join(PARAMETERS)}"
            )

    @classmethod
    def named(cls, spec: str) -> WorkflowFunction:
        """The one that the configuration names."""
        return cls(own_function(KEY, spec, _RETURNS).function, spec)

    @property
    def over_http(self) -> bool:
        """Whether it wants a server to ask."""
        return any(name in OVER_HTTP for name in self.wanted)

    async def __call__(self, values: Mapping[str, Any]) -> Reward | None:
        """Run it with those of these values that it wants. FunctionError for an answer that is no reward; what it
        raises is raised as it is."""
        answer = await self._own.function(**{name: values[name] for name in self.wanted})
        reward = as_reward(answer)
        if reward is None and answer is not None:
            raise self._own.refused(described(answer))
        return reward


def as_reward(value: Any) -> Reward | None:
    """A number, true and false among them, or a Reward; None for anything else, NaN and infinity too."""
    if isinstance(value, Reward):
        return value if value.score is None or math.isfinite(value.score) else None
    try:
        score = float(value) if isinstance(value, bool | int | float) or hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return Reward(score) if math.isfinite(score) else None

"""The user's function that is a workflow: which arguments it wants, by their names, and what its answer means."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rollover.functions import OwnFunction, described, is_score, own_function
from rollover.types import Reward
from rollover.workflows.protocol import Answer, AsksByKey, Lane, Waiting

KEY = "workflow.function"
OVER_HTTP = ("client", "base_url", "api_key")
"""Parameters for which the gateway is served."""
PARAMETERS = ("task", "episode", *OVER_HTTP, "model")
IN_WORKER = tuple(name for name in PARAMETERS if name != "episode")
"""Those of a plain function, which runs in a worker process."""
RETURNS = "a reward (a number, or a Reward), rewards by roles, or None"


class WorkflowFunction(AsksByKey):
    """`function`, an `async def` whose parameters are named as in PARAMETERS. ValueError, which names the fix, for
    another one."""

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        own, self.spec = OwnFunction.over(function, KEY, RETURNS), spec
        self._own = OwnFunction(own.function, KEY, spec, RETURNS)
        if not is_async(own.function):
            raise ValueError(
                f"{KEY} = {spec!r} is no async def: it would stop every other episode while it runs. Set"
                " workflow.num_processes, the worker processes that it is to run in; or write async def, and await what"
                " it calls"
            )
        self.wanted = wanted_by(own.function, spec)

    @classmethod
    def named(cls, spec: str) -> WorkflowFunction:
        """The one that the configuration names."""
        return cls(own_function(KEY, spec, RETURNS).function, spec)

    @property
    def over_http(self) -> bool:
        return any(name in OVER_HTTP for name in self.wanted)

    async def __call__(
        self, values: Mapping[str, Any], waiting: Waiting = nullcontext, lane: Lane = Lane.TRAINING, /
    ) -> Answer:
        """Run it. FunctionError for an answer that is none; what it raises is raised as it is."""
        return checked_answer(await self._own.function(**{name: values[name] for name in self.wanted}), self._own)

    async def close(self) -> None:
        """Nothing: it is a task of the event loop."""


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def wanted_by(
    function: Callable[..., Any], spec: str, known: Sequence[str] = PARAMETERS, why_not: str = ""
) -> list[str]:
    """The parameters of `function` among `known`. ValueError for another one without a default; `why_not` is said of
    those of PARAMETERS that are not known."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    wanted = [p.name for p in parameters if p.name in known and p.kind is not p.POSITIONAL_ONLY]
    if unknown := [name for name in needed if name not in wanted]:
        raise ValueError(
            f"{KEY} = {spec!r} has the parameter {unknown[0]!r}, for which there is no value"
            f"{f': {why_not}' if unknown[0] in PARAMETERS else ''}. Its parameters are found by their names:"
            f" {', '.join(known)}"
        )
    return wanted


def as_reward(value: Any) -> Reward | None:
    """A number (a boolean counts) or a Reward; None for anything else, for NaN and for numbers beyond MOST_SCORE."""
    if isinstance(value, Reward):
        return value if value.score is None or is_score(value.score) else None
    try:
        score = float(value) if isinstance(value, bool | int | float) or hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return Reward(score) if is_score(score) else None


def as_answer(value: Any) -> Answer:
    """What a workflow returned. ValueError, with it in words, where it is no answer."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        if (reward := as_reward(value)) is None:
            raise ValueError(described(value))
        return reward
    rewards = {role: as_reward(of) for role, of in value.items()}
    if wrong := [role for role, of in rewards.items() if of is None or not isinstance(role, str)]:
        raise ValueError(f"{described(value[wrong[0]])} for the role {wrong[0]!r}")
    return {role: reward for role, reward in rewards.items() if reward is not None}


def checked_answer(value: Any, own: OwnFunction) -> Answer:
    """What `own` returned. FunctionError where it is no answer."""
    try:
        return as_answer(value)
    except ValueError as error:
        raise own.refused(str(error)) from None

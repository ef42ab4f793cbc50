"""Workflows, which play episodes: the protocol, and the user's `async def` as one.

    WorkflowFunction   an `async def` on the run's event loop (this file)
    WorkflowPool       a plain `def` in worker processes (pool.py)
    WorkflowCommand    a program (command.py)
    VerifiersWorkflow  an environment of verifiers (plugins/verifiers)

Training and evaluation have separate concurrency limits (`Lane`): an evaluation is played while training's episodes
wait for the model, so a shared limit could deadlock.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from rollover.functions import CustomFunction, described, is_score
from rollover.types import Reward

_Places = TypeVar("_Places")


class Lane(enum.Enum):
    """Purpose of an Episode."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class PerLane(Generic[_Places]):
    """One object from `make` for each lane of the running event loop. A program may step a run by several event loops,
    one after the other."""

    def __init__(self, make: Callable[[], _Places]) -> None:
        self._make, self._loop = make, None
        self._of: dict[Lane, _Places] = {}

    def here(self, lane: Lane) -> _Places:
        """Return the lane's object for the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._of = loop, {}
        if lane not in self._of:
            self._of[lane] = self._make()
        return self._of[lane]

    def __iter__(self) -> Iterator[_Places]:
        """Iterate over the objects of the last event loop."""
        return iter(self._of.values())


Answer = Reward | dict[str, Reward] | None
"""The reward of all trajectories without their own, or rewards by role."""
Waiting = Callable[[], AbstractContextManager[None]]
"""Context in which the agent's clock is stopped."""


class Workflow(Protocol):
    """Plays episodes. `spec`: its name in messages. `wanted`: names of the values that it takes. `over_http`: whether
    its agents call the gateway."""

    @property
    def spec(self) -> str: ...

    @property
    def wanted(self) -> Sequence[str]: ...

    @property
    def over_http(self) -> bool: ...

    async def __call__(self, values: Mapping[str, Any], waiting: Waiting = ..., lane: Lane = ..., /) -> Answer:
        """Play one Episode. An exception fails the Episode; after a cancellation nothing of it runs any more. A
        concurrency limit applies to each lane separately."""
        ...

    def over(self, app: Any) -> Any:
        """Wrap the gateway's ASGI application `app` for the agents of this workflow."""
        ...

    async def start(self, base_url: str) -> None:
        """Start servers that the workflow needs. `base_url`: of the running gateway. ValueError if one cannot start."""
        ...

    async def close(self) -> None:
        """End everything that still runs."""
        ...


class AsksByKey:
    """Base of workflows whose agents send the API key of their trajectory, and need no server but the gateway."""

    def over(self, app: Any) -> Any:
        return app

    async def start(self, base_url: str) -> None:
        """Do nothing."""


KEY = "workflow.function"
OVER_HTTP = ("client", "base_url", "api_key")
"""Parameters that need the gateway."""
PARAMETERS = ("task", "episode", *OVER_HTTP, "model")
IN_WORKER = tuple(name for name in PARAMETERS if name != "episode")
"""Parameters of a plain function, which runs in a worker process."""
RETURNS = "a reward (a number, or a Reward), rewards by roles, or None"


class WorkflowFunction(AsksByKey):
    """The user's `async def`, whose parameters are named as in PARAMETERS. ValueError, with the fix, for another
    function."""

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        own, self.spec = CustomFunction.over(function, KEY, RETURNS), spec
        self._own = CustomFunction(own.function, KEY, spec, RETURNS)
        if not is_async(own.function):
            raise ValueError(
                f"{KEY} = {spec!r} is no async def: it would stop every other episode while it runs. Set"
                " workflow.num_processes, the worker processes that it is to run in; or write async def, and await what"
                " it calls"
            )
        self.wanted = wanted_by(own.function, spec)

    @property
    def over_http(self) -> bool:
        return any(name in OVER_HTTP for name in self.wanted)

    async def __call__(
        self, values: Mapping[str, Any], waiting: Waiting = nullcontext, lane: Lane = Lane.TRAINING, /
    ) -> Answer:
        """Run the function. FunctionError for an invalid answer; its own exceptions pass through."""
        return checked_answer(await self._own.function(**{name: values[name] for name in self.wanted}), self._own)

    async def close(self) -> None:
        """Do nothing: calls are tasks of the event loop."""


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def wanted_by(
    function: Callable[..., Any], spec: str, known: Sequence[str] = PARAMETERS, why_not: str = ""
) -> list[str]:
    """Return the parameters of `function` that are `known`. ValueError for another one without a default, with
    `why_not` if it is one of PARAMETERS."""
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
    """Convert a number (booleans too) or a Reward; None for anything else, NaN, and numbers beyond MOST_SCORE."""
    if isinstance(value, Reward):
        return value if value.score is None or is_score(value.score) else None
    try:
        score = float(value) if isinstance(value, bool | int | float) or hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return Reward(score) if is_score(score) else None


def as_answer(value: Any) -> Answer:
    """Convert a workflow's return value. ValueError, with a description of the value, if it is invalid."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        if (reward := as_reward(value)) is None:
            raise ValueError(described(value))
        return reward
    rewards = {role: as_reward(reward) for role, reward in value.items()}
    if wrong := [role for role, reward in rewards.items() if reward is None or not isinstance(role, str)]:
        raise ValueError(f"{described(value[wrong[0]])} for the role {wrong[0]!r}")
    return {role: reward for role, reward in rewards.items() if reward is not None}


def checked_answer(value: Any, own: CustomFunction) -> Answer:
    """Convert the return value of `own`. FunctionError if it is invalid."""
    try:
        return as_answer(value)
    except ValueError as error:
        raise own.refused(str(error)) from None

"""Reward functions of TRL's signature, called as TRL calls them. They run in the reward workers, to which they travel.

Owns what TRL hands over beside the columns: `trainer_state`, `log_metric` and `log_extra`; and what it takes back: None
and nan for "does not apply".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rollover.types import Task

STATE = "trainer_state"


class TrlReward:
    """A function `f(prompts, completions, completion_ids, **columns)`, as `def` or `async def`.

    What it logs by `log_metric(name, value)`, and numbers of `log_extra(column, values)`, become `reward/extra/...`;
    other values of log_extra are not kept. `trainer_state` has the step that its rollouts are generated for
    (`global_step`, in TRL's updates, and `max_steps`); both are 0 in an evaluation, and in the call at start-up.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.func = function
        parameters = inspect.signature(function).parameters.values()
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> Any:
        logged: dict[str, list[Any]] = {}

        def log_metric(name: str, value: float) -> None:
            logged[name] = [float(value)] * len(completions)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            logged[column] = list(values)

        states = columns.pop(STATE, None) or [None] * len(completions)
        step: dict[str, Any] = states[0] or {"global_step": 0, "max_steps": 0}
        given = {
            **columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids,
            STATE: SimpleNamespace(**step), "log_metric": log_metric, "log_extra": log_extra,
        }  # fmt: skip
        value = self.func(**(given if self._takes_any else {k: v for k, v in given.items() if k in self._names}))
        if inspect.isawaitable(value):
            return _awaited(value, logged)
        return _with_logged(value, logged)

    @property
    def asks_for_the_state(self) -> bool:
        return STATE in self._names


async def _awaited(value: Any, logged: dict[str, list[Any]]) -> Any:
    return _with_logged(await value, logged)


def _with_logged(values: Any, logged: dict[str, list[Any]]) -> Any:
    """Scores with what was logged, of each completion. What is no list of scores passes: the caller names it."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        return values
    scores = [None if _is_nan(value) else value for value in values]
    if not logged:
        return scores
    extras = {name: column for name, column in logged.items() if len(column) == len(scores)}
    return [
        None if score is None else {"score": score, **{name: column[i] for name, column in extras.items()}}
        for i, score in enumerate(scores)
    ]


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


class WithState:
    """For tasks.before_produce: the task, with the trainer's step in a column of it."""

    def __init__(self, updates: int, max_steps: int) -> None:
        self._updates, self._max_steps = updates, max_steps

    def __call__(self, task: Task, version: int) -> Task:
        state = {"global_step": version * self._updates, "max_steps": self._max_steps}
        return replace(task, columns={**task.columns, STATE: state})

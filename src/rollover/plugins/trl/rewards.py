"""TRL's rule that a reward function returns None or nan for "does not apply". Reward workers load this module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any


class NanIsNone:
    """A reward function of TRL's signature (`def` or `async def`) that returns None where `function` returns nan."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.func = function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.func)

    def __call__(self, **arguments: Any) -> Any:
        values = self.func(**arguments)
        return _awaited(values) if inspect.isawaitable(values) else _without_nan(values)


async def _awaited(values: Any) -> Any:
    return _without_nan(await values)


def _without_nan(values: Any) -> Any:
    """Replace nan by None in a list of scores; the caller reports other values."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        return values
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]

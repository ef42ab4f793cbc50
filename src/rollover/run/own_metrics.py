"""Metrics of the user's own (track.metrics), beside ours in metrics.jsonl.

Owns what such a function must return. Called before the step is trained, so that a wrong one costs no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real

from rollover.functions import described, own_function
from rollover.types import Group, copied

_RETURNS = "a number for each name, as {'name': 1.0}"


OwnMetrics = Callable[[list[Group]], dict[str, float]]


def own_metrics(spec: str) -> OwnMetrics:
    """The user's function, which makes keys of a row (`own/NAME`) of a step's groups; none where `spec` is empty.

    ValueError where there is no such function; FunctionError where it raises or returns anything else than numbers.
    """
    if not spec:
        return lambda groups: {}
    own = own_function("track.metrics", spec, _RETURNS)

    def metrics(groups: list[Group]) -> dict[str, float]:
        found = own([copied(group) for group in groups])
        if not isinstance(found, Mapping):
            raise own.refused(described(found))
        for name, value in found.items():
            is_name = isinstance(name, str) and name and name.isprintable()
            if not is_name or isinstance(value, bool) or not isinstance(value, Real):
                raise own.refused(f"{described(value)} for {name!r}")
        try:
            return {f"own/{name}": float(value) for name, value in found.items()}
        except OverflowError as error:
            raise own.failed(error) from error

    return metrics

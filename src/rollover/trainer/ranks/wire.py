"""Dataclasses as JSON with arrays, which goes between the loop's process and a rank's, by their annotated types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

_LEAVES = (np.ndarray, str, int, float)  # most values, and quickly told


def to_plain(value: Any) -> Any:
    """A dataclass as the list of its fields, also within others. A mapping without names as keys: a list of pairs."""
    if isinstance(value, _LEAVES):
        return value
    if dataclasses.is_dataclass(value):
        return [to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        pairs = [(key, to_plain(part)) for key, part in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else pairs
    return [to_plain(part) for part in value] if isinstance(value, list | tuple) else value


def from_plain(kind: Any, value: Any) -> Any:
    """The value of type `kind` that `to_plain` was given; as it is for a union, or a type without dataclasses."""
    if isinstance(value, _LEAVES):
        return value
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        return make(*map(from_plain, _field_types(kind), value))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (dict, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        return {key: from_plain(arguments[1], part) for key, part in pairs}
    return origin(from_plain(arguments[0], part) for part in value) if origin in (list, tuple) else value


def call(target: object, method: str, values: Mapping[str, Any]) -> Any:
    """Call a method of `target` with arguments by name as `to_plain` gives them; its result in the same form."""
    function = getattr(target, method)
    types = get_type_hints(function)
    return to_plain(function(**{name: from_plain(types[name], value) for name, value in values.items()}))


@cache
def _field_types(kind: type[Any]) -> list[Any]:
    types = get_type_hints(kind)
    return [types[field.name] for field in dataclasses.fields(kind)]

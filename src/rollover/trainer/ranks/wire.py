"""Encodes arguments and results of ranks as JSON with arrays, and decodes them by their annotated types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

_LEAVES = (np.ndarray, str, int, float)  # most values: a fast check


def to_plain(value: Any) -> Any:
    """Encode dataclasses, nested ones too, as lists of their fields, and mappings with other keys than str as pairs."""
    if isinstance(value, _LEAVES):
        return value
    if dataclasses.is_dataclass(value):
        return [to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        pairs = [(key, to_plain(part)) for key, part in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else pairs
    return [to_plain(part) for part in value] if isinstance(value, list | tuple) else value


def from_plain(kind: Any, value: Any) -> Any:
    """Decode what `to_plain` made of a value of type `kind`. Unions and types without dataclasses stay as they are."""
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
    """Call a method of `target` with encoded arguments, by name. Returns its encoded result."""
    function = getattr(target, method)
    types = get_type_hints(function)
    return to_plain(function(**{name: from_plain(types[name], value) for name, value in values.items()}))


@cache
def _field_types(kind: type[Any]) -> list[Any]:
    types = get_type_hints(kind)
    return [types[field.name] for field in dataclasses.fields(kind)]

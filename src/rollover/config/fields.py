"""Walks the tree of configuration tables: dotted names, annotations, defaults, what a field expects.

Owns the mapping between `rollout.group_size` and the pydantic field behind it. Never reads a file, never validates.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rollover.config import Config, Table

_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a table"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def table_of(annotation: Any) -> type[Table] | None:
    """The Table behind `annotation`, if it is one (not a list of them)."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Table) else None


def row_of(annotation: Any) -> type[Table] | None:
    """The Table of one element, if `annotation` is a list of tables ([[tasks.sources]])."""
    return table_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


def leaves(table: type[Table] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field that holds a value, by its dotted name; a list of tables counts as one value."""
    for name, info in table.model_fields.items():
        inner = table_of(info.annotation)
        if inner is None:
            yield prefix + name, info
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def tables(table: type[Table] = Config, prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """Every table by its dotted name, without the rows of a list of tables."""
    for name, info in table.model_fields.items():
        if inner := table_of(info.annotation):
            yield prefix + name, inner
            yield from tables(inner, f"{prefix}{name}.")


def field_at(key: str) -> FieldInfo | None:
    """The field behind a dotted key (`tasks.sources.0.kind` too); None if there is none, or it is a table."""
    table: type[Table] | None = Config
    info: FieldInfo | None = None
    parts = key.split(".")
    while parts:
        name = parts.pop(0)
        info = table.model_fields.get(name) if table else None
        if info is None:
            return None
        table = table_of(info.annotation)
        if parts and (row := row_of(info.annotation)) and parts[0].isdigit():
            parts.pop(0)
            if not parts:
                return None
            table = row
    return None if table else info


def names(indices: tuple[int, ...] = ()) -> list[str]:
    """All dotted keys; the fields of a list of tables once for each of `indices`."""
    out = []
    for name, info in leaves():
        out.append(name)
        row = row_of(info.annotation)
        if row:
            out += [f"{name}.{i}.{field}" for i in indices for field, _ in leaves(row)]
    return out


def value_of(config: Config, key: str) -> Any:
    """The value behind a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else getattr(value, part)
    return value


def given(table: Table, prefix: str = "") -> Iterator[str]:
    """Dotted keys of the values that were set where `table` was made in Python; of a list of tables also those of its
    rows."""
    for name in table.model_fields_set:
        key, value = f"{prefix}{name}", getattr(table, name)
        if isinstance(value, Table):
            yield from given(value, f"{key}.")
            continue
        yield key
        for i, row in enumerate(value) if isinstance(value, list) else ():
            if isinstance(row, Table):
                yield from given(row, f"{key}.{i}.")


def default_of(key: str) -> Any:
    """The default behind a dotted key; pydantic's Undefined if it must be given."""
    info = field_at(key)
    assert info is not None, key
    return info.get_default(call_default_factory=True)


def choices_of(annotation: Any) -> list[str]:
    """The strings a Literal (or a union of Literals) allows; empty for anything else."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in choices_of(part)]
    return []


def did_you_mean(name: str, candidates: Sequence[str]) -> str:
    """The end of a message: the candidate that `name` resembles, if one does."""
    near = difflib.get_close_matches(name, candidates, n=1)
    return f". Did you mean {json.dumps(near[0])}?" if near else ""


def takes_text(annotation: Any) -> bool:
    """Whether a value of this annotation is always a string."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return all(takes_text(part) for part in get_args(annotation))
    return annotation is str or get_origin(annotation) is Literal


def expected(info: FieldInfo) -> str:
    """What a field takes, in words: `an integer, at least 1`."""
    choices = choices_of(info.annotation)
    if choices:
        words = "one of " + ", ".join(json.dumps(c) for c in choices)
        # The one kind of union that there is: a number, or a word that stands for one.
        return words if takes_text(info.annotation) else f"an integer, at least 0, or {words.removeprefix('one of ')}"
    if get_origin(info.annotation) is list:
        inner = get_args(info.annotation)[0]
        return f"a list of {_PLURALS.get(inner, 'tables')}"
    noun = _NOUNS[get_origin(info.annotation) or info.annotation]  # type: ignore[index]
    bounds = [
        f"{word} {limit:g}"
        for constraint in info.metadata
        for name, word in _BOUNDS.items()
        if (limit := getattr(constraint, name, None)) is not None
    ]
    return ", ".join([noun, *bounds])

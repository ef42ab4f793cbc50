"""Reads the configuration: preset < TOML files, recipes and mappings, left to right < dotted overrides.

Owns the layers, which one set what, and every message about a wrong configuration. Never writes a file.
Tables are merged deeply, arrays are replaced; one element's field is reached as `tasks.sources.0.params.max_digits`.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollover.config.presets import PRESETS
from rollover.config.recipes import located
from rollover.config.renames import FORMER_NAMES, RENAMED, upgrade
from rollover.config.schema import Config, choices_of, default_of, expected, field_at, leaves, takes_text
from rollover.config.settle import Layers, Values, derive, notices_of_ratio, refuse, settle, shown
from rollover.config.suggest import unknown_key, unknown_table
from rollover.config.table import UNSETTLED, ConfigError, Layer, Table, put, row_of, table_of, value_of
from rollover.config.toml_file import read_toml
from rollover.config.trust import OfRun
from rollover.config.workflow import PER_STEP, PER_STEP_IS
from rollover.suggest import did_you_mean

COMMAND_LINE = "command line"
PYTHON = "Python"  # what a program gives in place of a file
DECORATED = "@distilled"  # what a workflow says by itself
_MOST = 2**63 - 1
_ARRAYS = tuple(name for name, info in leaves() if row_of(info.annotation))  # of tables


@dataclass(frozen=True)
class Resolved:
    """A checked configuration with final values.

    notices: what was reset because a later layer switched it off, and what has no effect, one line each.
    origin: dotted key -> label of the layer that set it (a file's path, "preset grpo", "command line", or "derived from
    ..."); a key that is absent has its default.
    """

    config: Config
    notices: list[str]
    origin: dict[str, str]


def load_config(
    files: Sequence[Path | str | Mapping[str, Any] | OfRun],
    overrides: Sequence[tuple[str, str]] = (),
    *,
    require_sources: bool = True,
    under: Callable[[Config], Mapping[str, Any]] | None = None,
) -> Resolved:
    """Return the configuration of `files`, changed by `overrides` (dotted key, text of a TOML value or a plain string).

    In place of a file there may be a mapping (tables as in a file, or values by dotted keys), or settings of a run's
    directory, which are refused where they name untrusted code, before any of it is imported.
    `require_sources = False` is for programs that need a model and no tasks. `under`: what the workflow of a
    configuration, which is not settled yet, says by itself, as dotted keys that lie below all files.
    Raises ConfigError for a missing or malformed file, an unknown key, a wrong type, a value out of range, an option
    without effect (see `settle`) and a refused combination.
    """
    stack: list[tuple[str, Values]] = []
    renames: list[str] = []
    for source in files:
        if isinstance(source, OfRun):
            stack.append((source.label, _dotted(source.settings, source.label, renames)))
        elif isinstance(source, Mapping):
            label = source.label if isinstance(source, Layer) else PYTHON
            stack.append((label, _dotted(source, label, renames)))
        else:
            label, path = located(source)
            stack.append((label, dict(_flattened(read_toml(path), label, renames))))
    for key, text in overrides:
        stack.append((COMMAND_LINE, _override(key, text, renames)))
    of_runs = [source for source in files if isinstance(source, OfRun)]
    given = [values for label, values in stack if label not in {of.label for of in of_runs}]
    stack.insert(0, _preset(stack))
    layers = _layers(stack)
    config = _validate(layers)
    for of in of_runs:
        of.refuse_unless_given(config.model_dump(), given)
    if under is not None and (values := under(config)):
        stack.insert(1, (DECORATED, _dotted(values, DECORATED, renames)))
        layers = _layers(stack)
        config = _validate(layers)
    config, notices, problems = settle(config, layers)
    config, origin = derive(config, layers)
    refuse(config, layers, problems, require_sources)
    credits = [values["workflow.credit"] for _, values in stack if "workflow.credit" in values]
    if credits[-1:] == [PER_STEP]:
        notices.append(PER_STEP_IS)
    return Resolved(config, [*renames, *notices, *notices_of_ratio(config, layers)], origin)


# Layers


def _layers(stack: Sequence[tuple[str, Values]]) -> Layers:
    """Return the labelled values, each above those before it."""
    layers = Layers()
    for label, values in stack:
        if label != COMMAND_LINE or COMMAND_LINE not in layers.labels:
            layers.labels.append(label)  # all overrides are one layer
        for key, value in values.items():
            if _is_element(key):
                _put_element(layers, key, value)
            else:
                layers.put(key, value, len(layers.labels) - 1)
    return layers


def _flattened(data: Values, label: str, renames: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a layer, upgraded in place. Adds a notice for each old key to `renames`."""
    try:
        messages = upgrade(data)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    renames += [f"{label}: {message}. {FORMER_NAMES}" for message in messages]
    return _flatten(data, Config, "", label)


def _flatten(data: Values, table: type[Table], prefix: str, label: str) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = prefix + name
        info = table.model_fields.get(name)
        if info is None:
            is_table = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
            raise ConfigError(f"{label}: {unknown_table(key) if is_table else unknown_key(key)}")
        inner, row = table_of(info.annotation), row_of(info.annotation)
        if inner is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{label}: {key} = {shown(value)}: {key} is a table, write [{key}]")
            yield from _flatten(value, inner, f"{key}.", label)
            continue
        if row is not None:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ConfigError(f"{label}: {key} = {shown(value)}: expected tables, write [[{key}]]")
            for i, item in enumerate(value):
                for unknown in [name for name in item if name not in row.model_fields]:
                    raise ConfigError(f"{label}: {unknown_key(f'{key}.{i}.{unknown}')}")
        _check_plain(key, value, label)
        yield key, value


def _check_plain(key: str, value: Any, label: str) -> None:
    """TOML also has dates, NaN and integers of any size, which no option takes and JSON or torch cannot hold."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_plain(f"{key}.{name}", item, label)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_plain(f"{key}.{i}", item, label)
    elif not isinstance(value, str | int | float) or value != value:
        raise ConfigError(f"{label}: {key} = {value}: dates and nan are not allowed here. Give a number or a string")
    elif isinstance(value, int) and not -_MOST - 1 <= value <= _MOST:
        raise ConfigError(f"{label}: {key} = {shown(value)}: integers have 64 bits. Give one up to {_MOST}")


def _override(key: str, text: str, renames: list[str]) -> Values:
    """One override as dotted values. Text for a string option needs no quotes; anything else is a TOML value."""
    info = field_at(RENAMED.get(key, key))
    value = _parse(text)
    if info is None and not isinstance(value, dict) and not _is_element(key):
        raise ConfigError(f"{COMMAND_LINE}: {unknown_key(key)}")
    if info is not None and takes_text(info.annotation) and not isinstance(value, str):
        value = text
    return _dotted({key: value}, COMMAND_LINE, renames)


def _dotted(values: Mapping[str, Any], label: str, renames: list[str]) -> Values:
    """Values by their whole dotted names, of tables or of dotted keys."""
    out: Values = {}
    for key, value in values.items():
        if _is_element(key):
            _check_plain(key, value, label)
            out[key] = value
            continue
        nested: Values = {}
        put(nested, key, copy.deepcopy(value) if isinstance(value, dict) else value)
        for name, flat in _flattened(nested, label, renames):
            both = isinstance(flat, dict) and isinstance(out.get(name), dict)  # two keys of one free table
            out[name] = {**out[name], **flat} if both else flat
    return out


def _parse(text: str) -> Any:
    try:
        data = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return data["value"] if len(data) == 1 else text


def _is_element(key: str) -> bool:
    """Whether `key` is a place inside an array of tables."""
    return any(key.startswith(f"{array}.") for array in _ARRAYS)


def _put_element(layers: Layers, key: str, value: Any) -> None:
    """`tasks.sources.0.params.max_digits`: change one value inside an array of tables."""
    array = next(name for name in _ARRAYS if key.startswith(f"{name}."))
    info = field_at(array)
    row = row_of(info.annotation) if info else None
    assert row is not None
    position, _, path = key.removeprefix(f"{array}.").partition(".")
    rows = layers.values.get(array, [])
    if not position.isdigit() or int(position) >= len(rows) or not path:
        have = f"0 to {len(rows) - 1}" if rows else "none, no file sets any"
        raise ConfigError(
            f"{layers.labels[-1]}: {key}: write {array}.INDEX.FIELD, with the index of one of the {array} ({have})"
        )
    name, *inner = path.split(".")
    if name not in row.model_fields or (inner and row.model_fields[name].annotation != dict[str, Any]):
        raise ConfigError(f"{layers.labels[-1]}: {unknown_key(key)}")
    rows = copy.deepcopy(rows)
    place = rows[int(position)]
    for part in [name, *inner][:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{layers.labels[-1]}: {key}: {part} is not a table")
    place[[name, *inner][-1]] = value
    layers.values[array] = rows
    layers.index[f"{array}.{position}.{name}"] = len(layers.labels) - 1


def _preset(stack: list[tuple[str, Values]]) -> tuple[str, Values]:
    """Return the lowest layer: the preset that the topmost layer names."""
    for label, values in reversed(stack):
        if "algorithm.preset" in values:
            name = values["algorithm.preset"]
            if name not in PRESETS:
                raise ConfigError(_wrong_value("algorithm.preset", name, label))
            break
    else:
        name = default_of("algorithm.preset")
    return f"preset {name}", {f"algorithm.{key}": value for key, value in PRESETS[name].items()}


def _wrong_value(key: str, value: Any, label: str) -> str:
    info = field_at(key)
    assert info is not None, key
    message = f"{label}: {key} = {shown(value)}: expected {expected(info)}"
    return message + did_you_mean(str(value), choices_of(info.annotation))


def _validate(layers: Layers) -> Config:
    nested: Values = {}
    for key, value in layers.values.items():
        put(nested, key, value)
    try:
        return Config.model_validate(nested, strict=True, context=UNSETTLED)
    except ValidationError as error:
        messages, infinite = {}, set[str]()
        for problem in error.errors(include_url=False):
            parts = [str(part) for part in problem["loc"]]
            while field_at(".".join(parts)) is None:
                parts.pop()
            key = ".".join(parts)
            if problem["type"] == "missing":
                info = field_at(key)
                assert info is not None
                messages[key] = f"{layers.label(key)}: {key} is missing: expected {expected(info)}"
            else:
                infinite |= {key} if problem["type"] == "finite_number" else set()
                messages[key] = _wrong_value(key, value_of(nested, key), layers.label(key))
                messages[key] += ". Numbers must be finite" if key in infinite else ""
        raise ConfigError("\n".join(messages.values())) from None

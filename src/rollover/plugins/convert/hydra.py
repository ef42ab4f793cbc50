"""Values as Hydra and OmegaConf read them: overrides and interpolations."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from rollover.plugins.convert.mapping import Unknown

_MOST_NESTED = 50
_MOST_ROUNDS = 20  # of nested interpolations
_MOST_CHARS = 1 << 16
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


class _NotAList(Exception):
    """Brackets that are not closed or have text behind them: the whole is a text."""


def parse_value(text: str) -> Any:
    """Parse the value of an override: number, boolean, null, list, table or text.

    ValueError for values that are nested too deeply.
    """
    text = text.strip()
    try:
        return _read(text, 0, "", 0)[0]
    except _NotAList:
        return _read_scalar(text)


def _read(text: str, start: int, ends: str, depth: int) -> tuple[Any, int]:
    """Return the value from `start` up to one of the characters `ends`, and its end."""
    if depth > _MOST_NESTED:
        raise ValueError("a value is nested too deeply")
    start = _skip_spaces(text, start)
    if text[start : start + 1] in ("[", "{"):
        value, end = _read_brackets(text, start, depth)
        end = _skip_spaces(text, end)
        if end < len(text) and text[end] not in ends:
            raise _NotAList
        return value, end
    end, quote = start, ""
    while end < len(text) and (quote or text[end] not in ends):
        quote = "" if text[end] == quote else quote or (text[end] if text[end] in "\"'" else "")
        end += 1
    return _read_scalar(text[start:end].strip()), end


def _skip_spaces(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _read_brackets(text: str, start: int, depth: int) -> tuple[Any, int]:
    """Return the list or table that begins at `start`, and its end."""
    close = "]" if text[start] == "[" else "}"
    items: list[Any] = []
    table: dict[str, Any] = {}
    at = _skip_spaces(text, start + 1)
    while text[at : at + 1] != close:
        if at >= len(text):
            raise _NotAList
        if close == "]":
            item, at = _read(text, at, ",]", depth + 1)
            items.append(item)
        else:
            key, at = _read(text, at, ":,}", depth + 1)
            value = None
            if text[at : at + 1] == ":":
                value, at = _read(text, at + 1, ",}", depth + 1)
            table[str(key)] = value
        at = _skip_spaces(text, at + (text[at : at + 1] == ","))
    return (items if close == "]" else table), at + 1


def _read_scalar(text: str) -> Any:
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    if low in ("null", "none", ""):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text[1:-1] if len(text) > 1 and text[0] in "\"'" and text[-1] == text[0] else text


def interpolate(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Replace `${name}` by the value of that option; Unknown if the file does not set it."""
    return {name: _interpolate(value, options, environment, 0) for name, value in options.items()}


def _interpolate(value: Any, options: Mapping[str, Any], environment: Mapping[str, str], depth: int) -> Any:
    if isinstance(value, list):
        items = [_interpolate(item, options, environment, depth) for item in value]
        return next((item for item in items if isinstance(item, Unknown)), items)
    if isinstance(value, dict):
        table = {name: _interpolate(item, options, environment, depth) for name, item in value.items()}
        return next((item for item in table.values() if isinstance(item, Unknown)), table)
    if not isinstance(value, str) or "${" not in value:
        return value
    text = value
    for _ in range(_MOST_ROUNDS):
        if (match := _INNERMOST.search(text)) is None:
            return text
        found = _resolve(match[1], options, environment)
        if isinstance(found, Unknown | list | dict):
            whole = match[0] == text and not isinstance(found, Unknown) and depth < _MOST_ROUNDS
            return _interpolate(found, options, environment, depth + 1) if whole else _unknown(value, found)
        if match[0] == text and "${" not in str(found):
            return found
        text = text[: match.start()] + str(found) + text[match.end() :]
        if len(text) > _MOST_CHARS:
            break
    return Unknown(f"{value[:80]}: its names lead to each other")


def _unknown(value: str, found: Any) -> Unknown:
    return Unknown(f"{value[:80]}: {found.reason if isinstance(found, Unknown) else 'it names a list or a table'}")


def _resolve(name: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    resolver, colon, rest = name.partition(":")
    if not colon:
        return options.get(name.strip(), Unknown(f"{name} is not in the file"))
    first, comma, default = rest.partition(",")
    if resolver == "now":
        return "now"
    if resolver == "oc.env" and (first.strip() in environment or comma):
        return environment.get(first.strip(), parse_value(default))
    if resolver == "oc.select" and (first.strip() in options or comma):
        return options.get(first.strip(), parse_value(default))
    return Unknown(f"${{{name}}} is not evaluated")

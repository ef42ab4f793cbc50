"""Parsing of query values, which are texts."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

Query = Mapping[str, str]
MOST_KEYS = 500


class NotFound(KeyError):
    """The requested item does not exist (404). Its argument is the message."""


def names_in(text: str) -> list[str]:
    """Split names at commas. Within a name a comma is %2C and % is %25, as page/words.js writes them."""
    return [unquote(name) for name in text.split(",") if name]


def keys_in(query: Query) -> list[str]:
    """Return the distinct keys; ValueError for more than MOST_KEYS, which bounds the answer."""
    keys = [*dict.fromkeys(names_in(query.get("keys", "")))]
    if len(keys) > MOST_KEYS:
        raise ValueError(f"keys: {len(keys)} keys, at most {MOST_KEYS} are allowed")
    return keys


def integer(query: Query, name: str) -> int | None:
    """Return an integer >= 0, None if not given; ValueError for anything else."""
    text = query.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{name}: {text!r} is not a number from 0")
    return int(text)


def count(query: Query, name: str, default: int, most: int | None = None) -> int:
    """Return an integer from 0 to `most`; ValueError for anything else."""
    found = integer(query, name)
    if found is not None and most is not None and found > most:
        raise ValueError(f"{name}: {found} is more than {most}")
    return default if found is None else found


def real(query: Query, name: str) -> float | None:
    """Return a number, None if not given; ValueError for anything else."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise ValueError(f"{name}: {text!r} is not a number")
    return value


def seconds(query: Query, name: str, default: float) -> float:
    """Return a number of seconds; ValueError for anything else."""
    value = real(query, name)
    if value is not None and not abs(value) < 1e12:
        raise ValueError(f"{name}: {query[name]!r} is not a number of seconds")
    return default if value is None else value

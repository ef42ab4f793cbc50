"""The values of a question as its address has them: text, until somebody has read it here."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

Query = Mapping[str, str]
MOST_KEYS = 500


class NotFound(KeyError):
    """What a question asks for is not there: a matter of the question, and of no file of the run. Its one argument is
    the message."""


def names_in(text: str) -> list[str]:
    """Names, separated by commas. In a name a comma is %2C, and % is %25, as page/words.js writes them."""
    return [unquote(name) for name in text.split(",") if name]


def keys_in(query: Query) -> list[str]:
    """Each once. ValueError where there are more than any page shows: what is answered has its bound."""
    keys = [*dict.fromkeys(names_in(query.get("keys", "")))]
    if len(keys) > MOST_KEYS:
        raise ValueError(f"keys: {len(keys)} are asked for, and {MOST_KEYS} are the most")
    return keys


def integer(query: Query, name: str) -> int | None:
    """None where it is not given. ValueError names it where it is none, or below 0."""
    text = query.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{name}: {text!r} is no number from 0")
    return int(text)


def count(query: Query, name: str, default: int, most: int | None = None) -> int:
    """ValueError names it where it is no integer from 0, or above `most`."""
    found = integer(query, name)
    if found is not None and most is not None and found > most:
        raise ValueError(f"{name}: {found} is more than {most}")
    return default if found is None else found


def real(query: Query, name: str) -> float | None:
    """None where it is not given. ValueError names it where it is no number."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise ValueError(f"{name}: {text!r} is no number")
    return value


def seconds(query: Query, name: str, default: float) -> float:
    """ValueError names it where it is no time."""
    value = real(query, name)
    if value is not None and not abs(value) < 1e12:
        raise ValueError(f"{name}: {query[name]!r} is no number of seconds")
    return default if value is None else value

"""Plain values as JSON, for results that cross from a program to its tests. Nothing is unpickled.

Built-in types cross by content. A value of a subclass crosses as its base type, so that a list whose `==` is always
true is compared as a list. Other objects (of the program's classes, functions) get a number by `handle`, by which they
can be used in their own process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MAX_ITEMS = 1_000_000
_LONG = 10_000  # bits, above which an integer is written in hexadecimal: Python refuses long decimal ones
_LONG_HEX = _LONG // 4  # digits of the parts of a Fraction, and of a Decimal; and the largest exponent of that


class NotPlain(ValueError):
    """A value that has no plain form."""


def to_json(value: Any, handle: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """Return the form of a value. NotPlain if it has none (and there is no `handle`) or is nested too deeply."""
    if value is None or value is True or value is False:
        return value
    if depth > 200:
        raise NotPlain("a value that is nested more than 200 times")
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value, lambda item: to_json(item, handle, depth + 1))
    found = _by_name(value)
    if found is not None:
        return found
    if type(value).__name__ in _ITERATORS and hasattr(type(value), "__next__"):
        return {"i": [to_json(item, handle, depth + 1) for item in _bounded(value)]}
    if type(value).__name__ in ("dict_keys", "dict_values", "dict_items"):
        return {"l": [to_json(item, handle, depth + 1) for item in _bounded(value)]}
    if handle is None:
        raise NotPlain(f"an object of type {type(value).__name__}")
    return {"o": handle(value)}


_ITERATORS = (
    "generator", "map", "filter", "zip", "enumerate", "reversed", "list_iterator", "tuple_iterator", "range_iterator",
    "list_reverseiterator", "dict_keyiterator", "dict_valueiterator", "dict_itemiterator", "set_iterator",
    "str_iterator", "str_ascii_iterator", "chain", "permutations", "combinations", "product", "islice", "accumulate",
    "takewhile", "dropwhile", "zip_longest", "combinations_with_replacement", "starmap", "callable_iterator",
)  # fmt: skip


def _integer(value: int, _: Any) -> Any:
    number = int.__index__(value)
    return number if number.bit_length() <= _LONG else {"h": hex(number)}


_FORMS: tuple[tuple[type, Callable[[Any, Callable[[Any], Any]], Any]], ...] = (
    (int, _integer),
    (float, lambda value, _: float.__float__(value)),
    (str, lambda value, _: str.__str__(value)),
    (list, lambda value, inner: {"l": [inner(item) for item in list.__iter__(value)]}),
    (tuple, lambda value, inner: {"t": [inner(item) for item in tuple.__iter__(value)]}),
    (dict, lambda value, inner: {"d": [[inner(key), inner(item)] for key, item in dict.items(value)]}),
    (set, lambda value, inner: {"s": [inner(item) for item in set.__iter__(value)]}),
    (frozenset, lambda value, inner: {"f": [inner(item) for item in frozenset.__iter__(value)]}),
    (bytes, lambda value, _: {"b": bytes.decode(value, "latin-1")}),
    (bytearray, lambda value, _: {"b": bytes(value).decode("latin-1")}),
    (complex, lambda value, _: {"c": [value.real, value.imag]}),
    (range, lambda value, _: {"r": [value.start, value.stop, value.step]}),
)


def _by_name(value: Any) -> Any:
    """Return the form of types whose modules may not be loaded."""
    kind = type(value)
    if kind.__module__ == "collections" and kind.__name__ == "deque":
        return {"q": [to_json(item) for item in value]}
    # By identity: a class of the program may have the same name.
    if kind is getattr(sys.modules.get("fractions"), "Fraction", None):
        return {"F": [hex(value.numerator), hex(value.denominator)]}
    if kind is getattr(sys.modules.get("decimal"), "Decimal", None):
        return {"D": str(value)}
    return None


def _bounded(values: Any) -> Any:
    for count, value in enumerate(values):
        if count == _MAX_ITEMS:
            raise NotPlain(f"an iterator of more than {_MAX_ITEMS} items")
        yield value


def from_json(form: Any, made: Callable[[int], Any] | None = None) -> Any:
    """Return the value of a form; `made` resolves handles. NotPlain for an invalid form."""
    if not isinstance(form, dict):
        if form is None or isinstance(form, bool | int | float | str):
            return form
        raise NotPlain("a form that is none")
    if len(form) != 1:
        raise NotPlain("a form that is none")
    (mark, content), *_ = form.items()
    if mark == "o" and made is not None and isinstance(content, int):
        return made(content)
    try:
        return _MADE[mark](content, lambda item: from_json(item, made))
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError):
        raise NotPlain("a form that is none") from None


def number(mark: str, content: Any) -> Any:
    """Return the number of a form, in linear time; False if it is none."""
    try:
        if mark == "h":
            return int(content, 16)
        if mark == "c":
            return complex(*content)
        if mark == "F":
            above, below = content
            if max(len(above), len(below)) > _LONG_HEX:
                return False
            return __import__("fractions").Fraction(int(above, 16), int(below, 16))
        if mark == "D" and isinstance(content, str) and len(content) <= _LONG_HEX:
            found = __import__("decimal").Decimal(content)
            # Comparison with a fraction, or conversion to an integer, writes out a large exponent.
            return found if not found.is_finite() or abs(found.adjusted()) <= _LONG_HEX else False
    except (TypeError, ValueError, ArithmeticError):
        pass
    return False


def _number(mark: str) -> Callable[[Any, Any], Any]:
    def make(content: Any, _: Any) -> Any:
        if (found := number(mark, content)) is False:
            raise NotPlain("a form that is none")
        return found

    return make


_MADE: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "l": lambda content, inner: [inner(item) for item in content],
    "t": lambda content, inner: tuple(inner(item) for item in content),
    "d": lambda content, inner: {inner(key): inner(item) for key, item in content},
    "s": lambda content, inner: {inner(item) for item in content},
    "f": lambda content, inner: frozenset(inner(item) for item in content),
    "i": lambda content, inner: iter([inner(item) for item in content]),
    "b": lambda content, _: content.encode("latin-1"),
    "r": lambda content, _: range(*content),
    "q": lambda content, inner: __import__("collections").deque(inner(item) for item in content),
    **{mark: _number(mark) for mark in "hcFD"},
}

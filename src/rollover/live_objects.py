"""Live objects: functions and rows of tasks that a program passes as objects, and their names in a configuration.

A configuration is text, recorded in config.resolved.json: an object is `<python>:reward-3f2a9c1d`, a function of a file
`mine.py:reward`. The hash is of the function's code, so the same function has the same name in the next process, and
another one is a change of the configuration. Owns the table of names in this process, with their numbers of holders.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

LIVE = "<python>"  # in place of a module or a file


class _Held(NamedTuple):
    value: Any
    holders: int


_held: dict[str, _Held] = {}


def is_live(spec: object) -> bool:
    """Return whether a value of the configuration names a live object."""
    return isinstance(spec, str) and spec.startswith(f"{LIVE}:")


def hold(value: Any, name: str) -> str:
    """Keep `value` until `release`, and return its name: `<python>:name`, with a number if that is taken."""
    for number in itertools.count(1):
        spec = f"{LIVE}:{name}" if number == 1 else f"{LIVE}:{name}.{number}"
        held = _held.get(spec, _Held(value, 0))
        if held.value is value:
            _held[spec] = _Held(value, held.holders + 1)
            return spec
    raise AssertionError("numbers do not end")


def release(spec: str) -> None:
    """End one `hold`; the last one frees the object."""
    held = _held.pop(spec)
    if held.holders > 1:
        _held[spec] = held._replace(holders=held.holders - 1)


def live_object(spec: str) -> Any:
    """Return the object that `spec` names. ValueError where this process has no such object."""
    if spec not in _held:
        raise ValueError(
            f"{spec} names an object of a Python program, which went with its process. Hand it over again in Python:"
            " rollover.train(resume=RUN_DIR, ...); or name a function of a file here, as path.py:function"
        )
    return _held[spec].value


def name_of(function: Any) -> str:
    """Return a function's name and a hash of its code: `reward-3f2a9c1d`, or `lambda-...`. Closed-over values are not
    hashed."""
    plain = getattr(function, "func", function)  # functools.partial
    name = getattr(plain, "__name__", type(plain).__name__).strip("<>")
    digest = hashlib.blake2b("\0".join(_identity(plain)).encode(), digest_size=4).hexdigest()
    return f"{name}-{digest}"


def is_same_but_for_code(before: object, now: object) -> bool:
    """Return whether `before` names a live object, and `now` a function of the same name with other code."""
    return is_live(before) and isinstance(now, str) and own_name(str(before)) == own_name(now)


def own_name(spec: str) -> str:
    """Return `reward` for `<python>:reward-3f2a9c1d`, `<python>:reward-3f2a9c1d.2` and `mine.py:reward`."""
    name = spec.rpartition(":")[2]
    return re.sub(r"-[0-9a-f]{8}(\.\d+)?$", "", name) if is_live(spec) else name


def _identity(function: Any) -> Iterator[str]:
    """Yield texts that identify a function by its code and defaults; a class or an object by its methods."""
    code = getattr(function, "__code__", None)
    if code is not None:
        yield from _texts(code)
        for value in getattr(function, "__defaults__", None) or ():
            yield repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        return
    owner = function if isinstance(function, type) else type(function)
    yield owner.__qualname__
    members: Mapping[str, Any] = vars(owner)
    for name in sorted(members):
        code = getattr(members[name], "__code__", None)
        if code is not None:
            yield name
            yield from _texts(code)


def _texts(code: CodeType) -> Iterator[str]:
    yield from (code.co_code.hex(), repr(code.co_names), repr(code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        else:  # a set's order is not the same in another process
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

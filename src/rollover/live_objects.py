"""Objects that a program handed over (functions, rows of tasks), and the names by which a configuration holds them.

A configuration is text, which config.resolved.json records: it holds `<python>:reward-3f2a9c1d` where a file's function
would be `mine.py:reward`. The hash is of the function's code, so the same function has the same name in the next
process, and another one is a change of the configuration. Owns which names are given to what in this process. An object
is kept as long as someone holds it, and never leaves the process from here.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

LIVE = "<python>"  # in the place of a module or a file


class _Held(NamedTuple):
    value: Any
    holders: int


_held: dict[str, _Held] = {}


def is_live(spec: object) -> bool:
    """Whether a value of the configuration names an object that was handed over."""
    return isinstance(spec, str) and spec.startswith(f"{LIVE}:")


def hold(value: Any, name: str) -> str:
    """Keep `value` until `release`, and return what names it: `<python>:name`, with a number if that is taken."""
    for number in itertools.count(1):
        spec = f"{LIVE}:{name}" if number == 1 else f"{LIVE}:{name}.{number}"
        held = _held.get(spec, _Held(value, 0))
        if held.value is value:
            _held[spec] = _Held(value, held.holders + 1)
            return spec
    raise AssertionError("numbers do not end")


def release(spec: str) -> None:
    """Ends one `hold`; the object is dropped with its last one."""
    held = _held.pop(spec)
    if held.holders > 1:
        _held[spec] = held._replace(holders=held.holders - 1)


def live_object(spec: str) -> Any:
    """What `spec` names. ValueError where this process has no such object."""
    if spec not in _held:
        raise ValueError(
            f"{spec} names an object of a Python program, which went with its process. Hand it over again in Python:"
            " rollover.train(resume=RUN_DIR, ...); or name a function of a file here, as path.py:function"
        )
    return _held[spec].value


def name_of(function: Any) -> str:
    """A function's own name and a hash of its code: `reward-3f2a9c1d`, or `lambda-...`. Values that it closes over
    are not part of the hash."""
    plain = getattr(function, "func", function)  # functools.partial
    name = getattr(plain, "__name__", type(plain).__name__).strip("<>")
    digest = hashlib.blake2b("\0".join(_identity(plain)).encode(), digest_size=4).hexdigest()
    return f"{name}-{digest}"


def is_same_but_for_code(before: object, now: object) -> bool:
    """Whether `before` names an object that was handed over, and `now` has its own name: in this program with another
    code, or as a function of a module or a file."""
    return is_live(before) and isinstance(now, str) and own_name(str(before)) == own_name(now)


def own_name(spec: str) -> str:
    """`reward` of `<python>:reward-3f2a9c1d`, of `<python>:reward-3f2a9c1d.2` and of `mine.py:reward`."""
    name = spec.rpartition(":")[2]
    return re.sub(r"-[0-9a-f]{8}(\.\d+)?$", "", name) if is_live(spec) else name


def _identity(function: Any) -> Iterator[str]:
    """The texts that identify a function: its code and its defaults. Of a class or an object: those of its methods."""
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

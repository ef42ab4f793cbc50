"""User functions, named in the configuration as `module:function`, `path.py:function` or `<python>:name`.

Loads them, and turns their errors into one line that names the option, the function, file:line and the expected result
(`CustomFunction`). `<python>:name` is an object of a program (live_objects.py). Rewards are called in another process,
which uses `explained` alone. No torch.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import operator
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rollover.files import local_path, short_path
from rollover.live_objects import LIVE, live_object
from rollover.suggest import alike
from rollover.text import one_line

_MAX_ERROR_CHARS = 500
_MOST_CAUSES = 20
MOST_KEPT_BYTES = 1 << 16  # of one value that survives a kill
_SPARE_LEVELS = 200  # of nesting: the value is part of larger JSON, and of a deeper stack
# Owner of a file, by the first of these folders that contains it; otherwise the user.
_FOLDERS = (
    (str(Path(__file__).parent) + os.sep, "rollover"),
    (sysconfig.get_path("purelib") + os.sep, "installed"),
    (sysconfig.get_path("platlib") + os.sep, "installed"),
    (sysconfig.get_path("stdlib") + os.sep, "python"),
    ("<", "python"),
)


class FunctionError(ValueError):
    """A user function raised, or returned an invalid value."""


class CustomFunction:
    """A user function that the option `key` names as `spec`. `returns`: description of its result, for messages.

    It is called like the function, and has its signature. Errors become FunctionError.
    """

    def __init__(self, function: Callable[..., Any], key: str, spec: str, returns: str) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.key, self.spec, self.returns = function, key, spec, returns

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # boundary: the user's function, which may exit, or cancel its own loop
            raise self.failed(error) from error

    async def awaited(self, *args: Any) -> Any:
        """Call it, and await an `async def`. FunctionError also where it cancels itself."""
        value, failure = await outcome_of(self.function, *args)
        if failure is not None:
            raise self.failed(failure) from failure
        return value

    def failed(self, error: BaseException) -> FunctionError:
        """Return the FunctionError for an `error` that it raised."""
        return FunctionError(f"{self.key} = {self.spec!r} failed: {explained(error)}; it must return {self.returns}")

    def refused(self, what: str) -> FunctionError:
        """Return the FunctionError for an invalid result; `what` describes it."""
        where = _where_defined(self.function)
        return FunctionError(f"{self.key} = {self.spec!r}{where} returned {what}; it must return {self.returns}")

    def changed(self, names: list[str]) -> FunctionError:
        """Return the FunctionError for arguments `names` that it changed in place, but must not."""
        where, what = _where_defined(self.function), " and ".join(names)
        return FunctionError(
            f"{self.key} = {self.spec!r}{where} changed {what} in place, but others read that after it: change a copy"
            " (.clone())"
        )

    @classmethod
    def over(cls, function: Callable[..., Any], key: str, returns: str) -> CustomFunction:
        """Wrap a function that a program passed directly, which no configuration names."""
        return function if isinstance(function, cls) else cls(function, key, _name(function), returns)


def custom_function(key: str, spec: str, returns: str) -> CustomFunction:
    """Load the function that the option `key` names as `spec`, relative to the working directory (`load_function`)."""
    try:
        return CustomFunction(load_function(spec, "."), key, spec, returns)
    except ValueError as error:
        raise ValueError(f"{key} = {spec!r}: {error}") from error


def make_named(key: str, name: str, built_in: Mapping[str, str], setup: object, protocol: type, what: str) -> Any:
    """Make the object that the option `key` names as `name`, by calling its function with `setup`.

    `built_in`: name -> `module:function`; other names are user functions, whose result must have every public member of
    `protocol`. `what`: description of that, for messages. ValueError where there is no such function, FunctionError
    where it fails or a member is missing.
    """
    if name in built_in:
        return load_function(built_in[name], ".")(setup)
    members = sorted(member for member in vars(protocol) if not member.startswith("_"))
    file = protocol.__module__.removeprefix("rollover.").replace(".", "/") + ".py"
    make = custom_function(key, name, f"{what} with {', '.join(members)} ({file})")
    made = make(setup)
    if missing := [member for member in members if not _has(made, member)]:
        raise make.refused(f"a {type(made).__name__} without {', '.join(missing)}")
    return made


class CustomObject:
    """Base of the wrappers around a custom engine or backend, which option `key` names as `spec`.

    Subclasses call the members of the contract within `_calling`; others are read through `__getattr__`. `_must`:
    requirement of each member, to follow "it must". `_file`: the file of the contract. `_passed_on`: errors of the
    contract, which are not wrapped.
    """

    _must: Mapping[str, str]
    _file: str
    _passed_on: tuple[type[BaseException], ...]

    def __init__(self, own: Any, key: str, spec: str) -> None:
        self._own, self._key, self.spec = own, key, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @contextmanager
    def _calling(self, member: str) -> Iterator[None]:
        """Turn errors of the member into FunctionError, except those of `_passed_on`."""
        try:
            yield
        except self._passed_on:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # boundary: the user's object
            if was_cancelled(error):
                raise
            raise self._failed(member, f"failed: {explained(error)}") from error

    def _integer(self, name: str) -> int:
        """Return the value of a property that must be an integer."""
        with self._calling(name):
            value = getattr(self._own, name)
        try:
            if not isinstance(value, bool):
                return operator.index(value)  # NumPy's integers, too
        except TypeError:
            pass
        raise self._failed(name, f"gave {described(value)}")

    def _failed(self, member: str, how: str) -> FunctionError:
        return FunctionError(
            f"{self._key} = {self.spec!r}: its {member} {how}. Fix it: it must {self._must[member]} ({self._file})"
        )


def _has(made: object, member: str) -> bool:
    """Return whether it has that member. A property that raises counts: its error is reported on access."""
    try:
        return hasattr(made, member)
    except Exception:  # boundary: the user's object
        return True


async def outcome_of(function: Callable[..., Any], /, *args: Any, name: str = "") -> tuple[Any, BaseException | None]:
    """Call a user function, and return (its awaited result, None) or (None, its error). `name`: of its task.

    It runs in its own task, so that cancelling itself differs from a cancellation of the caller. That is raised, and so
    is KeyboardInterrupt.
    """
    try:
        return await asyncio.create_task(_caught(function, args), name=name or None)
    except asyncio.CancelledError as error:
        if was_cancelled(error):
            raise
        return None, error


async def _caught(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """Call it within a task. SystemExit must not escape: it would end the event loop."""
    try:
        value = function(*args)
        return (await value if inspect.isawaitable(value) else value), None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # boundary: the user's function
        return None, error


def was_cancelled(error: BaseException) -> bool:
    """Return whether `error` is a cancellation of the current task, and not a CancelledError of the user's code."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return False
    return task is not None and task.cancelling() > 0


def explained(error: BaseException, without: Callable[[str], str] = str) -> str:
    """Describe an error on one line, with its place in the user's code: `TypeError: text (mine.py:7)`.

    `without`: removes secrets from its text, before that is shortened.
    """
    said = without(said_by(error)[: 4 * _MAX_ERROR_CHARS])  # megabytes would take seconds
    text = one_line(f"{type(error).__name__}: {said}".removesuffix(": "))
    where = place_of_user((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
    return text[:_MAX_ERROR_CHARS] + (f" ({where})" if where else "")


def said_by(error: BaseException) -> str:
    """Return the text of an error; "" where its class fails to make it."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # boundary: the user's class, which may exit
        return ""


class Causes:
    """Deduplicates error messages of user code. Numbers are ignored, and the number of messages is limited."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Return whether no similar message was passed before."""
        cause = re.sub(r"\d+", "0", text)
        if cause in self._known or len(self._known) == _MOST_CAUSES:
            return False
        self._known.add(cause)
        return True


def place_of_user(frames: Iterable[tuple[str, int]]) -> str:
    """Return the last of these (file name, line) in the user's code, else in an installed package: `mine.py:7`."""
    last = {_owner(filename): (filename, line) for filename, line in frames}
    found = last.get("user") or last.get("installed")
    return f"{short_path(Path(found[0]))}:{found[1]}" if found else ""


def described(value: Any) -> str:
    """Describe a value that a function returned; an array or a tensor by its shape."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return f"{shortened(value)} ({type(value).__name__})" if value is not None else "None"
    return (
        f"a {type(value).__name__} of the shape {list(shape)}" if len(shape) else f"a single number, {value.item()!r}"
    )


def load_function(spec: str, base_dir: str) -> Callable[..., Any]:
    """Resolve `spec`. A relative path is relative to `base_dir`. Raises ValueError saying what could not be found;
    an error raised while importing the user's module becomes one too. A file is run once, so that all its functions
    share the state of one module; again only if it was changed in between."""
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{spec!r} is neither module:function nor path.py:function")
    if place == LIVE:
        return _callable(spec, live_object(spec))
    function: Any = _import_resolved(_resolve(place, base_dir)) if place.endswith(".py") else _import_module(place)
    for part in attribute.split("."):
        if not hasattr(function, part):
            names = [n for n in dir(function) if callable(getattr(function, n)) and not n.startswith("__")]
            raise ValueError(f"{place} has no function {attribute!r}{_near(part, names)}")
        function = getattr(function, part)
    return _callable(spec, function)


def _callable(spec: str, function: Any) -> Callable[..., Any]:
    if not callable(function):
        raise ValueError(f"{spec} is {shortened(function)}, not a function")
    return function


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


MOST_SCORE = 1e30
"""The largest absolute reward: sums of larger ones, and of their squares, overflow in float32 and in float64."""


def is_score(value: float) -> bool:
    """Return whether a number is valid as a reward."""
    return abs(value) <= MOST_SCORE  # neither nan nor inf


def shortened(value: Any) -> str:
    """Return a short text of a value for a message."""
    try:
        text = repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # boundary: the user's class
        text = "(which cannot be shown)"
    return text if len(text) <= 80 else text[:77] + "..."


def _owner(filename: str) -> str:
    return next((owner for folder, owner in _FOLDERS if filename.startswith(folder)), "user")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _where_defined(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f" ({short_path(Path(code.co_filename))}:{code.co_firstlineno})" if code is not None else ""


def _resolve(path: str, base_dir: str) -> Path:
    resolved = local_path(path, base_dir).resolve()
    if not resolved.is_file():
        siblings = [p.name for p in resolved.parent.glob("*.py")] if resolved.parent.is_dir() else []
        raise ValueError(f"there is no file {resolved}{_near(resolved.name, siblings)}")
    return resolved


def _import_resolved(path: Path) -> ModuleType:
    stat = path.stat()
    return _import_file(path, (stat.st_mtime_ns, stat.st_size))


@functools.cache
def _import_file(path: Path, stamp: tuple[int, int]) -> ModuleType:
    """Import a file. `stamp`: modification time and size, so that a changed file is another module."""
    name = f"rollover_user_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # boundary: the user's module
        raise ValueError(f"importing {path} failed: {explained(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"there is no module {error.name!r} (for a file, write path.py:function)") from error
        raise ValueError(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:  # boundary: the user's module
        raise ValueError(f"importing {name} failed: {explained(error)}") from error


def _near(name: str, candidates: list[str]) -> str:
    near = alike(name, candidates, 3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def as_json(value: Any, what: str) -> Any:
    """Return a copy of a value that survives a kill, after a round trip through JSON.

    ValueError, which names `what`, where it is not JSON or has more than MOST_KEPT_BYTES.
    """
    deeper = value
    for _ in range(_SPARE_LEVELS):
        deeper = [deeper]
    try:
        text = json.dumps(deeper, allow_nan=False)[_SPARE_LEVELS:-_SPARE_LEVELS]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be a JSON value, and {described(value)} is none ({error})") from error
    if (num := len(text.encode())) > MOST_KEPT_BYTES:
        raise ValueError(
            f"{what} has {num:,} bytes as JSON, and at most {MOST_KEPT_BYTES:,} are kept, as they are in every"
            " checkpoint. Keep what is large in a file of its own, and its name here"
        )
    return json.loads(text)

"""The user's own functions, named in the configuration as `module:function`, `path.py:function` or `<python>:name`.

Owns how one is found, and what is said when one fails: a single line that names the option, the function, file:line and
what was expected (`OwnFunction`). The last form names an object that a program handed over (`live_objects`). Rewards
are called in another process, which uses `explained` alone. No torch.
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
MOST_KEPT_BYTES = 1 << 16  # of one value that is kept over a kill
_SPARE_LEVELS = 200  # of nesting: it is written and read as part of more, and deeper in the stack
# Who wrote a file, by the first of these folders that it lies in; it is the user's if it lies in none.
_FOLDERS = (
    (str(Path(__file__).parent) + os.sep, "rollover"),
    (sysconfig.get_path("purelib") + os.sep, "installed"),
    (sysconfig.get_path("platlib") + os.sep, "installed"),
    (sysconfig.get_path("stdlib") + os.sep, "python"),
    ("<", "python"),
)


class FunctionError(ValueError):
    """A function of the user's own raised, or did not return what it must."""


class OwnFunction:
    """A function of the user's own that the option `key` names as `spec`; `returns` says in words what it must return.

    Called as the function itself; its signature is that of the function. What it raises becomes a FunctionError.
    """

    def __init__(self, function: Callable[..., Any], key: str, spec: str, returns: str) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.key, self.spec, self.returns = function, key, spec, returns

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # boundary: the user's function. it may exit, or cancel a loop of its own
            raise self.failed(error) from error

    async def awaited(self, *args: Any) -> Any:
        """What it returns, awaited if it is an `async def`. One that cancels itself failed, as one that raises."""
        value, failure = await outcome_of(self.function, *args)
        if failure is not None:
            raise self.failed(failure) from failure
        return value

    def failed(self, error: BaseException) -> FunctionError:
        """The error to raise where it raised `error`."""
        return FunctionError(f"{self.key} = {self.spec!r} failed: {explained(error)}; it must return {self.returns}")

    def refused(self, what: str) -> FunctionError:
        """The error to raise where it returned `what` (in words)."""
        where = _where_defined(self.function)
        return FunctionError(f"{self.key} = {self.spec!r}{where} returned {what}; it must return {self.returns}")

    def changed(self, names: list[str]) -> FunctionError:
        """The error to raise where it changed the arguments `names` in place, which are read by others afterwards."""
        where, what = _where_defined(self.function), " and ".join(names)
        return FunctionError(
            f"{self.key} = {self.spec!r}{where} changed {what} in place, but others read that after it: change a copy"
            " (.clone())"
        )

    @classmethod
    def over(cls, function: Callable[..., Any], key: str, returns: str) -> OwnFunction:
        """`function` as one of the user's own, where a program passed it directly and no configuration names it."""
        return function if isinstance(function, cls) else cls(function, key, _name(function), returns)


def own_function(key: str, spec: str, returns: str) -> OwnFunction:
    """The function that the option `key` names as `spec`, relative to the working directory. See `load_function`."""
    try:
        return OwnFunction(load_function(spec, "."), key, spec, returns)
    except ValueError as error:
        raise ValueError(f"{key} = {spec!r}: {error}") from error


def make_named(key: str, name: str, built_in: Mapping[str, str], setup: object, protocol: type, what: str) -> Any:
    """What the option `key` names as `name`, made of `setup`: by the function that `built_in` has for this name, as
    `module:function`, or by the user's own.

    What the user's own returns must have every public member of `protocol`; `what` says in words what that is.
    ValueError where there is no such function, FunctionError where it fails or a member is missing.
    """
    if name in built_in:
        return load_function(built_in[name], ".")(setup)
    members = sorted(member for member in vars(protocol) if not member.startswith("_"))
    file = protocol.__module__.removeprefix("rollover.").replace(".", "/") + ".py"
    make = own_function(key, name, f"{what} with {', '.join(members)} ({file})")
    made = make(setup)
    if missing := [member for member in members if not _has(made, member)]:
        raise make.refused(f"a {type(made).__name__} without {', '.join(missing)}")
    return made


class OwnObject:
    """Base of the wrappers around an engine or a backend of the user's own, which option `key` names as `spec`.

    Subclasses call the members of its contract within `_calling`; other members are read through `__getattr__`.
    `_must`: what each member must be or do, to complete "it must ...". `_file`: where the contract is. `_passed_on`:
    errors of the contract itself.
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
        """FunctionError for what the member raises but for `_passed_on`."""
        try:
            yield
        except self._passed_on:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # boundary: the user's object
            if was_cancelled(error):
                raise
            raise self._failed(member, f"failed: {explained(error)}") from error

    def _integer(self, name: str) -> int:
        """The integer that a property has."""
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
            f"{self._key} = {self.spec!r}: its {member} {how}. Mend it: it must {self._must[member]} ({self._file})"
        )


def _has(made: object, member: str) -> bool:
    """Whether it has that member. A property that raises is there: its error is said where it is read."""
    try:
        return hasattr(made, member)
    except Exception:  # boundary: the user's object
        return True


async def outcome_of(function: Callable[..., Any], /, *args: Any, name: str = "") -> tuple[Any, BaseException | None]:
    """(what it returned, awaited if that is to be done; None), or (None; what it raised). `name`: of its task.

    It runs in a task of its own, the only one that it can cancel: so that is told from a cancellation of who waits,
    which is raised, as KeyboardInterrupt is.
    """
    try:
        return await asyncio.create_task(_caught(function, args), name=name or None)
    except asyncio.CancelledError as error:
        if was_cancelled(error):
            raise
        return None, error


async def _caught(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """A task that SystemExit ends would end the event loop with it."""
    try:
        value = function(*args)
        return (await value if inspect.isawaitable(value) else value), None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # boundary: the user's function
        return None, error


def was_cancelled(error: BaseException) -> bool:
    """Whether `error` says that the present task is being cancelled: not so where the user's code raises CancelledError
    by itself."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return False
    return task is not None and task.cancelling() > 0


def explained(error: BaseException, without: Callable[[str], str] = str) -> str:
    """`TypeError: text (mine.py:7)`, on one line: where in the user's code it was raised, if it was. `without`: takes
    out of its text what nobody is to read, before that is cut."""
    said = without(said_by(error)[: 4 * _MAX_ERROR_CHARS])  # megabytes would take seconds
    text = one_line(f"{type(error).__name__}: {said}".removesuffix(": "))
    where = place_of_user((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
    return text[:_MAX_ERROR_CHARS] + (f" ({where})" if where else "")


def said_by(error: BaseException) -> str:
    """Its text; "" where its class cannot say it."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # boundary: the user's class, which may exit
        return ""


class Causes:
    """Of failures of the user's code: each is worth a line, once. Numbers do not tell two of them apart, and after some
    nothing is new any more, as a text may be another one each time."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Whether nothing alike was asked about before."""
        cause = re.sub(r"\d+", "0", text)
        if cause in self._known or len(self._known) == _MOST_CAUSES:
            return False
        self._known.add(cause)
        return True


def place_of_user(frames: Iterable[tuple[str, int]]) -> str:
    """`mine.py:7`: the last of these (file name, line) that is the user's, or an installed package's, as a function may
    be one of such; "" if none is."""
    last = {_owner(filename): (filename, line) for filename, line in frames}
    found = last.get("user") or last.get("installed")
    return f"{short_path(Path(found[0]))}:{found[1]}" if found else ""


def described(value: Any) -> str:
    """What a function returned, in words: of an array or a tensor its shape."""
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
    """Whether a value that the user gave is a number of Python's own; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


MOST_SCORE = 1e30
"""The largest reward, either way: sums of larger ones, and of their squares, overflow in float32 and in float64."""


def is_score(value: float) -> bool:
    """Whether a number can be trained as a reward."""
    return abs(value) <= MOST_SCORE  # neither nan nor inf


def shortened(value: Any) -> str:
    """What a message shows of a value that the user's code gave."""
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
    """`stamp`: modification time and size, so that another content of the same path is another module."""
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
    """A copy of a value that is kept over a kill, as JSON gives it back. ValueError, which names `what`, where it is
    none or has more than MOST_KEPT_BYTES."""
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

"""Transfer of live functions (a reward, a blocking workflow) to a worker process, by cloudpickle.

This is the only place that pickles and unpickles (lambdas, closures, functions of a notebook's cell). A child process
unpickles what its own parent sent through a pipe that only the parent writes to, never anything from a file, a socket
or a model. Values that a function refers to are copied. For a worker on another node, the run's actors pass the text
on without unpickling it.
"""

from __future__ import annotations

import base64
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rollover.live_objects import is_live, live_object
from rollover.rewards.built_in import specs_in
from rollover.text import printable


def packed(spec: str, what: str = "reward") -> dict[str, Any]:
    """Return the fields of the load message of `spec` besides its name: none unless it names live objects.

    `what`: kind of function, for the message. ValueError, with the fix, for a function that cannot be pickled.
    """
    live = [one for one in specs_in(spec) if is_live(one)]
    if not live:
        return {}
    # cloudpickle refers to importable modules by name, so the worker needs the same path.
    return {"functions": {one: _pickled(one, what) for one in live}, "path": [p for p in sys.path if p]}


def unpacked(message: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions of a load message by spec, in the worker. ValueError if a module cannot be imported."""
    if "functions" not in message:
        return {}
    sys.path += [place for place in message["path"] if place not in sys.path]
    return {spec: _unpickled(text) for spec, text in message["functions"].items()}


def _pickled(spec: str, what: str) -> str:
    import cloudpickle

    function = live_object(spec)
    try:
        return base64.b64encode(cloudpickle.dumps(function)).decode("ascii")
    except Exception as error:  # boundary: a user's class may raise anything
        raise ValueError(_why_not(function, error, what)) from error


def _unpickled(text: str) -> Callable[..., Any]:
    import cloudpickle

    try:
        return cloudpickle.loads(base64.b64decode(text))
    except Exception as error:  # boundary: unpickling imports the user's modules
        raise ValueError(
            f"the function cannot be rebuilt in the worker process: {type(error).__name__}: {printable(str(error))}"
        ) from error


def _why_not(function: Any, error: Exception, what: str) -> str:
    import cloudpickle

    names = []
    for name, value in _used_by(function):
        try:
            cloudpickle.dumps(value)
        except Exception:
            names.append(f"{name} ({type(value).__name__})")
    holds = f" It uses {', '.join(names)}, which cannot be copied." if names else ""
    return (
        f"the {what} function cannot travel to its worker process: {type(error).__name__}: {printable(str(error))}."
        f"{holds} Make such a thing inside the function, when it is first called; or put the function into a file and"
        " name it (path.py:function)"
    )


def _used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a function's global and nonlocal variables, or of an object's attributes."""
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from {**found.globals, **found.nonlocals}.items()
    else:
        yield from getattr(function, "__dict__", {}).items()

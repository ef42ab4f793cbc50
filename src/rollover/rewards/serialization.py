"""A function that a program handed over (a reward, a workflow that blocks), on its way to a worker process.

Owns the one place where anything is pickled (cloudpickle: lambdas, closures, functions of a notebook's cell) and
unpickled. It is unpickled in a child of the process that pickled it, which gets it through the pipe that only the
parent writes to; nothing from a file, a socket or a model ever comes here. What a function refers to is copied as it is
now. To a worker on another node it goes as the same text by way of the run's own actors, which do not open it.
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
    """What the message that loads `spec` needs beside its name: nothing, unless it is an object of this process, or
    several of which some are.

    ValueError, with the cure, where one cannot travel. `what`: it is a function of, as users say.
    """
    live = [one for one in specs_in(spec) if is_live(one)]
    if not live:
        return {}
    # Modules that this process can import are imported there by their names.
    return {"functions": {one: _pickled(one, what) for one in live}, "path": [p for p in sys.path if p]}


def unpacked(message: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions of such a message by their specs, in the worker. ValueError where what one needs cannot be imported
    there."""
    if "functions" not in message:
        return {}
    sys.path += [place for place in message["path"] if place not in sys.path]
    return {spec: _unpickled(text) for spec, text in message["functions"].items()}


def _pickled(spec: str, what: str) -> str:
    import cloudpickle

    function = live_object(spec)
    try:
        return base64.b64encode(cloudpickle.dumps(function)).decode("ascii")
    except Exception as error:  # boundary: any class of the user's may refuse in its own way
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
    """Names and values of the variables around a function, or of an object's attributes."""
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from {**found.globals, **found.nonlocals}.items()
    else:
        yield from getattr(function, "__dict__", {}).items()

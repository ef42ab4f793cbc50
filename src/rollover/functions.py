"""The user's own functions, named in the configuration as `module:function` or `path.py:function`."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(spec: str, base_dir: str) -> Callable[..., Any]:
    """Resolve `spec`. A relative path is relative to `base_dir`. Raises ValueError saying what could not be found;
    an error raised while importing the user's module becomes one too. A file is run once, so that all its functions
    share the state of one module; again only if it was changed in between."""
    place, _, attribute = spec.rpartition(":")
    module = _import_resolved(_resolve(place, base_dir)) if place.endswith(".py") else _import_module(place)
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            names = [n for n in dir(function) if callable(getattr(function, n)) and not n.startswith("__")]
            raise ValueError(f"{place} has no function {attribute!r}{_near(part, names)}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(f"{spec} is {shortened(function)}, not a function")
    return function


def shortened(value: Any) -> str:
    """What a message shows of a value that the user's code gave."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _resolve(path: str, base_dir: str) -> Path:
    resolved = Path(base_dir, Path(path).expanduser()).resolve()
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
        raise ValueError(f"importing {path} failed: {type(error).__name__}: {error}") from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"there is no module {error.name!r} (for a file, write path.py:function)") from error
        raise ValueError(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:  # boundary: the user's module
        raise ValueError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _near(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""

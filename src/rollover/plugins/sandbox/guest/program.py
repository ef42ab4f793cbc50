"""A program of the policy: loaded, run, called. In the child that is locked in, but for finding what it lacks."""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, TextIO

from rollover.plugins.sandbox.guest.values import NotPlain, from_json, to_json

_NAME = "<program>"
# What programs of such data sets use without importing it; verl gives the same to theirs.
MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip


class Channel:
    """Lines of JSON to and from the outside."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._lines = os.fdopen(incoming, "rb")
        self._outgoing = outgoing

    def say(self, message: dict[str, Any]) -> None:
        write(self._outgoing, message, b"\n")

    def hear(self) -> dict[str, Any]:
        """The next line. EOFError at the end."""
        line = self._lines.readline()
        if not line:
            raise EOFError
        return json.loads(line)


class Source:
    """The text of a program. What it needs beyond its own imports is loaded here, once, before any child is made."""

    def __init__(self, code: str) -> None:
        self.code = code
        self._given = _missing(code)

    def run(self, name: str = "__main__") -> dict[str, Any]:
        """Run it, and return its globals."""
        module = types.ModuleType(name)
        sys.modules[name] = module
        module.__dict__.update(self._given)
        exec(compile(self.code, _NAME, "exec", dont_inherit=True), module.__dict__)
        return module.__dict__

    def call(self, name: str, arguments: list[Any]) -> Any:
        """The form of what the function, or the method of that name of a class Solution, returns."""
        function = self.function(self.run("program"), name)
        return to_json(function(*map(from_json, arguments)))

    def calls(self, name: str, rows: list[list[Any]], first: int, end: int) -> None:
        """Call it with each of `rows` from `first` on, and write a line of each. What is no Exception ends it."""
        gc.freeze()  # all but what the program makes
        for index in range(first, len(rows)):
            try:
                value = self.call(name, rows[index])
                _join_threads()
                sys.stdout.flush()
                line = json.dumps({"test": index, "ended": "ok", "value": value})
            except MemoryError:
                raise
            except Exception as error:  # boundary: code of the policy
                line = json.dumps({"test": index, "ended": "error", "detail": told(error)})
            _write(end, line.encode() + b"\n")
            gc.collect()  # its modules are cycles

    def function(self, found: dict[str, Any], name: str) -> Callable[..., Any]:
        """NameError where the program has no such function."""
        if name in found:
            return found[name]
        solution = found.get("Solution")
        if solution is None or not hasattr(solution, name):
            raise NameError(f"the program defines no {name}")
        return getattr(solution(), name)


def _missing(code: str) -> dict[str, Any]:
    """Names that the program uses, and neither binds nor imports, of the modules above."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return {}  # it does not run either
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if not (wanted := used - bound - set(vars(builtins))) or "*" in bound:
        return {}
    given: dict[str, Any] = {}
    for name in MODULES:
        module = __import__(name)
        given |= {key: getattr(module, key) for key in _public(module)} | {name: module}
    return {key: given[key] for key in wanted & given.keys()}


def _public(module: types.ModuleType) -> list[str]:
    return getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]


def write(end: int, message: Any, after: bytes = b"") -> None:
    _write(end, json.dumps(message).encode() + after)


def _write(end: int, text: bytes) -> None:
    data = memoryview(text)
    while data:
        data = data[os.write(end, data) :]


def standard_streams() -> None:
    """New ones over the present descriptors: what the runner has of its own in its streams is not the program's."""
    sys.stdin = _stream(0, "r")
    sys.stdout = _stream(1, "w")
    sys.stderr = _stream(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = [_NAME]


def _stream(number: int, mode: str) -> TextIO:
    return open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]


def _join_threads() -> None:
    """Wait for what a call left running, but for threads that need not end."""
    if threading := sys.modules.get("threading"):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def wait_for_threads() -> None:
    """As Python does at its end."""
    if threading := sys.modules.get("threading"):
        threading._shutdown()


def complain(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"\n" + text.encode("utf-8", "replace") + b"\n")


def told(error: BaseException) -> str:
    """An exception in a line, with the program's line that raised it."""
    try:
        line, frame = 0, error.__traceback__
        while frame is not None:
            line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == _NAME else line
            frame = frame.tb_next
        text = " ".join(str(error).split())[:200]
        return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")
    except BaseException:  # boundary: the program's own exception
        return "an exception"


__all__ = ["Channel", "NotPlain", "Source", "complain", "standard_streams", "told", "wait_for_threads", "write"]

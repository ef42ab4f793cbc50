"""A program of the policy: loaded, run, called. All in the locked child, except for the search for missing imports."""

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

from rollover.plugins.sandbox.guest.values import from_json, to_json

_NAME = "<program>"
# Modules that programs of such data sets use without an import; verl provides the same.
MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip


class JsonChannel:
    """Lines of JSON to and from the outside."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._lines = os.fdopen(incoming, "rb")
        self._outgoing = outgoing

    def send(self, message: dict[str, Any]) -> None:
        write(self._outgoing, message, b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next line. EOFError at the end."""
        line = self._lines.readline()
        if not line:
            raise EOFError
        return json.loads(line)


class Source:
    """The text of a program. Missing imports are loaded once, before any fork."""

    def __init__(self, code: str) -> None:
        self.code = code
        self._given = _missing(code)

    def run(self, name: str = "__main__") -> dict[str, Any]:
        """Run the program, and return its globals."""
        module = types.ModuleType(name)
        sys.modules[name] = module
        module.__dict__.update(self._given)
        exec(compile(self.code, _NAME, "exec", dont_inherit=True), module.__dict__)
        return module.__dict__

    def call(self, name: str, arguments: list[Any]) -> Any:
        """Call a function, or that method of a class Solution, and return its result's form."""
        function = self.function(self.run("program"), name)
        return to_json(function(*map(from_json, arguments)))

    def calls(self, name: str, rows: list[list[Any]], first: int, end: int) -> None:
        """Call it with each of `rows` from `first` on, and write a line for each."""
        gc.freeze()  # collect only the program's objects
        for index in range(first, len(rows)):
            try:
                value = self.call(name, rows[index])
                _join_threads()
                sys.stdout.flush()
                line = json.dumps({"test": index, "ended": "ok", "value": value})
            except MemoryError:
                raise
            except Exception as error:  # boundary: code of the policy
                line = json.dumps({"test": index, "ended": "error", "detail": describe_error(error)})
            _write(end, line.encode() + b"\n")
            gc.collect()  # its modules are cycles

    def function(self, found: dict[str, Any], name: str) -> Callable[..., Any]:
        """Return a function, or a method of a class Solution. NameError if there is none."""
        if name in found:
            return found[name]
        solution = found.get("Solution")
        if solution is None or not hasattr(solution, name):
            raise NameError(f"the program defines no {name}")
        return getattr(solution(), name)


def _missing(code: str) -> dict[str, Any]:
    """Return names of MODULES that the program uses without binding or importing them."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return {}  # it will not run either
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
    """Reopen the standard streams, so that the program cannot use the runner's."""
    sys.stdin = _stream(0, "r")
    sys.stdout = _stream(1, "w")
    sys.stderr = _stream(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = [_NAME]


def _stream(number: int, mode: str) -> TextIO:
    return open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]


def _join_threads() -> None:
    """Wait for a call's threads, except daemons."""
    if threading := sys.modules.get("threading"):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def wait_for_threads() -> None:
    """Wait for threads, as Python does at exit."""
    if threading := sys.modules.get("threading"):
        threading._shutdown()


def complain(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"\n" + text.encode("utf-8", "replace") + b"\n")


def describe_error(error: BaseException) -> str:
    """Return an exception in one line, with the program's line number."""
    try:
        line, frame = 0, error.__traceback__
        while frame is not None:
            line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == _NAME else line
            frame = frame.tb_next
        text = " ".join(str(error).split())[:200]
        return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")
    except BaseException:  # boundary: the program's own exception
        return "an exception"


# Calls from tests in another sandbox: functions and objects stay here, plain values cross.
#
# in   {"get": name} | {"call": handle, "args", "kwargs"} | {"attr": handle, "name"} | {"item": handle, "args"} | {}
# out  {"value": form, "changed"?: arguments changed in place} | {"raised": type, "text"} | {"none": true}


def serve(source: Source, channel: JsonChannel) -> None:
    """Load the program, report it, and answer requests until an empty one."""
    objects: list[Any] = []

    def handle(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    found = source.run("program")
    channel.send({"loaded": True})
    while request := channel.receive():
        try:
            answer = _answer(request, found, source, objects, handle)
        except MemoryError:
            raise
        except Exception as error:
            base = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"), "Exception")
            answer = {"raised": base, "text": describe_error(error)}
        channel.send(answer)


def _answer(request: dict[str, Any], found: dict[str, Any], source: Source, objects: list[Any], handle: Any) -> Any:
    if "get" in request:
        try:
            return {"value": to_json(source.function(found, request["get"]), handle)}
        except NameError:
            return {"none": True}
    if "attr" in request:
        return {"value": to_json(getattr(objects[request["attr"]], request["name"]), handle)}
    args = [from_json(form, objects.__getitem__) for form in request["args"]]
    if "item" in request:
        return {"value": to_json(objects[request["item"]][args[0]], handle)}
    kwargs = {name: from_json(form, objects.__getitem__) for name, form in request["kwargs"].items()}
    result = to_json(objects[request["call"]](*args, **kwargs), handle)
    after = [to_json(arg, handle) if isinstance(arg, list | dict | set) else None for arg in args]
    changed = {str(i): form for i, form in enumerate(after) if form is not None and form != request["args"][i]}
    return {"value": result, **({"changed": changed} if changed else {})}

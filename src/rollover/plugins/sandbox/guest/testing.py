"""Tests as Python code, in a sandbox of their own: what they call of the program is called over there.

The program never shares a process with its tests, so it can neither see what they expect nor change what they do. A
name that they use, and that is neither theirs nor built in, stands for the program's function or class of that name.
Only plain values cross (values.py); an object of the program's own stays there, and its public attributes, methods and
items can be used from here. It compares as itself.

    out  {"ask": a request of serving.py}, then the answer is read
         {"test": i, "ended": ok | wrong | error, "detail"}
         {"broken": text}: the tests themselves cannot be run
"""

from __future__ import annotations

import ast
import builtins
from typing import Any

from rollover.plugins.sandbox.guest.program import Channel, told
from rollover.plugins.sandbox.guest.values import NotPlain, from_json, to_json


class FromProgram(Exception):
    """What the program raised, where it has no type of Python's own."""


class Gone(BaseException):
    """Nobody answers any more: the time is over."""


class Unsupported(BaseException):
    """Something in the tests that cannot cross: the tests are at fault, not the program."""


class Outside:
    """Asks the program."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.raised: list[BaseException] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._channel.say({"ask": request})
        try:
            answer = self._channel.hear()
        except EOFError:
            raise Gone from None
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), FromProgram)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            text = str(answer.get("text"))
            try:
                error = (kind if known else FromProgram)(text)
            except TypeError:  # of more arguments than one
                error = FromProgram(text)
            self.raised.append(error)
            raise error
        return answer

    def value(self, form: Any) -> Any:
        return from_json(form, lambda handle: Far(self, handle))

    def form(self, value: Any) -> Any:
        def handle(item: Any) -> int:
            if type(item) is Far:
                return object.__getattribute__(item, "_handle")
            raise Unsupported(f"the tests hand {type(item).__name__} to the program, which is no plain value")

        try:
            return to_json(value, handle)
        except NotPlain as error:
            raise Unsupported(f"the tests hand the program {error}") from None


class Far:
    """A function, class or object of the program's."""

    def __init__(self, outside: Outside, handle: int) -> None:
        self._outside, self._handle = outside, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outside = self._outside
        forms = [outside.form(arg) for arg in args]
        named = {name: outside.form(value) for name, value in kwargs.items()}
        answer = outside.ask({"call": self._handle, "args": forms, "kwargs": named})
        for index, form in answer.get("changed", {}).items():
            _change(args[int(index)], outside.value(form))
        return outside.value(answer.get("value"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._outside.value(self._outside.ask({"attr": self._handle, "name": name}).get("value"))

    def __getitem__(self, key: Any) -> Any:
        outside = self._outside
        return outside.value(outside.ask({"item": self._handle, "args": [outside.form(key)]}).get("value"))


def _change(argument: Any, after: Any) -> None:
    """An argument that the program changed in place."""
    if type(argument) is type(after) and isinstance(argument, list):
        argument[:] = after
    elif type(argument) is type(after) and isinstance(argument, dict | set):
        argument.clear()
        argument.update(after)


def run_tests(request: dict[str, Any], channel: Channel) -> None:
    """Run the set-up, then each test, whatever became of those before it."""
    outside = Outside(channel)
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        for name in _wanted([request["code"], *request["tests"]], request["name"]):
            answer = outside.ask({"get": name})
            if not answer.get("none"):
                space[name] = outside.value(answer.get("value"))
        exec(compile(request["code"], "<tests>", "exec"), space)
    except BaseException as error:  # boundary: code of the data set
        if not any(error is raised for raised in outside.raised) and not isinstance(error, Gone | NotPlain):
            channel.say({"broken": told(error)})
        return
    for index, test in enumerate(request["tests"]):
        ended, detail = "ok", ""
        try:
            code = compile(test, "<tests>", "exec")
        except (SyntaxError, ValueError) as error:
            channel.say({"broken": told(error)})
            return
        try:
            exec(code, space)
        except AssertionError as error:
            by_program = any(error is raised for raised in outside.raised)
            ended, detail = ("error" if by_program else "wrong"), told(error)
        except Unsupported as error:
            channel.say({"broken": told(error)})
            return
        except Gone:
            return
        except BaseException as error:  # boundary: code of the data set, which met what the program returned
            ended, detail = "error", told(error)
        channel.say({"test": index, "ended": ended, "detail": detail})


def _wanted(codes: list[str], name: str) -> list[str]:
    """The names of the program's that the tests use: `name`, and those that are neither bound nor built in."""
    nodes = [node for code in codes for node in ast.walk(ast.parse(code))]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return sorted((used - bound - set(vars(builtins))) | ({name} if name else set()))

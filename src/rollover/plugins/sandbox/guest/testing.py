"""Tests as Python code in their own sandbox; calls of the program's functions run in its sandbox.

The program shares no process with its tests, so that it can neither read nor change them. A name that the tests use but
do not define, and that is not built in, refers to the program's function or class. Only plain values cross (values.py).
Other objects stay in the program's sandbox; the tests can use their public attributes, methods and items, and compare
them by identity.

    out  {"ask": a request of program.py}, then the answer is read
         {"test": i, "ended": ok | wrong | error, "detail"}
         {"broken": text}: the tests themselves cannot be run
"""

from __future__ import annotations

import ast
import builtins
from typing import Any

from rollover.plugins.sandbox.guest.program import JsonChannel, describe_error
from rollover.plugins.sandbox.guest.values import NotPlain, from_json, to_json


class FromProgram(Exception):
    """An exception of the program that has no built-in type."""


class ChannelClosed(BaseException):
    """The program's sandbox no longer answers."""


class UnsupportedValue(BaseException):
    """A value of the tests that cannot cross: an error of the tests."""


class ProgramClient:
    """Sends requests to the program's sandbox."""

    def __init__(self, channel: JsonChannel) -> None:
        self._channel = channel
        self.raised: list[BaseException] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._channel.send({"ask": request})
        try:
            answer = self._channel.receive()
        except EOFError:
            raise ChannelClosed from None
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
        return from_json(form, lambda handle: RemoteObject(self, handle))

    def form(self, value: Any) -> Any:
        def handle(item: Any) -> int:
            if type(item) is RemoteObject:
                return object.__getattribute__(item, "_handle")
            raise UnsupportedValue(f"the tests hand {type(item).__name__} to the program, which is no plain value")

        try:
            return to_json(value, handle)
        except NotPlain as error:
            raise UnsupportedValue(f"the tests hand the program {error}") from None


class RemoteObject:
    """A function, class or object of the program."""

    def __init__(self, client: ProgramClient, handle: int) -> None:
        self._client, self._handle = client, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        client = self._client
        forms = [client.form(arg) for arg in args]
        named = {name: client.form(value) for name, value in kwargs.items()}
        answer = client.ask({"call": self._handle, "args": forms, "kwargs": named})
        for index, form in answer.get("changed", {}).items():
            _change(args[int(index)], client.value(form))
        return client.value(answer.get("value"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._client.value(self._client.ask({"attr": self._handle, "name": name}).get("value"))

    def __getitem__(self, key: Any) -> Any:
        client = self._client
        return client.value(client.ask({"item": self._handle, "args": [client.form(key)]}).get("value"))


def _change(argument: Any, after: Any) -> None:
    """Apply the program's in-place change to an argument."""
    if type(argument) is type(after) and isinstance(argument, list):
        argument[:] = after
    elif type(argument) is type(after) and isinstance(argument, dict | set):
        argument.clear()
        argument.update(after)


def run_tests(request: dict[str, Any], channel: JsonChannel) -> None:
    """Run the set-up, then all tests, also after failures."""
    client = ProgramClient(channel)
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        for name in _wanted([request["code"], *request["tests"]], request["name"]):
            answer = client.ask({"get": name})
            if not answer.get("none"):
                space[name] = client.value(answer.get("value"))
        exec(compile(request["code"], "<tests>", "exec"), space)
    except BaseException as error:  # boundary: code of the data set
        if not any(error is raised for raised in client.raised) and not isinstance(error, ChannelClosed | NotPlain):
            channel.send({"broken": describe_error(error)})
        return
    for index, test in enumerate(request["tests"]):
        ended, detail = "ok", ""
        try:
            code = compile(test, "<tests>", "exec")
        except (SyntaxError, ValueError) as error:
            channel.send({"broken": describe_error(error)})
            return
        try:
            exec(code, space)
        except AssertionError as error:
            by_program = any(error is raised for raised in client.raised)
            ended, detail = ("error" if by_program else "wrong"), describe_error(error)
        except UnsupportedValue as error:
            channel.send({"broken": describe_error(error)})
            return
        except ChannelClosed:
            return
        except BaseException as error:  # boundary: code of the data set, with values of the program
            ended, detail = "error", describe_error(error)
        channel.send({"test": index, "ended": ended, "detail": detail})


def _wanted(codes: list[str], name: str) -> list[str]:
    """Return the program's names that the tests use: `name`, and unbound ones that are not built in."""
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

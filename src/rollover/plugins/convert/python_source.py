"""Reads Python without running it: what names are assigned, which functions are defined or imported, and the value of
an expression as far as it is plain.

Understood are literals, sums, f-strings, names that are assigned before, arguments of functions that are called once,
and defaults of argparse (python_defaults.py), of dataclasses and of `os.environ.get`. Knows nothing of any system.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollover.plugins.convert.mapping import Unread
from rollover.plugins.convert.python_definitions import EVERY, Assigned, Definitions, Function, calls

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_PLAIN_CALLS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "dict": dict, "list": list}
_MOST_CHARS = 1 << 16  # of a text, and items of a list: names of names multiply
_MOST_VALUES = 100_000  # that are evaluated
_LARGEST = 1 << 63


class NotRead(ValueError):
    """An expression that is not understood."""


def parsed(text: str) -> ast.Module:
    """The syntax tree. ValueError for text that is no Python, or is nested too deeply."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"it is no Python: {error.msg} (line {error.lineno})") from error
    except (MemoryError, RecursionError):
        raise ValueError("what it says is nested too deeply") from None


@dataclass
class PythonSource(Definitions):
    """The values of a file. further: reads expressions that this does not understand; None of those that it does not,
    either."""

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    further: Callable[[ast.expr], ast.expr | None] = lambda node: None

    def __post_init__(self) -> None:
        self._left = _MOST_VALUES
        self._scopes: dict[ast.AST, list[Function]] = {}
        super().__post_init__()
        for function in [node for node in ast.walk(self.tree) if isinstance(node, Function)]:
            for inner in ast.walk(function):
                if inner is not function and isinstance(inner, ast.Name):
                    self._scopes.setdefault(inner, []).insert(0, function)

    # Values

    def value(self, node: ast.expr) -> Any:  # noqa: C901 - one case for each expression
        """What an expression is. NotRead names the part that is not understood."""
        self._left -= 1
        if self._left < 0:
            raise NotRead("the script has too many values to be read")
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            return {self.value(k): self.value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
        if isinstance(node, ast.Name):
            made = self.resolved(node)
            if _is_mutable(made) and (why := self.changes(node)):
                raise NotRead(why)
            return self.value(made)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            inner = self.value(node.operand)
            return not inner if isinstance(node.op, ast.Not) else -inner
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._operated(node, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            values = [self.value(part) for part in node.values]
            return next((value for value in values if value), values[-1])
        if isinstance(node, ast.JoinedStr):
            return self._bounded(node, "".join(str(self.value(part)) for part in node.values))
        if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
            return self.value(node.value)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return node.attr  # torch.bfloat16
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _PLAIN_CALLS:
            return self._called(node)
        found, value = self._of_environment(node)
        if found:
            return value
        if (other := self.further(node)) is not None:
            return self.value(other)
        if isinstance(node, ast.Subscript):
            try:
                return self.value(node.value)[self.value(node.slice)]
            except (TypeError, LookupError):
                raise self.not_read(node) from None
        raise self.not_read(node)

    def _operated(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        """Bounded before it is computed: 9**9**9 never ends, and 'a' * 10**12 has no place."""
        numbers = all(isinstance(value, int | float) for value in (left, right))
        too_large = isinstance(node.op, ast.Pow) and abs(right if numbers else 0) > 64
        if not numbers and isinstance(node.op, ast.Mult):
            lengths = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
            too_large = all(isinstance(value, int) for value in lengths) and lengths[0] * lengths[1] > _MOST_CHARS
        if too_large or not numbers and not isinstance(node.op, ast.Add | ast.Mult):
            raise self.not_read(node)
        try:
            value = _OPERATORS[type(node.op)](left, right)
        except (TypeError, ValueError, ArithmeticError):
            raise self.not_read(node) from None
        return self._bounded(node, value)

    def _bounded(self, node: ast.expr, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= _LARGEST or isinstance(value, complex):
            raise self.not_read(node)
        if isinstance(value, str | list) and len(value) > _MOST_CHARS:
            raise NotRead(f"line {node.lineno} makes more than {_MOST_CHARS:,} characters or items")
        return value

    def _called(self, node: ast.Call) -> Any:
        if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
            raise self.not_read(node)
        try:
            keywords = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
            return _PLAIN_CALLS[ast.unparse(node.func)](*map(self.value, node.args), **keywords)
        except (TypeError, ValueError) as error:
            raise (error if isinstance(error, NotRead) else self.not_read(node)) from None

    def _of_environment(self, node: ast.expr) -> tuple[bool, Any]:
        """Whether it reads the environment, and what is there."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv", "getenv"):
            name = str(self.value(node.args[0])) if node.args else ""
            default = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords), None)
            if name in self.environment:
                return True, self.environment[name]
            return True, self.value(default) if default is not None else None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            name = str(self.value(node.slice))
            if name not in self.environment:
                raise NotRead(f"{name} is not in the environment: `{name}=... rollover convert FILE`")
            return True, self.environment[name]
        return False, None

    def resolved(self, node: ast.expr) -> ast.expr:
        """What a name was assigned last before it is used here; any other expression as it is."""
        if not isinstance(node, ast.Name):
            return node
        self._left -= 1
        if (line := self.anywhere.get(node.id, self.anywhere.get(EVERY))) is not None:
            raise NotRead(f"`{node.id}` may be changed at any time by line {line}")
        scopes = self.scopes(node)
        for scope in scopes:
            found = [one for one in self.names.get(node.id, []) if one.place.scope is scope]
            before = [one for one in found if one.line < node.lineno]
            if not before and scope is not None and node.id in _parameters(scope):
                return self.resolved(self._argument(scope, node))
            if found and scope is None and scopes[0] is not None:  # a function is called later than it is defined
                before = found if len(found) == 1 or before == found else []
            if found:
                return self._last(node, before)
        raise self.not_read(node)

    def _last(self, node: ast.Name, before: list[Assigned]) -> ast.expr:
        if not before or before[-1].value is None or self._left < 0:
            raise self.not_read(node)
        last, block = before[-1], before[-1].place.block
        if block is not None and not block.first <= node.lineno <= block.last:
            raise NotRead(f"`{node.id}` depends on the condition of line {block.line}")
        return self.resolved(last.value) if last.value is not None else node

    def scopes(self, node: ast.expr) -> list[Function | None]:
        """The functions that a name is in, the innermost first, and None for the file."""
        return [*self._scopes.get(node, []), None]

    def changes(self, node: ast.Name, attribute: str = "") -> str:
        """Why the object of a name may differ from what it was made as; empty if it does not. attribute: the one of
        interest; empty if a change by the name itself, in its own function, is known already."""
        names = self.sharing.names(node.id)
        self._left -= (len(names) + len(self.attributes)) // 20
        for one in self.attributes:
            own = one.name == node.id and one.place.scope is self.scopes(node)[0]
            if one.name in names and (one.attribute in (attribute, EVERY) if attribute else not own):
                return f"`{node.id}{f'.{attribute}' if attribute else ''}` is changed in line {one.line}"
        return self.sharing.changes(node.id)

    def _argument(self, function: Function, node: ast.Name) -> ast.expr:
        """What a parameter is given by the one call of its function."""
        found = [call for call in calls(self.tree) if isinstance(call.func, ast.Name) and call.func.id == function.name]
        if len(found) != 1 or any(isinstance(argument, ast.Starred) for argument in found[0].args):
            raise self.not_read(node)
        names = _parameters(function)
        given = dict(zip(names, found[0].args, strict=False)) | {k.arg: k.value for k in found[0].keywords if k.arg}
        defaults = function.args.defaults
        positional = names[: len(function.args.posonlyargs) + len(function.args.args)]
        given = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True)) | given
        if node.id not in given:
            raise self.not_read(node)
        return given[node.id]

    def not_read(self, node: ast.expr) -> NotRead:
        """The error that names an expression."""
        text = " ".join(ast.unparse(node).split())
        return NotRead(f"`{text[:60]}{'...' if len(text) > 60 else ''}` (line {node.lineno}) is not evaluated")

    def or_unread(self, node: ast.expr, read: Callable[[ast.expr], Any]) -> Any:
        """What `read` gives, or an Unread that says why it gives nothing."""
        try:
            return read(node)
        except NotRead as error:
            return Unread(str(error))


def _is_mutable(made: ast.expr) -> bool:
    is_call = isinstance(made, ast.Call) and ast.unparse(made.func) in ("dict", "list")
    return is_call or isinstance(made, ast.Dict | ast.List | ast.Set)


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

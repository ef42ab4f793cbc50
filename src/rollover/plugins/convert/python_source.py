"""Evaluates plain expressions of a Python file without running it.

Supports literals, arithmetic, f-strings, assigned names, arguments of functions with one call, and defaults of
argparse, dataclasses and `os.environ.get`. Independent of the system.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable
from typing import Any

from rollover.plugins.convert.mapping import Unknown
from rollover.plugins.convert.python_definitions import (
    EVERY,
    Binding,
    Definitions,
    Function,
    calls,
    mutations,
    name_of,
)

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_PLAIN_CALLS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "dict": dict, "list": list}
_MOST_CHARS = 1 << 16  # of a text, and items of a list, as references multiply
_MOST_VALUES = 100_000  # evaluated ones
_LARGEST = 1 << 63


class NotEvaluated(ValueError):
    """An expression that cannot be evaluated."""


def parse_python(text: str) -> ast.Module:
    """Parse Python. ValueError for invalid or too deeply nested text."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"it is no Python: {error.msg} (line {error.lineno})") from error
    except (MemoryError, RecursionError):
        raise ValueError("what it says is nested too deeply") from None


class PythonSource(Definitions):
    """Values of the expressions of a file."""

    def __post_init__(self) -> None:
        self._left = _MOST_VALUES
        self._scopes: dict[ast.AST, list[Function]] = {}
        super().__post_init__()
        self.defaults = Defaults(self)
        for function in [node for node in ast.walk(self.tree) if isinstance(node, Function)]:
            for inner in ast.walk(function):
                if inner is not function and isinstance(inner, ast.Name):
                    self._scopes.setdefault(inner, []).insert(0, function)

    # Values

    def value(self, node: ast.expr) -> Any:  # noqa: C901 - one case for each expression
        """Evaluate an expression. NotEvaluated names the part that cannot be."""
        self._left -= 1
        if self._left < 0:
            raise NotEvaluated("the script has too many values to be read")
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            return {self.value(k): self.value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
        if isinstance(node, ast.Name):
            made = self.resolve(node)
            if _is_mutable(made) and (why := self.changes(node)):
                raise NotEvaluated(why)
            return self.value(made)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            inner = self.value(node.operand)
            return not inner if isinstance(node.op, ast.Not) else -inner
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._operate(node, self.value(node.left), self.value(node.right))
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
            return self._call_plain(node)
        found, value = self._environment_value(node)
        if found:
            return value
        if (other := self.defaults.default(node)) is not None:
            return self.value(other)
        if isinstance(node, ast.Subscript):
            try:
                return self.value(node.value)[self.value(node.slice)]
            except (TypeError, LookupError):
                raise self.not_evaluated(node) from None
        raise self.not_evaluated(node)

    def _operate(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        """Compute within bounds: 9**9**9 would not end, and 'a' * 10**12 would exhaust memory."""
        numbers = all(isinstance(value, int | float) for value in (left, right))
        too_large = isinstance(node.op, ast.Pow) and abs(right if numbers else 0) > 64
        if not numbers and isinstance(node.op, ast.Mult):
            lengths = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
            too_large = all(isinstance(value, int) for value in lengths) and lengths[0] * lengths[1] > _MOST_CHARS
        if too_large or not numbers and not isinstance(node.op, ast.Add | ast.Mult):
            raise self.not_evaluated(node)
        try:
            value = _OPERATORS[type(node.op)](left, right)
        except (TypeError, ValueError, ArithmeticError):
            raise self.not_evaluated(node) from None
        return self._bounded(node, value)

    def _bounded(self, node: ast.expr, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= _LARGEST or isinstance(value, complex):
            raise self.not_evaluated(node)
        if isinstance(value, str | list) and len(value) > _MOST_CHARS:
            raise NotEvaluated(f"line {node.lineno} makes more than {_MOST_CHARS:,} characters or items")
        return value

    def _call_plain(self, node: ast.Call) -> Any:
        if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
            raise self.not_evaluated(node)
        try:
            keywords = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
            return _PLAIN_CALLS[ast.unparse(node.func)](*map(self.value, node.args), **keywords)
        except (TypeError, ValueError) as error:
            raise (error if isinstance(error, NotEvaluated) else self.not_evaluated(node)) from None

    def _environment_value(self, node: ast.expr) -> tuple[bool, Any]:
        """Return whether it reads the environment, and the value."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv", "getenv"):
            name = str(self.value(node.args[0])) if node.args else ""
            default = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords), None)
            if name in os.environ:
                return True, os.environ[name]
            return True, self.value(default) if default is not None else None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            name = str(self.value(node.slice))
            if name not in os.environ:
                raise NotEvaluated(f"{name} is not in the environment: `{name}=... rollover convert FILE`")
            return True, os.environ[name]
        return False, None

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the last assignment to a name before this use; any other expression unchanged."""
        if not isinstance(node, ast.Name):
            return node
        self._left -= 1
        if (line := self.anywhere.get(node.id, self.anywhere.get(EVERY))) is not None:
            raise NotEvaluated(f"`{node.id}` may be changed at any time by line {line}")
        scopes = self.scopes(node)
        for scope in scopes:
            found = [one for one in self.names.get(node.id, []) if one.location.scope is scope]
            before = [one for one in found if one.line < node.lineno]
            if not before and scope is not None and node.id in _parameters(scope):
                return self.resolve(self._argument(scope, node))
            if found and scope is None and scopes[0] is not None:  # a function is called later than it is defined
                before = found if len(found) == 1 or before == found else []
            if found:
                return self._last_binding(node, before)
        raise self.not_evaluated(node)

    def _last_binding(self, node: ast.Name, before: list[Binding]) -> ast.expr:
        if not before or before[-1].value is None or self._left < 0:
            raise self.not_evaluated(node)
        last, block = before[-1], before[-1].location.block
        if block is not None and not block.first <= node.lineno <= block.last:
            raise NotEvaluated(f"`{node.id}` depends on the condition of line {block.line}")
        return self.resolve(last.value) if last.value is not None else node

    def scopes(self, node: ast.expr) -> list[Function | None]:
        """Return the enclosing functions, innermost first, and None for the file."""
        return [*self._scopes.get(node, []), None]

    def changes(self, node: ast.Name, attribute: str = "") -> str:
        """Return why the object of a name may have changed since it was created; empty if not.

        attribute: check that one only; empty: ignore changes by the name itself in its own function.
        """
        names = self.aliases.names(node.id)
        self._left -= (len(names) + len(self.attributes)) // 20
        for one in self.attributes:
            own = one.name == node.id and one.location.scope is self.scopes(node)[0]
            if one.name in names and (one.attribute in (attribute, EVERY) if attribute else not own):
                return f"`{node.id}{f'.{attribute}' if attribute else ''}` is changed in line {one.line}"
        return self.aliases.changes(node.id)

    def _argument(self, function: Function, node: ast.Name) -> ast.expr:
        """Return the argument of a parameter in the only call of its function."""
        found = [call for call in calls(self.tree) if isinstance(call.func, ast.Name) and call.func.id == function.name]
        if len(found) != 1 or any(isinstance(argument, ast.Starred) for argument in found[0].args):
            raise self.not_evaluated(node)
        names = _parameters(function)
        given = dict(zip(names, found[0].args, strict=False)) | {k.arg: k.value for k in found[0].keywords if k.arg}
        defaults = function.args.defaults
        positional = names[: len(function.args.posonlyargs) + len(function.args.args)]
        given = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True)) | given
        if node.id not in given:
            raise self.not_evaluated(node)
        return given[node.id]

    def not_evaluated(self, node: ast.expr) -> NotEvaluated:
        """Return the error that names an expression."""
        text = " ".join(ast.unparse(node).split())
        return NotEvaluated(f"`{text[:60]}{'...' if len(text) > 60 else ''}` (line {node.lineno}) is not evaluated")

    def or_unknown(self, node: ast.expr, read: Callable[[ast.expr], Any]) -> Any:
        """Return the result of `read`, or Unknown with the reason."""
        try:
            return read(node)
        except NotEvaluated as error:
            return Unknown(str(error))


def _is_mutable(made: ast.expr) -> bool:
    is_call = isinstance(made, ast.Call) and ast.unparse(made.func) in ("dict", "list")
    return is_call or isinstance(made, ast.Dict | ast.List | ast.Set)


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


# Defaults

_PARSES = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
_FLAGS = ("return_remaining_strings", "fail_with_unknown_args", "separate_remaining_strings")
_PARSERS = ("ArgumentParser", "HfArgumentParser", "TrlParser")
_FIELDS = ("field", "Field")
_TYPES = {"int": int, "float": float, "str": str}


class Defaults:
    """Defaults of command lines and classes: the values of `args.name` in one source."""

    def __init__(self, source: PythonSource) -> None:
        self._source = source
        self._parsers = [call for call in calls(source.tree) if name_of(call) in _PARSERS]

    def default(self, node: ast.expr) -> ast.expr | None:
        """Return the expression of an attribute's value; None for any other expression."""
        if not isinstance(node, ast.Attribute):
            return None
        owner = node.value
        if isinstance(owner, ast.Name):
            if owner.id in self._source.classes:
                return self._class_default(self._source.classes[owner.id], node)
        made = self._origin(owner)
        if isinstance(owner, ast.Name) and (why := self._source.changes(owner, node.attr)):
            raise NotEvaluated(why)
        if isinstance(made, ast.Call) and name_of(made) in self._source.classes:
            given = {keyword.arg: keyword.value for keyword in made.keywords}
            if made.args or None in given:
                return None
            return self._class_default(self._source.classes[name_of(made)], node, given.get(node.attr))
        if isinstance(made, ast.Call) and name_of(made) in ("SimpleNamespace", "Namespace"):
            return next((k.value for k in made.keywords if k.arg == node.attr), None)
        if (found := self._source.classes.get(self.parsed_name(made))) is not None:
            return self._class_default(found, node)
        if self._is_parsed(made):
            return self._argparse_default(node)
        return None

    def _origin(self, node: ast.expr) -> ast.expr:
        """Return the call that creates an object, or its item; follows functions of the file."""
        made = self._source.resolve(node)
        for _ in range(5):
            if not (isinstance(made, ast.Call) and isinstance(made.func, ast.Name)):
                break
            function = self._source.functions.get(made.func.id)
            returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)] if function else []
            if len(returned) != 1 or returned[0] is None:
                break
            made = self._source.resolve(returned[0])
        return made

    # Command lines

    def _is_parsed(self, made: ast.expr) -> bool:
        call = made.value if isinstance(made, ast.Subscript) else made
        if not (isinstance(call, ast.Call) and name_of(call) in _PARSES[:2]):
            return False
        if call.keywords or [ast.unparse(argument) for argument in call.args] not in ([], ["sys.argv[1:]"]):
            raise self._source.not_evaluated(call)
        return True

    def _argparse_default(self, node: ast.Attribute) -> ast.expr | None:
        if len(self._parsers) != 1:
            raise NotEvaluated(f"`{ast.unparse(node)}`: {len(self._parsers)} parsers are in the file; one is read")
        sets = [call for call in calls(self._source.tree) if name_of(call) == "set_defaults"]
        given = [k.value for call in sets for k in call.keywords if k.arg in (node.attr, None)]
        adds = [call for call in calls(self._source.tree) if name_of(call) == "add_argument"]
        adds = [call for call in adds if _destination(call) == node.attr]
        if len(given) > 1 or len(adds) > 1 or any(k.arg is None for call in sets for k in call.keywords):
            raise NotEvaluated(f"`{ast.unparse(node)}` has several defaults")
        if given:
            return given[0]
        return self._default(adds[0], node) if adds else None

    def _default(self, call: ast.Call, node: ast.Attribute) -> ast.expr:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        flag = ast.unparse(call.args[0]).strip("'\"")
        required = given.get("required")
        optional = flag.startswith("-") or ast.unparse(given.get("nargs", ast.Constant(None))) in ("'?'", "'*'")
        if not optional or required is not None and self._source.value(required):
            raise NotEvaluated(
                f"`{flag}` (line {call.lineno}) is given on the command line: write its value in its place"
            )
        action = given.get("action")
        if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            return given.get("default", _constant(action.value == "store_false", node))
        default = given.get("default", _constant(None, node))
        kind = ast.unparse(given["type"]) if "type" in given else ""
        value = self._source.value(default)
        if kind and isinstance(value, str):  # argparse converts texts only
            if kind not in _TYPES:
                raise NotEvaluated(f"`{flag}` (line {call.lineno}): its type {kind} is not evaluated")
            try:
                return _constant(_TYPES[kind](value), node)
            except ValueError:
                raise NotEvaluated(f"`{flag}` (line {call.lineno}): {value!r} is no {kind}") from None
        return default

    def parsed_name(self, made: ast.expr) -> str:
        """Return the class name of an object that a parser of dataclasses creates; "" for any other."""
        index = made.slice.value if isinstance(made, ast.Subscript) and isinstance(made.slice, ast.Constant) else 0
        call = made.value if isinstance(made, ast.Subscript) else made
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and name_of(call) in _PARSES[2:]):
            return ""
        if call.args or any(keyword.arg not in _FLAGS for keyword in call.keywords):
            return ""  # explicit arguments
        parser = self._source.resolve(call.func.value)
        if not (isinstance(parser, ast.Call) and name_of(parser) in _PARSERS):
            return ""
        named = parser.args[0] if parser.args else next((k.value for k in parser.keywords), None)
        items = named.elts if isinstance(named, ast.Tuple | ast.List) else [named]
        fits = isinstance(index, int) and index < len(items)
        one = items[index] if fits and isinstance(index, int) else None
        return ast.unparse(one).rpartition(".")[2] if one is not None else ""

    # Classes

    def fields(self, made: ast.ClassDef) -> dict[str, ast.expr]:
        """Return the defaults of a class and of its bases in the file."""
        found: dict[str, ast.expr] = {}
        for statement in [statement for one in reversed(self._with_bases(made)) for statement in one.body]:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            for target in targets:
                if (
                    isinstance(target, ast.Name)
                    and value is not None
                    and (default := _field_default(value)) is not None
                ):
                    found[target.id] = default
        return found

    def _class_default(self, made: ast.ClassDef, node: ast.Attribute, given: ast.expr | None = None) -> ast.expr | None:
        """Return the value of an attribute. given: the constructor's argument."""
        default = given or self.fields(made).get(node.attr)
        family = self._with_bases(made)
        names = {"self", "cls", *(one.name for one in family)}
        pairs = [pair for one in family for pair in mutations(one)]
        pairs += [(one.name, one.attribute) for one in self._source.attributes if one.name != "self"]
        sets = [attribute for name, attribute in pairs if name in names and attribute in (node.attr, EVERY)]
        if not sets:
            return default
        own = [
            statement.value
            for method in made.body
            if isinstance(method, ast.FunctionDef) and method.name == "__init__"
            for statement in method.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == f"self.{node.attr}"
        ]
        if default is not None or len(sets) > 1 or len(own) != 1:
            raise NotEvaluated(f"`{ast.unparse(node)}` is set by {made.name} itself (line {made.lineno})")
        return own[0]

    def _with_bases(self, made: ast.ClassDef) -> list[ast.ClassDef]:
        """Return a class and its bases in the file."""
        found = [made]
        for one in found:
            named = [self._source.classes.get(ast.unparse(base).rpartition(".")[2]) for base in one.bases]
            found += [base for base in named if base is not None and base not in found]
        return found


def _field_default(value: ast.expr) -> ast.expr | None:
    """Return the default of a class field; None if it has none."""
    if not (isinstance(value, ast.Call) and name_of(value) in _FIELDS):
        return value
    given: dict[Any, ast.expr] = {keyword.arg: keyword.value for keyword in value.keywords}
    factory = given.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body
    if isinstance(factory, ast.Name) and factory.id in ("list", "dict"):
        return ast.copy_location(ast.Call(factory, [], []), value)
    return given.get("default", value.args[0] if value.args else None)


def _destination(call: ast.Call) -> str:
    dest = next((keyword.value for keyword in call.keywords if keyword.arg == "dest"), None)
    if isinstance(dest, ast.Constant):
        return str(dest.value)
    names = [str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)]
    long = [name for name in names if name.startswith("--")] or names
    return long[0].lstrip("-").replace("-", "_") if long else ""


def _constant(value: Any, node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Constant(value), node)

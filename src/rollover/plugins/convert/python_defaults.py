"""Defaults of a Python file: of argparse, and of classes whose attributes are settings (dataclasses too)."""

from __future__ import annotations

import ast
from typing import Any

from rollover.plugins.convert.python_definitions import EVERY, calls, changed, name_of
from rollover.plugins.convert.python_source import NotRead, PythonSource

_PARSES = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
_FLAGS = ("return_remaining_strings", "fail_with_unknown_args", "separate_remaining_strings")
_PARSERS = ("ArgumentParser", "HfArgumentParser", "TrlParser")
_FIELDS = ("field", "Field")
_TYPES = {"int": int, "float": float, "str": str}


class Defaults:
    """Reads `args.name` of one source, in which it is to be set as `further`."""

    def __init__(self, source: PythonSource) -> None:
        self._source = source
        self._parsers = [call for call in calls(source.tree) if name_of(call) in _PARSERS]

    def __call__(self, node: ast.expr) -> ast.expr | None:
        """The expression that an attribute's value is; None for any other expression."""
        if not isinstance(node, ast.Attribute):
            return None
        owner = node.value
        if isinstance(owner, ast.Name):
            if owner.id in self._source.classes:
                return self._of_class(self._source.classes[owner.id], node)
        made = self._made(owner)
        if isinstance(owner, ast.Name) and (why := self._source.changes(owner, node.attr)):
            raise NotRead(why)
        if isinstance(made, ast.Call) and name_of(made) in self._source.classes:
            given = {keyword.arg: keyword.value for keyword in made.keywords}
            if made.args or None in given:
                return None
            return self._of_class(self._source.classes[name_of(made)], node, given.get(node.attr))
        if isinstance(made, ast.Call) and name_of(made) in ("SimpleNamespace", "Namespace"):
            return next((k.value for k in made.keywords if k.arg == node.attr), None)
        if (found := self._source.classes.get(self.parsed_name(made))) is not None:
            return self._of_class(found, node)
        if self._is_parsed(made):
            return self._of_argparse(node)
        return None

    def _made(self, node: ast.expr) -> ast.expr:
        """What makes an object: a call, or the item of one; of a function of the file, what that returns."""
        made = self._source.resolved(node)
        for _ in range(5):
            if not (isinstance(made, ast.Call) and isinstance(made.func, ast.Name)):
                break
            function = self._source.functions.get(made.func.id)
            returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)] if function else []
            if len(returned) != 1 or returned[0] is None:
                break
            made = self._source.resolved(returned[0])
        return made

    # Command lines

    def _is_parsed(self, made: ast.expr) -> bool:
        call = made.value if isinstance(made, ast.Subscript) else made
        if not (isinstance(call, ast.Call) and name_of(call) in _PARSES[:2]):
            return False
        if call.keywords or [ast.unparse(argument) for argument in call.args] not in ([], ["sys.argv[1:]"]):
            raise self._source.not_read(call)
        return True

    def _of_argparse(self, node: ast.Attribute) -> ast.expr | None:
        if len(self._parsers) != 1:
            raise NotRead(f"`{ast.unparse(node)}`: {len(self._parsers)} parsers are in the file; one is read")
        sets = [call for call in calls(self._source.tree) if name_of(call) == "set_defaults"]
        given = [k.value for call in sets for k in call.keywords if k.arg in (node.attr, None)]
        adds = [call for call in calls(self._source.tree) if name_of(call) == "add_argument"]
        adds = [call for call in adds if _destination(call) == node.attr]
        if len(given) > 1 or len(adds) > 1 or any(k.arg is None for call in sets for k in call.keywords):
            raise NotRead(f"`{ast.unparse(node)}` has several defaults")
        if given:
            return given[0]
        return self._default(adds[0], node) if adds else None

    def _default(self, call: ast.Call, node: ast.Attribute) -> ast.expr:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        flag = ast.unparse(call.args[0]).strip("'\"")
        required = given.get("required")
        optional = flag.startswith("-") or ast.unparse(given.get("nargs", ast.Constant(None))) in ("'?'", "'*'")
        if not optional or required is not None and self._source.value(required):
            raise NotRead(f"`{flag}` (line {call.lineno}) is given on the command line: write its value in its place")
        action = given.get("action")
        if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            return given.get("default", _constant(action.value == "store_false", node))
        default = given.get("default", _constant(None, node))
        kind = ast.unparse(given["type"]) if "type" in given else ""
        value = self._source.value(default)
        if kind and isinstance(value, str):  # argparse converts texts only
            if kind not in _TYPES:
                raise NotRead(f"`{flag}` (line {call.lineno}): its type {kind} is not evaluated")
            try:
                return _constant(_TYPES[kind](value), node)
            except ValueError:
                raise NotRead(f"`{flag}` (line {call.lineno}): {value!r} is no {kind}") from None
        return default

    def parsed_name(self, made: ast.expr) -> str:
        """The name of the class that an object is of, which a parser of dataclasses makes; "" for any other."""
        index = made.slice.value if isinstance(made, ast.Subscript) and isinstance(made.slice, ast.Constant) else 0
        call = made.value if isinstance(made, ast.Subscript) else made
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and name_of(call) in _PARSES[2:]):
            return ""
        if call.args or any(keyword.arg not in _FLAGS for keyword in call.keywords):
            return ""  # its words are given
        parser = self._source.resolved(call.func.value)
        if not (isinstance(parser, ast.Call) and name_of(parser) in _PARSERS):
            return ""
        named = parser.args[0] if parser.args else next((k.value for k in parser.keywords), None)
        items = named.elts if isinstance(named, ast.Tuple | ast.List) else [named]
        fits = isinstance(index, int) and index < len(items)
        one = items[index] if fits and isinstance(index, int) else None
        return ast.unparse(one).rpartition(".")[2] if one is not None else ""

    # Classes

    def fields(self, made: ast.ClassDef) -> dict[str, ast.expr]:
        """The defaults of a class and of its bases in the file."""
        found: dict[str, ast.expr] = {}
        for statement in [statement for one in reversed(self._family(made)) for statement in one.body]:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            for target in targets:
                if isinstance(target, ast.Name) and value is not None and (default := _of_field(value)) is not None:
                    found[target.id] = default
        return found

    def _of_class(self, made: ast.ClassDef, node: ast.Attribute, given: ast.expr | None = None) -> ast.expr | None:
        """The value of an attribute. given: what the constructor is given for it."""
        default = given or self.fields(made).get(node.attr)
        family = self._family(made)
        names = {"self", "cls", *(one.name for one in family)}
        pairs = [pair for one in family for pair in changed(one)]
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
            raise NotRead(f"`{ast.unparse(node)}` is set by {made.name} itself (line {made.lineno})")
        return own[0]

    def _family(self, made: ast.ClassDef) -> list[ast.ClassDef]:
        """A class and its bases in the file."""
        found = [made]
        for one in found:
            named = [self._source.classes.get(ast.unparse(base).rpartition(".")[2]) for base in one.bases]
            found += [base for base in named if base is not None and base not in found]
        return found


def _of_field(value: ast.expr) -> ast.expr | None:
    """The default of a field of a class; None if it has none."""
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

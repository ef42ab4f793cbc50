"""What Python code may assign or change, whether it is understood or not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

EVERY = "*"  # stands for every attribute or item of an object
_CHANGING = ("append", "extend", "insert", "update", "pop", "remove", "clear", "setdefault", "sort", "reverse", "add",
             "discard", "popitem", "__setattr__", "__setitem__")  # fmt: skip
# They are given an object, and do not change it.
_READING = ("print", "pprint", "str", "repr", "vars", "asdict", "dict", "list", "tuple", "len", "isinstance", "hasattr",
            "getattr", "dumps", "dump", "info", "debug", "warning", "log", "init", "copy", "deepcopy", "replace", "sum",
            "setattr", "delattr", "sorted", "enumerate", "zip", "range", "items", "keys", "values", "get", "to_dict",
            "to_json_string", "to_sanitized_dict", "index", "count", "type", "id", "max", "min",
            "any", "all", "set", "save_pretrained", "from_pretrained", "load_dataset")  # fmt: skip


def bound(node: ast.AST) -> Iterator[str]:
    """The names that are assigned anywhere in it, but for those of a comprehension."""
    inner = {part for each in ast.walk(node) if isinstance(each, ast.comprehension) for part in ast.walk(each.target)}
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load) and each not in inner:
            yield each.id
        elif isinstance(each, ast.MatchAs | ast.MatchStar) and each.name:
            yield each.name
        elif isinstance(each, ast.MatchMapping) and each.rest:
            yield each.rest


def changed(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names whose object is changed in place, each with the attribute that is changed, or EVERY."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load):
            yield from _root(each)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in _CHANGING:
            yield from _root(each.func.value)
            yield from [pair for argument in each.args[:1] for pair in _root(argument) if "__" in each.func.attr]
        elif isinstance(each, ast.Call) and _callee(each) in ("setattr", "delattr") and len(each.args) > 1:
            named = each.args[1].value if isinstance(each.args[1], ast.Constant) else EVERY
            yield from ((name, str(named)) for name, _ in _root(each.args[0]))


def _root(node: ast.expr) -> Iterator[tuple[str, str]]:
    """The name that an expression begins with, and the attribute behind it."""
    attribute = EVERY
    while not isinstance(node, ast.Name):
        attribute = EVERY
        if isinstance(node, ast.Attribute):
            attribute = EVERY if node.attr == "__dict__" else node.attr
            node = node.value
        elif isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call) and _callee(node) == "vars" and node.args:
            node = node.args[0]
        else:
            return
    yield node.id, attribute


class Sharing:
    """Which names of a file may be the same object, and what else is given it. By name, whatever the scope."""

    def __init__(self, tree: ast.Module) -> None:
        self._links: dict[str, set[str]] = {}
        self._given: dict[str, tuple[str, int]] = {}
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._link(_object(target), _object(node.value))
            elif isinstance(node, ast.Call):
                self._call(node, functions)

    def _link(self, one: str, other: str) -> None:
        if one and other:
            self._links.setdefault(one, set()).add(other)
            self._links.setdefault(other, set()).add(one)

    def _call(self, call: ast.Call, functions: dict[str, ast.FunctionDef]) -> None:
        callee = _callee(call)
        reads = callee in _READING or callee[:1].isupper() and callee not in functions
        if isinstance(call.func, ast.Attribute) and (owner := _object(call.func.value)) and callee not in _READING:
            self._given.setdefault(owner, (callee, call.lineno))
        given: list[tuple[str | int, ast.expr]] = [*enumerate(call.args)]
        given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        for place, argument in given:
            if not (name := _object(argument)) or reads:
                continue
            function = functions.get(callee) if isinstance(call.func, ast.Name) else None
            names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)] if function else []
            if isinstance(place, int) and place < len(names):
                self._link(name, names[place])
            elif isinstance(place, str) and function is not None:
                self._link(name, place)
            else:
                self._given.setdefault(name, (callee, call.lineno))

    def names(self, name: str) -> set[str]:
        """The names that may be the same object, with the name itself."""
        found, left = {name}, [name]
        while left:
            new = self._links.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    def changes(self, name: str) -> str:
        """Why what is called with the object may change it; empty if nothing may."""
        given = next((self._given[one] for one in sorted(self.names(name)) if one in self._given), None)
        return f"`{name}` may be changed by {given[0]} (line {given[1]})" if given else ""


def _callee(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _object(node: ast.expr) -> str:
    """The name of an object, or of what `vars` makes of it."""
    if isinstance(node, ast.Call) and _callee(node) == "vars" and node.args:
        node = node.args[0]
    return node.id if isinstance(node, ast.Name) else ""

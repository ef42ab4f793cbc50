"""Assignments, functions, classes and imports of a Python file, and possible mutations. Evaluates nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

Function = ast.FunctionDef | ast.AsyncFunctionDef
EVERY = "*"  # stands for every attribute or item of an object
_CHANGING = ("append", "extend", "insert", "update", "pop", "remove", "clear", "setdefault", "sort", "reverse", "add",
             "discard", "popitem", "__setattr__", "__setitem__")  # fmt: skip
# Calls that do not change their arguments.
_READING = ("print", "pprint", "str", "repr", "vars", "asdict", "dict", "list", "tuple", "len", "isinstance", "hasattr",
            "getattr", "dumps", "dump", "info", "debug", "warning", "log", "init", "copy", "deepcopy", "replace", "sum",
            "setattr", "delattr", "sorted", "enumerate", "zip", "range", "items", "keys", "values", "get", "to_dict",
            "to_json_string", "to_sanitized_dict", "index", "count", "type", "id", "max", "min",
            "any", "all", "set", "save_pretrained", "from_pretrained", "load_dataset")  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Statements that may run never or repeatedly. line: of the condition. first, last: lines of the statements."""

    line: int
    first: int
    last: int


@dataclass(frozen=True)
class Location:
    """Location of a statement. block: its condition. scope: its function. at_import: whether an import runs it."""

    block: Block | None = None
    scope: Function | None = None
    at_import: bool = True


@dataclass
class Binding:
    """Value of a name from a line on; None if unknown."""

    line: int
    value: ast.expr | None
    location: Location


@dataclass
class AttributeBinding(Binding):
    """Value of an attribute of a name, or of EVERY attribute."""

    name: str
    attribute: str


@dataclass
class Definitions:
    """The definitions of a syntax tree.

    names: assignments by name, in order. attributes: assignments to attributes. imported: name -> module:name.
    called_at_import: last names of functions that an import calls. anywhere: names that may change at any time, and
    the line that changes them. aliases: names that may refer to one object.
    """

    tree: ast.Module
    names: dict[str, list[Binding]] = field(default_factory=dict)
    attributes: list[AttributeBinding] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    called_at_import: set[str] = field(default_factory=set)
    anywhere: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aliases = Aliases(self.tree)
        self._collect(self.tree.body, Location())

    def _collect(self, body: list[ast.stmt], location: Location) -> None:  # noqa: C901 - one case for each statement
        for statement in body:
            if isinstance(statement, Function):
                self.functions[statement.name] = statement
                self._collect(statement.body, Location(scope=statement, at_import=False))
            elif isinstance(statement, ast.ClassDef):
                self.classes[statement.name] = statement
            elif isinstance(statement, ast.ImportFrom | ast.Import):
                self._import(statement, location)
            elif isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
                self._collect(statement.body, replace(location, at_import=False))
                self._branches(statement, [statement.orelse], location)
            elif isinstance(statement, ast.With | ast.AsyncWith):
                for item in statement.items:
                    self._changes(item, statement.lineno, location)
                self._collect(statement.body, location)
            elif isinstance(statement, ast.Try | ast.TryStar):
                if all(handler.body and isinstance(handler.body[-1], ast.Raise) for handler in statement.handlers):
                    self._collect([*statement.body, *statement.orelse], location)
                    bodies = []
                else:
                    bodies = [statement.body, statement.orelse]
                for handler in statement.handlers:
                    names = [handler.name] if handler.name else []
                    self._invalidate(names, handler.lineno, replace(location, block=None))
                    bodies.append(handler.body)
                self._branches(statement, bodies, location)
                self._collect(statement.finalbody, location)
            elif isinstance(statement, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Match):
                self._compound(statement, location)
            else:
                self._statement(statement, location)
                if location.at_import:
                    self.called_at_import |= {name_of(call) for call in calls(statement)}

    def _compound(self, statement: ast.If | ast.For | ast.AsyncFor | ast.While | ast.Match, location: Location) -> None:
        """Collect what branches and loops assign, and their conditions."""
        if isinstance(statement, ast.Match):
            heads: list[ast.AST] = [
                statement.subject,
                *(part for c in statement.cases for part in (c.pattern, c.guard) if part),
            ]
            bodies = [case.body for case in statement.cases]
        else:
            loops = isinstance(statement, ast.For | ast.AsyncFor)
            heads = [statement.target, statement.iter] if loops else [statement.test]
            bodies = [statement.body, statement.orelse]
        for head in heads:
            self._changes(head, statement.lineno, location)
        self._branches(statement, bodies, location)

    def _branches(self, statement: ast.stmt, bodies: list[list[ast.stmt]], location: Location) -> None:
        for body in bodies:
            if body:
                inner = Block(statement.lineno, body[0].lineno, body[-1].end_lineno or body[-1].lineno)
                self._collect(body, replace(location, block=inner))

    def _import(self, statement: ast.Import | ast.ImportFrom, location: Location) -> None:
        names = [(a.asname or a.name).partition(".")[0] for a in statement.names]
        if isinstance(statement, ast.ImportFrom):
            self.imported |= {a.asname or a.name: f"{statement.module}:{a.name}" for a in statement.names}
        self._invalidate(list(self.names) if names == ["*"] else names, statement.lineno, location)

    def _statement(self, statement: ast.stmt, location: Location) -> None:
        if isinstance(statement, ast.Global | ast.Nonlocal):
            self.anywhere |= dict.fromkeys(statement.names, statement.lineno)
        if any(isinstance(c.func, ast.Name) and c.func.id in ("exec", "globals") for c in calls(statement)):
            self.anywhere[EVERY] = statement.lineno
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            self._changes(statement, statement.lineno, location)
            return
        value = statement.value
        if value is not None:
            self._changes(value, statement.lineno, location)
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            exact = not any(isinstance(item, ast.Starred | ast.Tuple | ast.List) for item in items)
            for i, item in enumerate(items):
                one = value if item is target or value is None else item_of(value, i) if exact else None
                if isinstance(item, ast.Name):
                    self.names.setdefault(item.id, []).append(Binding(statement.lineno, one, location))
                elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.attr != "__dict__":
                    self.attributes.append(AttributeBinding(statement.lineno, one, location, item.value.id, item.attr))
                else:
                    self._changes(item, statement.lineno, location)

    def _changes(self, node: ast.AST, line: int, location: Location) -> None:
        """Forget what an expression or statement may assign."""
        self._invalidate(bound(node), line, location)
        for name, attribute in mutations(node):
            self.attributes.append(AttributeBinding(line, None, location, name, attribute))
            if attribute == EVERY:
                self._invalidate([name], line, location)

    def _invalidate(self, names: Iterable[str], line: int, location: Location) -> None:
        for name in names:
            self.names.setdefault(name, []).append(Binding(line, None, location))


def item_of(value: ast.expr, index: int) -> ast.expr:
    """Return the item `index` of an unpacked expression."""
    if isinstance(value, ast.Tuple | ast.List) and not any(isinstance(item, ast.Starred) for item in value.elts):
        return value.elts[index]
    item = ast.Subscript(value, ast.Constant(index), ast.Load())
    return ast.fix_missing_locations(ast.copy_location(item, value))


def name_of(call: ast.Call) -> str:
    """Return the last part of the called name."""
    return ast.unparse(call.func).rpartition(".")[2]


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield all calls in a tree."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


# Mutations


def bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node assigns, except those of comprehensions."""
    inner = {part for each in ast.walk(node) if isinstance(each, ast.comprehension) for part in ast.walk(each.target)}
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load) and each not in inner:
            yield each.id
        elif isinstance(each, ast.MatchAs | ast.MatchStar) and each.name:
            yield each.name
        elif isinstance(each, ast.MatchMapping) and each.rest:
            yield each.rest


def mutations(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name, attribute or EVERY) of objects that are changed in place."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load):
            yield from _root(each)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in _CHANGING:
            yield from _root(each.func.value)
            yield from [pair for argument in each.args[:1] for pair in _root(argument) if "__" in each.func.attr]
        elif isinstance(each, ast.Call) and name_of(each) in ("setattr", "delattr") and len(each.args) > 1:
            named = each.args[1].value if isinstance(each.args[1], ast.Constant) else EVERY
            yield from ((name, str(named)) for name, _ in _root(each.args[0]))


def _root(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield the first name of an expression, and the attribute behind it."""
    attribute = EVERY
    while not isinstance(node, ast.Name):
        attribute = EVERY
        if isinstance(node, ast.Attribute):
            attribute = EVERY if node.attr == "__dict__" else node.attr
            node = node.value
        elif isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call) and name_of(node) == "vars" and node.args:
            node = node.args[0]
        else:
            return
    yield node.id, attribute


class Aliases:
    """Names of a file that may refer to one object, and calls that receive it. By name, in all scopes together."""

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
        callee = name_of(call)
        reads = callee in _READING or callee[:1].isupper() and callee not in functions
        if isinstance(call.func, ast.Attribute) and (owner := _object(call.func.value)) and callee not in _READING:
            self._given.setdefault(owner, (callee, call.lineno))
        given: list[tuple[str | int, ast.expr]] = [*enumerate(call.args)]
        given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        for key, argument in given:
            if not (name := _object(argument)) or reads:
                continue
            function = functions.get(callee) if isinstance(call.func, ast.Name) else None
            names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)] if function else []
            if isinstance(key, int) and key < len(names):
                self._link(name, names[key])
            elif isinstance(key, str) and function is not None:
                self._link(name, key)
            else:
                self._given.setdefault(name, (callee, call.lineno))

    def names(self, name: str) -> set[str]:
        """Return the names that may refer to the same object, including `name`."""
        found, left = {name}, [name]
        while left:
            new = self._links.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    def changes(self, name: str) -> str:
        """Return why a call may change the object; empty if none may."""
        given = next((self._given[one] for one in sorted(self.names(name)) if one in self._given), None)
        return f"`{name}` may be changed by {given[0]} (line {given[1]})" if given else ""


def _object(node: ast.expr) -> str:
    """Return the name of an object, also of `vars(name)`; else ""."""
    if isinstance(node, ast.Call) and name_of(node) == "vars" and node.args:
        node = node.args[0]
    return node.id if isinstance(node, ast.Name) else ""

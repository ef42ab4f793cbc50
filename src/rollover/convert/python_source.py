"""Python that is read and never run: what names are assigned, which functions are defined or imported, and the value
of an expression as far as it is plain.

Understood are literals, sums, f-strings and names that are assigned before. Knows nothing of any system.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rollover.convert.mapping import Unread

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_CHANGING = ("append", "extend", "insert", "update", "pop", "remove", "clear", "setdefault", "sort", "reverse")
_PLAIN_CALLS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "dict": dict, "list": list}


class NotRead(ValueError):
    """An expression that is not understood."""


@dataclass
class Assigned:
    """A name's value from a line on. `block`: the if or loop that it depends on."""

    line: int
    value: ast.expr | None
    block: ast.stmt | None


@dataclass
class PythonSource:
    """A file's syntax tree. names: what each was assigned, in order. attributes: name, attribute and value of each
    assignment to one. imported: name -> module:name. called_at_import: last names of what importing the file calls."""

    tree: ast.Module
    names: dict[str, list[Assigned]] = field(default_factory=dict)
    attributes: list[tuple[str, str, ast.expr]] = field(default_factory=list)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    called_at_import: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._collect(self.tree.body, None, at_import=True)

    # Values

    def value(self, node: ast.expr) -> Any:
        """What an expression is. NotRead names the part that is not understood."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            return {self.value(k): self.value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
        if isinstance(node, ast.Name):
            return self.value(self.resolved(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            inner = self.value(node.operand)
            return not inner if isinstance(node.op, ast.Not) else -inner
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            try:
                return _OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))
            except (TypeError, ArithmeticError):
                raise self.not_read(node) from None
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(part)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
            return self.value(node.value)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return node.attr  # torch.bfloat16
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _PLAIN_CALLS:
            keywords = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
            try:
                return _PLAIN_CALLS[ast.unparse(node.func)](*map(self.value, node.args), **keywords)
            except (TypeError, ValueError):
                raise self.not_read(node) from None
        raise self.not_read(node)

    def resolved(self, node: ast.expr) -> ast.expr:
        """What a name was assigned last before it is used here; any other expression as it is."""
        if not isinstance(node, ast.Name) or node.id not in self.names:
            if isinstance(node, ast.Name):
                raise self.not_read(node)
            return node
        before = [one for one in self.names[node.id] if one.line < node.lineno]
        if not before or before[-1].value is None:
            raise self.not_read(node)
        last = before[-1]
        if last.block is not None and not any(inner is node for inner in ast.walk(last.block)):
            raise NotRead(f"`{node.id}` depends on the condition of line {last.block.lineno}")
        return self.resolved(last.value) if last.value is not None else node

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

    # What is in the file

    def _collect(self, body: list[ast.stmt], block: ast.stmt | None, *, at_import: bool) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[statement.name] = statement
                self._collect(statement.body, block, at_import=False)
            elif isinstance(statement, ast.ImportFrom):
                self.imported |= {a.asname or a.name: f"{statement.module}:{a.name}" for a in statement.names}
            elif isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
                self._collect(statement.body, block, at_import=False)
            elif isinstance(statement, ast.With | ast.Try):
                self._collect(statement.body, block, at_import=at_import)
            elif isinstance(statement, ast.If | ast.For | ast.While):
                for inner in (statement.body, statement.orelse):
                    self._collect(inner, block or statement, at_import=at_import)
            else:
                self._statement(statement, block)
                if at_import:
                    self.called_at_import |= {name_of(call) for call in calls(statement)}

    def _statement(self, statement: ast.stmt, block: ast.stmt | None) -> None:
        if isinstance(statement, ast.AnnAssign):
            targets: list[ast.expr] = [statement.target]
        else:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if isinstance(target, ast.Name):
                self.names.setdefault(target.id, []).append(Assigned(statement.lineno, value, block))
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and value is not None:
                self.attributes.append((target.value.id, target.attr, value))
            elif isinstance(target, ast.Tuple):
                for item in target.elts:
                    if isinstance(item, ast.Name):
                        self.names.setdefault(item.id, []).append(Assigned(statement.lineno, None, block))
        if (name := _changed(statement)) is not None:
            self.names.setdefault(name, []).append(Assigned(statement.lineno, None, block))


def _changed(statement: ast.stmt) -> str | None:
    """The name whose value a statement changes in place: x += ..., x[...] = ..., x.append(...)."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        method = statement.value.func
        held = method.value if isinstance(method, ast.Attribute) and method.attr in _CHANGING else None
    elif isinstance(statement, ast.AugAssign):
        held = statement.target
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        held = statement.targets[0].value
    else:
        held = None
    return held.id if isinstance(held, ast.Name) else None


def name_of(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """All calls in it."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))

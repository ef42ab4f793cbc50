"""Mutants of a Python source: every single small change that one of its tests should notice.

A change is one of: a comparison with its neighbour or opposite, `and` for `or`, `+` for `-`, `*` for `/`; a condition
that is always true or always false; a `not` or a minus sign left out; a number one higher (a float doubled), True for
False; `min` for `max`, `any` for `all`, `sum` for `mean`; a sort, a reversal or a `detach`, `clamp`, `exp`, ... left
out; a keyword argument left out; a statement left out (a call, an assignment to an attribute or an element, `continue`,
`break`). Assertions, raised errors, annotations, decorators, class headers and strings are left alone. Pure:
scripts/mutation.py runs them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE = {
    ast.Lt: (["<"], ["<=", ">="]), ast.LtE: (["<="], ["<", ">"]), ast.Gt: ([">"], [">=", "<="]),
    ast.GtE: ([">="], [">", "<"]), ast.Eq: (["=="], ["!="]), ast.NotEq: (["!="], ["=="]),
    ast.Is: (["is"], ["is not"]), ast.IsNot: (["is", "not"], ["is"]),
    ast.In: (["in"], ["not in"]), ast.NotIn: (["not", "in"], ["in"]),
}  # fmt: skip
_BINARY = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean", "mean": "sum",
              "minimum": "maximum", "maximum": "minimum", "clamp_min": "clamp_max", "clamp_max": "clamp_min",
              "floor": "ceil", "ceil": "floor", "bisect_left": "bisect_right",
              "bisect_right": "bisect_left", "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like",
              "ones_like": "zeros_like"}  # fmt: skip
_LEFT_OUT_FUNCTIONS = {"sorted", "reversed", "abs", "list", "dict"}  # of one argument: `sorted(x)` is `(x)`
_LEFT_OUT_METHODS = {"detach", "clamp", "exp", "log", "abs", "copy", "clone", "float", "sqrt", "unsqueeze"}


@dataclass(frozen=True, order=True)
class Mutant:
    """`old` at the bytes from `start` of the file `path` becomes `new`."""

    path: str
    start: int
    line: int
    old: str
    new: str
    kind: str

    def apply(self, source: str) -> str:
        data = source.encode()
        end = self.start + len(self.old.encode())
        assert data[self.start : end].decode() == self.old, f"{self.path} is not the file that was read"
        return (data[: self.start] + self.new.encode() + data[end:]).decode()


def mutants(source: str, path: str) -> list[Mutant]:
    """All of one file that still compile, in order."""
    found = set(_Finder(source, path).all())
    return sorted(m for m in found if _compiles(m.apply(source)))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, source: str, path: str) -> None:
        self.path, self.data = path, source.encode()
        self.lines = [0]
        for line in self.data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.tree = ast.parse(source)

    def all(self) -> Iterator[Mutant]:
        yield from self._walk(self.tree)

    def _walk(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            return
        yield from self._of(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(
                node, ast.Call
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                words, others = _COMPARE[type(op)]
                yield from self._between(left, right, r"\s+".join(map(re.escape, words)), others, "comparison")
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, rf"\b{word}\b", [other], "and, or")
        elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            sign, other = _BINARY[type(node.op)]
            yield from self._between(node.left, node.right, re.escape(sign), [other], "arithmetic")
        elif isinstance(node, ast.AugAssign) and type(node.op) in _BINARY:
            sign, other = _BINARY[type(node.op)]
            yield from self._between(node.target, node.value, re.escape(sign + "="), [other + "="], "arithmetic")
            yield self._replace(node, "pass", "statement left out")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield self._replace(node, f"({self._text(node.operand)})", "sign left out")
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        yield from self._conditions(node)
        if self._is_removable(node):
            yield self._replace(node, "pass", "statement left out")

    def _constant(self, node: ast.Constant) -> Iterator[Mutant]:
        value = node.value
        if isinstance(value, bool):
            yield self._replace(node, str(not value), "constant")
        elif isinstance(value, int):
            yield self._replace(node, str(value + 1), "constant")
        elif isinstance(value, float):
            yield self._replace(node, repr(value * 2 if value else 1.0), "constant")

    def _call(self, node: ast.Call) -> Iterator[Mutant]:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in _FUNCTIONS and not (isinstance(function, ast.Name) and name == "sum"):
            at = self._end(function) - len(name)
            yield self._mutant(at, name, _FUNCTIONS[name], "function")
        first = node.args[0] if node.args else None
        if isinstance(function, ast.Name) and name in _LEFT_OUT_FUNCTIONS and isinstance(first, ast.expr):
            if not isinstance(first, ast.Starred | ast.GeneratorExp):
                yield self._replace(node, f"({self._text(first)})", "function left out")
            elif isinstance(first, ast.GeneratorExp) and name == "sorted":
                yield self._replace(node, f"list({self._text(first).strip('()')})", "function left out")
        if isinstance(function, ast.Attribute) and name in _LEFT_OUT_METHODS:
            yield self._replace(node, f"({self._text(function.value)})", "function left out")
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            start, end = self._start(keyword), self._end(keyword)
            rest = re.match(rb"\s*,\s*", self.data[end:])
            if rest is None and (before := re.search(rb",\s*$", self.data[:start])):
                start = before.start()
            end += len(rest[0]) if rest else 0
            yield self._mutant(start, self.data[start:end].decode(), "", "keyword left out")

    def _conditions(self, node: ast.AST) -> Iterator[Mutant]:
        tests: list[tuple[ast.expr, tuple[str, ...]]] = []
        if isinstance(node, ast.If | ast.IfExp):
            tests = [(node.test, ("True", "False"))]
        elif isinstance(node, ast.While) and not isinstance(node.test, ast.Constant):
            tests = [(node.test, ("False",))]
        elif isinstance(node, ast.comprehension):
            tests = [(test, ("True",)) for test in node.ifs]
        for test, values in tests:
            if not any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(test)):
                for value in values:
                    yield self._replace(test, value, "condition")

    @staticmethod
    def _is_removable(node: ast.AST) -> bool:
        if isinstance(node, ast.Expr):
            value = node.value.value if isinstance(node.value, ast.Await) else node.value
            return isinstance(value, ast.Call)
        if isinstance(node, ast.Assign):
            return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
        return isinstance(node, ast.Continue | ast.Break | ast.Delete)

    def _between(self, left: ast.AST, right: ast.AST, pattern: str, others: list[str], kind: str) -> Iterator[Mutant]:
        start = self._end(left)
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.data[start : self._start(right)])
        match = re.search(pattern.encode(), gap)
        if match:
            for other in others:
                yield self._mutant(start + match.start(), match[0].decode(), other, kind)

    def _replace(self, node: ast.AST, new: str, kind: str) -> Mutant:
        return self._mutant(self._start(node), self._text(node), new, kind)

    def _mutant(self, start: int, old: str, new: str, kind: str) -> Mutant:
        return Mutant(self.path, start, self.data[:start].count(b"\n") + 1, old, new, kind)

    def _text(self, node: ast.AST) -> str:
        return self.data[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1] + node.col_offset  # pyright: ignore[reportAttributeAccessIssue]

    def _end(self, node: ast.AST) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset  # pyright: ignore[reportAttributeAccessIssue]

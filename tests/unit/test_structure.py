"""Structure: no circle of files, no private name read by tests, no field twice, no dead private function.

The tables of exceptions only shrink: an entry that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from test_imports import FILES, PACKAGE, name_of

TESTS = Path(__file__).parents[1]
CIRCLES: set[frozenset[str]] = set()
# File of tests: private names of the product that it reads.
PRIVATE: dict[str, set[str]] = {
    "unit/models/test_smollm2.py": {"_convert"},
}


@functools.lru_cache(1)
def tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(tree(path))


def file_of(module: str) -> str | None:
    """The file of a module, or of the module that a name was imported from; None if it is not ours."""
    parts = module.split(".")[1:] if module.startswith("rollover.") else []
    for end in range(len(parts), 0, -1):
        stem = "/".join(parts[:end])
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if (PACKAGE / name).exists():
                return name
    return None


def circles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of more than one node that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(arrows.get(start, ()))
        while waiting:
            if (node := waiting.pop()) not in seen:
                seen.add(node)
                waiting.extend(arrows.get(node, ()))
        return seen

    beyond = {node: reached(node) for node in arrows}
    found = {frozenset(m for m in beyond[n] if n in beyond.get(m, ())) for n in arrows if n in beyond[n]}
    return {circle for circle in found if len(circle) > 1}


def imported_files(path: Path) -> Iterator[str]:
    """The files of ours that a file imports, inside functions and for a type checker too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from filter(None, map(file_of, modules))


def test_no_files_import_each_other() -> None:
    assert circles({name_of(path): set(imported_files(path)) for path in FILES}) == CIRCLES


def test_the_search_for_circles_finds_them() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(arrows) == {frozenset("bc")}


def private_names(path: Path) -> set[str]:
    """Private names that a file of the product gives to functions, methods, classes and attributes."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - {"_fields", "_replace"}


def read_of_others(path: Path) -> Iterator[str]:
    """Private names that a file reads of something else than its own `self`, or imports from the product."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        ):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollover"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def test_tests_touch_no_private_name() -> None:
    private = {name for path in FILES for name in private_names(path)}
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        if "parity" in path.parts:
            continue  # those read names of the peers
        own = {n.name for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        if touched := (set(read_of_others(path)) & private) - own:
            found[path.relative_to(TESTS).as_posix()] = touched
    assert found == PRIVATE


def test_no_class_has_a_field_twice() -> None:
    """The second one would silently take the place of the first."""
    found = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                names = [
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                ]
                found |= {f"{name_of(path)}:{node.name}.{name}" for name in names if names.count(name) > 1}
    assert not found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_private_function_is_dead() -> None:
    """Of a file's own functions each is called, or handed on, in that file."""
    found = set()
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
            n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
        }
        own = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        found |= {f"{name_of(path)}:{n.name}" for n in own if _is_private(n.name) and n.name not in used}
    assert not found

"""Reads bash as far as launch scripts need it: assignments, `$NAME`, `${NAME:-default}`, `$((...))`, arrays, quotes and
continued lines. Nothing is run: `$(date ...)` is the word `now`, any other command has no value, and what is assigned
under a condition is in doubt.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

_ASSIGNMENT = re.compile(r"(?:export\s+|readonly\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.S)
_NAME = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}|([A-Za-z_]\w*))")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_MOST_CHARS = 1 << 16  # that names stand for in a word: names of names multiply


def _power(base: int, exponent: int) -> int:
    """ValueError for more than bash's 64 bits hold."""
    if not 0 <= exponent < 64:
        raise ValueError(f"{base}**{exponent} is beyond bash's whole numbers")
    return base**exponent


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
_COMMAND = re.compile(r"\$\((?!\()|`")
_OPENS = re.compile(r"(?:if|case|for|while|until)\b")
_CLOSES = re.compile(r"(?:^|[;\s])(?:fi|esac|done)\s*(?:$|[;)&|>])")
_INSIDE = re.compile(
    r"(?:&&|\|\||\bthen|\belse|\bdo|;)\s*(?:export\s+)?([A-Za-z_]\w*)="
)  # of a line with more than that
_DOUBT = "\0"  # ends a value that depends on a condition, and stays in what is made of it
_NOW = re.compile(r"\$\(date\b[^()]*\)|`date\b[^`]*`")


class InDoubt(ValueError):
    """What a text stands for depends on a condition of the script."""


class Script:
    """The commands of a script, in its order, and what its names stand for there."""

    def __init__(self, text: str, environment: Mapping[str, str] = os.environ) -> None:
        self._text, self._environment = text, environment
        self._known = {"HOME": "~", "PWD": ".", **environment}
        self._arrays: dict[str, str] = {}
        self._depth = 0  # of conditions and loops
        self._doubtful: set[str] = set()

    def commands(self) -> Iterator[tuple[int, list[str]]]:
        """The number of a command's first line, and its words, whose names are not expanded yet."""
        for number, line in _lines(self._text):
            self._depth += bool(_OPENS.match(line))
            for name in _INSIDE.findall(line):
                self._doubt(name)
            words = self._words(line)
            self._depth = max(0, self._depth - bool(_CLOSES.search(line)))
            if words:
                yield number, words

    def expand(self, text: str) -> str:
        """The text with what its names stand for now. ValueError for one without a value, and for a command's output.
        InDoubt for what was assigned under a condition, which the environment may settle."""
        expanded = _expand(text, self._known)
        if _DOUBT in expanded:
            own = [name for name in self._doubtful if re.search(rf"\$\{{?{name}\b", text)]
            of = own or sorted(self._doubtful)[:3] if "$" in text else []
            names = " ".join(f"{name}=..." for name in of)
            settle = f": settle it in the environment, `{names} rollover convert FILE`" if names else ""
            raise InDoubt(f"{expanded.replace(_DOUBT, '')} is under a condition of the script{settle}")
        if _COMMAND.search(expanded):
            raise ValueError(f"{expanded}: what a command prints is not known. Write the value in its place")
        return expanded

    def _words(self, line: str) -> list[str]:
        """Of a command; none of an assignment, which is kept."""
        if array := re.fullmatch(r"(\w+)(\+?)=\((.*)\)", line, re.S):
            before = self._arrays.get(array[1], "") if array[2] else ""
            words = _without_comments(array[3])
            self._arrays[array[1]] = f"{before} {words}"
            if self._depth:
                self._doubt(array[1])
            return []
        line = _NOW.sub("now", line)
        line = re.sub(r"\"?\$\{(\w+)\[@\]\}\"?", lambda match: self._arrays.get(match[1], ""), line)
        line = _SUM.sub(lambda match: re.sub(r"\s", "", match[0]), line)  # one word
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment and "." not in assignment[1] and _is_one(assignment, line):
            self._assign(assignment[1], assignment[2])
            return []
        return shlex.split(line, comments=True)

    def _assign(self, name: str, text: str) -> None:
        try:
            if _COMMAND.search(text):
                raise ValueError("what a command prints")
            value = _expanded(shlex.split(text, comments=True), text, self._known)
            before = self._known.get(name)
            self._known[name] = value
            if self._depth and value != before:
                self._doubt(name)
        except ValueError:  # told where it is needed, unless the environment has it
            self._known.pop(name, None)
            if name in self._environment:
                self._known[name] = self._environment[name]

    def _doubt(self, name: str) -> None:
        """Of a name that may have another value as well."""
        if name in self._arrays:
            words = self._arrays[name].replace(_DOUBT, "")
            self._arrays[name] = re.sub(r"(?<=\S)(?=\s|$)", _DOUBT, words)
        if name in self._environment:
            self._known[name] = self._environment[name]
        elif name in self._known and _DOUBT not in self._known[name]:
            self._known[name] += _DOUBT
            self._doubtful.add(name)


def _is_one(assignment: re.Match[str], line: str) -> bool:
    return bool(_COMMAND.search(assignment[2])) or len(shlex.split(line, comments=True)) <= 2


def value_of(text: str) -> Any:
    """The value of a Hydra override: a number, true or false, null, a list, a table, or a text."""
    text = text.strip()
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    if low in ("null", "none", ""):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if text[0] in "\"'" and text[-1] == text[0]:
        return text[1:-1]
    if text[0] == "[" and text[-1] == "]":
        return [value_of(part) for part in _parts(text[1:-1])]
    if text[0] == "{" and text[-1] == "}":
        pairs = (part.partition(":") for part in _parts(text[1:-1]))
        return {str(value_of(name)): value_of(item) for name, _, item in pairs}
    return text


def _parts(text: str) -> list[str]:
    """What stands between commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        quote = "" if char == quote else quote or (char if char in "\"'" else "")
        depth += not quote and (char in "[{") - (char in "]}")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]


def _lines(text: str) -> list[tuple[int, str]]:
    """Commands with the number of their first line: continued lines and open quotes are joined."""
    found: list[tuple[int, str]] = []
    held, start, is_open = "", 0, False
    for number, line in enumerate(text.splitlines(), 1):
        if not held:
            start = number
        if line.lstrip().startswith("#"):
            continue
        held += line
        if held.endswith("\\"):
            held, is_open = held[:-1] + " ", False
            continue
        is_open = _is_open(held) if not is_open or any(char in line for char in "\"')") else True
        if is_open:
            held += "\n"
            continue
        if held.strip():
            found.append((start, held.strip()))
        held = ""
    return [*found, (start, held.strip())] if held.strip() else found


def _is_open(command: str) -> bool:
    """Whether a quote or the bracket of an array is not closed yet."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return bool(re.match(r"\w+\+?=\(", command)) and not command.rstrip().endswith(")")


def _expanded(words: list[str], text: str, known: Mapping[str, str]) -> str:
    quoted = text.strip().startswith("'")
    word = words[0] if words else ""
    return word if quoted else _expand(word, known)


def _without_comments(text: str) -> str:
    return " ".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _expand(text: str, known: Mapping[str, str]) -> str:
    for _ in range(10):
        before = text
        text = _SUM.sub(lambda match: _summed(_names(match[1], known, bare=True)), text)
        text = _names(text, known)
        if text == before:
            return text
    raise ValueError(f"{text}: its names lead to each other")


def _names(text: str, known: Mapping[str, str], *, bare: bool = False) -> str:
    left = _MOST_CHARS

    def value(match: re.Match[str]) -> str:
        nonlocal left
        name = match[1] or match[3]
        found = known.get(name)
        if not found and match[2] is not None:
            found = match[2].strip("\"'")
        if found is not None:
            left -= len(found)
            if left < 0:
                raise ValueError(f"${name}: what it stands for has more than {_MOST_CHARS:,} characters")
            return found
        raise ValueError(f"${name} has no value: set it in the environment, `{name}=... rollover convert FILE`")

    text = _NAME.sub(value, text)
    return re.sub(r"[A-Za-z_]\w*", lambda match: known.get(match[0], match[0]), text) if bare else text


def _summed(text: str) -> str:
    return str(_sum(text.replace(_DOUBT, ""))) + (_DOUBT if _DOUBT in text else "")


def _sum(text: str) -> int:
    """The value of bash's arithmetic: whole numbers, + - * / % ** and brackets."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return of(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        raise ValueError(f"$(({text})) is no sum of whole numbers")

    try:
        return of(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ZeroDivisionError):
        raise ValueError(f"$(({text})) is no sum of whole numbers") from None

"""Strings of a script whose parts may be unknown, and bash's operations on them: patterns, arithmetic."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MOST_CHARS = 1 << 16  # of one value: names of names multiply
_MOST_MATCHED = 4096  # characters, as matching a prefix tries every length
_LARGEST = 1 << 63


@dataclass(frozen=True)
class Piece:
    """Part of a value. why: why it is unknown; empty if known. doubt: `text` is one of several possible values;
    otherwise the text of an unknown piece is its source."""

    text: str
    why: str = ""
    doubt: bool = False


@dataclass(frozen=True)
class Text:
    """A value, as a sequence of pieces."""

    pieces: tuple[Piece, ...] = ()

    @property
    def text(self) -> str:
        """The value, with the source of unknown pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def known(self) -> bool:
        """Whether every piece is known."""
        return not any(piece.why for piece in self.pieces)

    @property
    def head(self) -> str:
        """The text before the first piece without a value."""
        first = next((i for i, piece in enumerate(self.pieces) if piece.why and not piece.doubt), len(self.pieces))
        return "".join(piece.text for piece in self.pieces[:first])

    @property
    def why(self) -> str:
        """The reasons why the value is unknown; empty if it is known."""
        missing = dict.fromkeys(piece.why for piece in self.pieces if piece.why and not piece.doubt)
        return "; ".join(missing or dict.fromkeys(piece.why for piece in self.pieces if piece.why))

    @property
    def in_doubt(self) -> bool:
        """Whether the text is one of several possible values."""
        return not self.known and all(piece.doubt or not piece.why for piece in self.pieces)

    def __add__(self, other: Text) -> Text:
        return join([*self.pieces, *other.pieces])

    def doubted(self, why: str) -> Text:
        """Return the same value, marked as one of several."""
        pieces = self.pieces or (Piece(""),)
        return Text(tuple(piece if piece.why else Piece(piece.text, why, doubt=True) for piece in pieces))

    def with_text(self, text: str) -> Text:
        """Return another text with the certainty of this one."""
        return plain(text) if self.known else Text((Piece(text, self.why, doubt=self.in_doubt),))


def plain(text: str) -> Text:
    """Return a known value."""
    return Text((Piece(text),)) if text else Text()


def unknown(source: str, why: str) -> Text:
    """Return an unknown value with its source."""
    return Text((Piece(source, why),))


def named_unknown(source: str, why: str) -> Text:
    """Return a word that is unknown after its `NAME=`."""
    name, equals, value = source.partition("=")
    return plain(name + equals) + unknown(value, why) if equals else unknown(name, why)


def join(pieces: Iterable[Piece]) -> Text:
    """Join pieces to one value; adjacent known pieces become one."""
    found: list[Piece] = []
    known: list[str] = []
    for piece in [*pieces, None]:
        if piece is not None and not piece.why:
            known.append(piece.text)
            continue
        text = "".join(known)
        known = []
        found += [Piece(text)] if text else []
        found += [piece] if piece is not None else []
    return Text(tuple(found))


def remove_match(text: str, pattern: str, operator: str) -> str:
    """Evaluate `${text#pattern}`, `##`, `%` and `%%`. ValueError for texts that are too long to match."""
    matches = _pattern(text, pattern).fullmatch
    lengths = range(len(text) + 1)
    for length in lengths if len(operator) == 1 else reversed(lengths):
        if operator[0] == "#" and matches(text[:length]):
            return text[length:]
        if operator[0] == "%" and matches(text[len(text) - length :]):
            return text[: len(text) - length]
    return text


def replace_match(text: str, pattern: str, by: str, operator: str) -> str:
    """Evaluate `${text/pattern/by}` and `//`. ValueError for texts that are too long to match."""
    if pattern[:1] in "#%" and pattern:
        raise ValueError("an anchored pattern is not evaluated")
    found = _pattern(text, pattern).pattern.removesuffix(r"\Z")
    return re.sub(found, lambda _: by, text, count=0 if operator == "//" else 1) if pattern else text


def _pattern(text: str, pattern: str) -> re.Pattern[str]:
    if len(text) > _MOST_MATCHED or len(pattern) > 100 or pattern.count("*") > 3:
        raise ValueError("the text or its pattern is too long")
    return re.compile(fnmatch.translate(pattern))


def arithmetic(text: str) -> int:
    """Evaluate an integer expression: + - * / % ** and brackets. ValueError for anything else."""
    try:
        return _value_of(ast.parse(text.strip(), mode="eval").body) if text.strip() else 0
    except (SyntaxError, ZeroDivisionError, MemoryError):
        raise ValueError(f"$(({text[:60]})) is not an integer expression") from None


def _value_of(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value_of(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value_of(node.left), _value_of(node.right))
    else:
        raise ValueError("it is not an integer expression")
    if not -_LARGEST <= value < _LARGEST:
        raise ValueError("it is beyond bash's whole numbers of 64 bits")
    return value


def _divided(left: int, right: int) -> int:  # bash rounds towards zero, Python down
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _power(left: int, right: int) -> int:
    if not 0 <= right < 64:
        raise ValueError(f"{left}**{right} is beyond bash's whole numbers")
    return left**right


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divided,
    ast.Mod: lambda left, right: left - right * _divided(left, right), ast.Pow: _power,
}  # fmt: skip

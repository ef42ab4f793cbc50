"""Integer arithmetic: `$((...))`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollover.plugins.convert.bash.names import missing, unread
from rollover.plugins.convert.bash.text import Piece, Text, arithmetic, joined, plain, unknown

if TYPE_CHECKING:
    from rollover.plugins.convert.bash.words import Words


def sum_of(words: Words, node: Any) -> Text:
    """The value of `$((...))`."""
    source = words.source(node)
    inner = [child for child in node.children if child.type not in ("$((", "))", "$[", "]")]
    if not inner:
        return unread(source)
    parts: list[Piece] = []
    _operands(words, inner, inner[0].start_byte, inner[-1].end_byte, parts)
    return _summed(parts, source)


def sum_of_text(words: Words, text: str, source: str) -> Text:
    """The value of an expression, whose operands are names."""
    parts: list[Piece] = []
    for name, other in re.findall(r"\$?\{?\b([A-Za-z_]\w*)\}?|(.)", text, re.S):
        value = (words.named(name) or missing(name)) if name else plain(other)
        parts += [_number(piece) if name else piece for piece in value.pieces]
    return _summed(parts, source)


def _summed(parts: list[Piece], source: str) -> Text:
    unread = [piece for piece in parts if piece.why and not piece.doubt]
    if unread:
        return unknown(source, unread[0].why)
    try:
        return joined(parts).like(str(arithmetic("".join(piece.text for piece in parts))))
    except ValueError as error:
        return unknown(source, f"{source}: {error}")


def _operands(words: Words, nodes: Sequence[Any], start: int, end: int, parts: list[Piece]) -> None:
    for node in nodes:
        parts.append(Piece(words.between(start, node.start_byte)))
        if node.type in ("simple_expansion", "expansion", "command_substitution"):
            parts += [_number(piece) for piece in words.value(node).pieces]
        elif node.type == "variable_name":
            value = words.named(words.source(node)) or missing(words.source(node))
            parts += [_number(piece) for piece in value.pieces]
        elif node.children:
            _operands(words, node.children, node.start_byte, node.end_byte, parts)
        else:
            parts.append(Piece(words.source(node)))
        start = node.end_byte
    parts.append(Piece(words.between(start, end)))


def _number(piece: Piece) -> Piece:
    """An operand; one that is no integer has a value in bash that is rarely meant."""
    if (piece.why and not piece.doubt) or re.fullmatch(r"\s*-?\d+\s*|", piece.text):
        return piece
    return Piece(piece.text, f"{piece.text[:40]} is not an integer")

"""Expands the words of a command: quotes, `$NAME`, `${NAME:-default}`, `$((...))`, arrays and field splitting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollover.plugins.convert.bash.names import items_of, missing, named, unread
from rollover.plugins.convert.bash.state import State
from rollover.plugins.convert.bash.text import (
    MOST_CHARS,
    Piece,
    Text,
    arithmetic,
    joined,
    named_unknown,
    plain,
    replaced,
    unknown,
    without_match,
)

BLANKS = " \t\n"  # $IFS, if the script does not set it
QUOTE = "\ue000"  # stands for a ' where it is no quote
_DOUBLE_QUOTED = re.compile(r"\\([$`\"\\\n])")
_UNQUOTED = re.compile(r"\\(.)", re.S)
_BRACES = re.compile(r"(?<!\\)\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")
_ANSI = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.S)
_ANSI_LETTERS = dict(zip("abeEfnrtv", "\a\b\x1b\x1b\f\n\r\t\v", strict=True)) | {mark: mark for mark in "\\'\"?"}
_CASES: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


@dataclass(frozen=True)
class Part:
    """Part of a word before it is split into fields. ends: whether a field ends here, as between items of an array."""

    piece: Piece = Piece("")
    quoted: bool = False
    ends: bool = False


@dataclass
class Budget:
    """Bounds on the work for one file: statements that are run, and characters that words expand to."""

    steps: int = 20_000
    chars: int = 1 << 24

    def spend(self, steps: int = 0, chars: int = 0) -> None:
        """ValueError if nothing is left."""
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0:
            raise ValueError("the script does too much to be read: it is not a launch script")


class Words:
    """Expands nodes of one source text. substitute: the value of a command substitution. script: the path of
    `$0`."""

    def __init__(
        self, source: bytes, state: State, budget: Budget, substitute: Callable[[Any], Text], script: str = ""
    ) -> None:
        self._source, self.state, self.budget, self._substitute = source, state, budget, substitute
        self._script = script

    def source(self, node: Any) -> str:
        """The text of a node as it is written."""
        return self.between(node.start_byte, node.end_byte)

    def named(self, name: str) -> Text | None:
        """The value of a name; None if it has none."""
        return named(self.state, name, self._script)

    def value(self, node: Any) -> Text:
        """One value, without field splitting: what an assignment takes."""
        return self._bounded(part.piece if not part.ends else Piece(" ") for part in self._parts(node, False))

    def fields(self, node: Any) -> list[Text]:
        """The words that a word becomes."""
        if (braces := self._braces(node)) is not None:
            return [braces]
        found: list[list[Piece]] = []
        is_open = False  # whether a piece goes to the last field
        for part in self._parts(node, False):
            whole = part.quoted or (part.piece.why and not part.piece.doubt)
            if not whole and (why := self._splits_otherwise(part.piece.text)):
                return [named_unknown(self.source(node), why)]
            split = [("", "")] if whole else re.findall(r"(\s+)|(\S+)", part.piece.text)
            if part.ends:
                is_open = False
                continue
            for blank, word in split:
                if blank:
                    is_open = False
                    continue
                if not is_open:
                    found.append([])
                is_open = True
                found[-1].append(part.piece if whole else replace(part.piece, text=word))
            if not split and part.piece.why and is_open:  # of an empty value that is in doubt
                found[-1].append(part.piece)
        self.budget.spend(steps=len(found) // 100)
        return [self._bounded(pieces) for pieces in found]

    def body(self, node: Any) -> Text:
        """The text of a heredoc whose names are expanded."""
        parts = self._spans(node.children, node.start_byte, node.end_byte, True)
        return self._bounded(part.piece for part in parts)

    def _splits_otherwise(self, text: str) -> str:
        """Why a text that is not quoted cannot be split; empty if it is split where blanks are."""
        separators = self.state.names.get("IFS", plain(BLANKS))
        split = re.search(rf"[{BLANKS}{re.escape(separators.text)}]", text)
        return "it is split by $IFS: quote it" if separators != plain(BLANKS) and split else ""

    # Parts of words

    def between(self, start: int, end: int) -> str:
        return self._source[start:end].decode().replace(QUOTE, "'")

    def _bounded(self, pieces: Any) -> Text:
        text = joined(pieces)
        num = len(text.text)
        self.budget.spend(chars=num)
        if num > MOST_CHARS:
            return named_unknown(text.head[:80], f"{text.text[:40]}...: a word has more than {MOST_CHARS:,} characters")
        return text

    def _spans(self, nodes: Sequence[Any], start: int, end: int, quoted: bool) -> Iterator[Part]:
        """The nodes and the text between them."""
        for node in nodes:
            source = self.source(node)
            # The parser puts a blank before `$` into its node.
            blank = len(source) - len(source.lstrip()) if source.lstrip().startswith("$") else 0
            yield from self._literal(self.between(start, node.start_byte) + source[:blank], quoted)
            yield from self._parts(node, quoted)
            start = node.end_byte
        yield from self._literal(self.between(start, end), quoted)

    def _literal(self, text: str, quoted: bool) -> Iterator[Part]:
        if text:
            text = text.replace("\\\n", "")
            pattern = _DOUBLE_QUOTED if quoted else _UNQUOTED
            # What is written out is not split: the parser has done that.
            yield Part(Piece(pattern.sub(r"\1", text)), quoted=True)

    def _parts(self, node: Any, quoted: bool) -> Iterator[Part]:
        kind = node.type
        if kind == "raw_string":
            text = self.source(node)
            yield Part(Piece(text if quoted else text[1:-1]), quoted=True)
        elif kind == "ansi_c_string":
            yield Part(Piece(_ansi(self.source(node)[2:-1])), quoted=True)
        elif kind in ("string", "translated_string"):
            string = node.children[-1] if kind == "translated_string" else node
            inner = [child for child in string.children if child.is_named]
            if not (len(inner) == 1 and _is_list(inner[0])):
                yield Part(quoted=True)
            yield from self._spans(inner, string.start_byte + 1, string.end_byte - 1, True)
        elif kind in ("simple_expansion", "expansion"):
            yield from self._expansion(node, quoted)
        elif kind == "command_substitution":
            # Within `${NAME:-...}` the parser takes `$((...))` for a command.
            inner = re.fullmatch(r"\s*\$\(\((.*)\)\)", self.source(node), re.S)
            text = _sum_of_text(self, inner[1], self.source(node)) if inner else self._substitute(node)
            yield from (Part(piece, quoted) for piece in text.pieces)
        elif kind == "arithmetic_expansion":
            yield from (Part(piece, quoted=True) for piece in _sum_of(self, node).pieces)
            self.state.count(self.source(node))
        elif kind == "process_substitution":
            yield Part(Piece(self.source(node), "what a process prints is not known"), quoted=True)
        elif node.children:
            yield from self._spans(node.children, node.start_byte, node.end_byte, quoted)
        else:
            yield from self._literal(self.source(node), quoted)

    def _braces(self, node: Any) -> Text | None:
        """The word if bash makes several of it by `{a,b}` or `{1..3}`."""
        children = node.children if node.type == "concatenation" else [node]
        quotes = ("string", "raw_string", "ansi_c_string", "expansion", "simple_expansion", "command_substitution")
        raw = "".join("x" if child.type in quotes else self.source(child) for child in children)
        if not (match := _BRACES.search(raw)) or node.type in quotes:
            return None
        return named_unknown(self.source(node), f"bash makes several words of {match[0]}: quote it")

    # Expansions

    def _expansion(self, node: Any, quoted: bool) -> Iterator[Part]:
        named = [child for child in node.children if child.type not in ("$", "${", "}")]
        if len(named) == 1 and (items := items_of(self.state, self.source(named[0]))) is not None:
            together = quoted and "*" in self.source(named[0])
            between = self.state.names.get("IFS", plain(BLANKS))
            between = between.like(between.text[:1])
            for i, item in enumerate(items):
                separator = [Part(piece, quoted=True) for piece in between.pieces] if together else [Part(ends=True)]
                yield from separator if i else []
                yield from [Part(quoted=True)] if quoted else []
                yield from (Part(piece, quoted) for piece in item.pieces)
            return
        if named and (items := self._slice(named, node)) is not None:
            for i, item in enumerate(items):
                yield from [Part(ends=True)] if i else []
                yield from (Part(piece, quoted) for piece in item.pieces)
            return
        value = self._value_of(node, named) if named else unknown(self.source(node), "it is not evaluated")
        yield from (Part(piece, quoted) for piece in value.pieces)

    def _slice(self, named: list[Any], node: Any) -> list[Text] | None:
        """The items of `${@:FROM}`; None for anything else."""
        is_slice = len(named) > 1 and named[1].type == ":" and self.source(named[0]) == "@"
        if not is_slice or self.state.arguments is None or any(child.type == ":" for child in named[2:]):
            return None
        start = self._argument(named[1], named[2:], node).text
        return self.state.arguments[int(start) - 1 :] if start.isdigit() and int(start) > 0 else None

    def _value_of(self, node: Any, named: list[Any]) -> Text:
        source = self.source(node)
        first, *rest = named
        if not first.is_named:  # ${#NAME} and ${!NAME}
            if first.type == "#" and len(rest) == 1:
                items, one = items_of(self.state, self.source(rest[0])), self.named(self.source(rest[0]))
                if items is not None:
                    return plain(str(len(items)))
                return one.like(str(len(one.text))) if one is not None and one.head == one.text else unread(source)
            if first.type == "!" and len(rest) == 1 and (name := self.named(self.source(rest[0]))) and name.known:
                found = self.named(name.text)
                return missing(name.text) if found is None else found
            return unread(source)
        value = self.named(self.source(first))
        if not rest:
            return missing(self.source(first)) if value is None else value
        operator = rest[0].type
        if operator in _DEFAULTS:
            return self._default(self.source(first), value, operator, self._argument(rest[0], rest[1:], node))
        if value is None:
            return missing(self.source(first))
        if not (value.known or value.in_doubt):
            return unknown(source, value.why)
        try:
            return value.like(self._changed(value.text, operator, rest, node))
        except (ValueError, IndexError, re.error):
            return unread(source)

    def _changed(self, text: str, operator: str, rest: list[Any], node: Any) -> str:
        if operator in _CASES and len(rest) == 1:
            return _CASES[operator](text)
        if operator in ("#", "##", "%", "%%"):
            return without_match(text, self._known(rest[0], rest[1:], node), operator)
        if operator in ("/", "//"):
            middle = next((i for i, child in enumerate(rest[1:], 1) if child.type == "/"), len(rest))
            stop = rest[middle] if middle < len(rest) else None
            pattern = self._known(rest[0], rest[1:middle], node, stop)
            by = self._known(stop, rest[middle + 1 :], node) if stop is not None else ""
            return replaced(text, pattern, by, operator)
        if operator == ":":
            middle = next((i for i, child in enumerate(rest[1:], 1) if child.type == ":"), len(rest))
            stop = rest[middle] if middle < len(rest) else None
            start = int(self._known(rest[0], rest[1:middle], node, stop))
            if start < -len(text):
                return ""
            if stop is None:
                return text[start:]
            length = int(self._known(stop, rest[middle + 1 :], node))
            return text[start:][:length]
        raise ValueError("it is not evaluated")

    def _known(self, start: Any, nodes: list[Any], node: Any, before: Any = None) -> str:
        value = self._argument(start, nodes, node, before)
        if not value.known:
            raise ValueError(value.why)
        return value.text

    def _argument(self, start: Any, nodes: list[Any], node: Any, before: Any = None) -> Text:
        """What stands behind the operator `start`, up to the end of the expansion or to `before`."""
        end = before.start_byte if before is not None else node.end_byte - 1
        return self._bounded(part.piece for part in self._spans(nodes, start.end_byte, end, False))

    def _default(self, name: str, value: Text | None, operator: str, other: Text) -> Text:
        is_set = value is not None and (bool(value.text) or value.why != "" or not operator.startswith(":"))
        if value is None and self.state.unseen and name not in self.state.environment:
            other = other.doubted(self.state.unseen)
            if operator.endswith("+"):
                return other
        if operator.endswith("+"):
            return (other if value is None or value.known else other.doubted(value.why)) if is_set else Text()
        if is_set and value is not None:
            return value
        if operator.endswith("?"):
            return missing(name)
        if operator.endswith("="):
            self.state.assign(name, other)
        return other


def _is_list(node: Any) -> bool:
    """Whether it is `$@` or `${NAME[@]}`, which are no word at all if they are empty."""
    text = node.text or b""
    return text in (b"$@", b"${@}") or bool(re.fullmatch(rb"\$\{[\w]+\[@\]\}", text))


def _ansi(text: str) -> str:
    """The value of $'text'."""

    def put(match: re.Match[str]) -> bytes:
        byte, short, long, octal, letter = match.groups()
        if byte or octal:
            return bytes([int(byte or octal, 16 if byte else 8) & 255])
        if (code := int(short or long or "0", 16)) and code <= 0x10FFFF:
            return chr(code).encode(errors="replace")
        return _ANSI_LETTERS.get(letter or "", match[0]).encode()

    found, end = b"", 0
    for match in _ANSI.finditer(text):
        found += text[end : match.start()].encode() + put(match)
        end = match.end()
    return (found + text[end:].encode()).partition(b"\0")[0].decode(errors="replace")


# Integer arithmetic: `$((...))`


def _sum_of(words: Words, node: Any) -> Text:
    """The value of `$((...))`."""
    source = words.source(node)
    inner = [child for child in node.children if child.type not in ("$((", "))", "$[", "]")]
    if not inner:
        return unread(source)
    parts: list[Piece] = []
    _operands(words, inner, inner[0].start_byte, inner[-1].end_byte, parts)
    return _summed(parts, source)


def _sum_of_text(words: Words, text: str, source: str) -> Text:
    """The value of an expression, whose operands are names."""
    parts: list[Piece] = []
    for name, other in re.findall(r"\$?\{?\b([A-Za-z_]\w*)\}?|(.)", text, re.S):
        value = (words.named(name) or missing(name)) if name else plain(other)
        parts += [_number(piece) if name else piece for piece in value.pieces]
    return _summed(parts, source)


def _summed(parts: list[Piece], source: str) -> Text:
    without_value = [piece for piece in parts if piece.why and not piece.doubt]
    if without_value:
        return unknown(source, without_value[0].why)
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

"""Expands the words of a command: quotes, `$NAME`, `${NAME:-default}`, `$((...))`, arrays and field splitting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from rollover.plugins.convert.bash.state import BLANKS, State, not_evaluated, unset_name
from rollover.plugins.convert.bash.text import (
    MOST_CHARS,
    Piece,
    Text,
    arithmetic,
    join,
    named_unknown,
    plain,
    remove_match,
    replace_match,
    unknown,
)

_BOTH = "'\""  # the quote characters outside of quotes
_PLAIN = {marks: re.compile(rf"[^$`\\{marks}{'<>' if marks == _BOTH else ''}]+") for marks in (_BOTH, '"', "")}
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*|[\d@*#?$!-]))")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*(?:\[[^\]]*\])?|\d+|[@*#?$!-])(.*)", re.S)
_OPERATOR = re.compile(r":?[-=+?]|\^\^?|,,?|##?|%%?|//?|:")
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_ANSI = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|[uU]([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.S)
_ANSI_LETTERS = dict(zip("abeEfnrtv", "\a\b\x1b\x1b\f\n\r\t\v", strict=True)) | {mark: mark for mark in "\\'\"?"}
_CASES: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


@dataclass(frozen=True)
class WordPart:
    """Part of a word before field splitting. written: literal and unquoted. ends: a field ends here, as between items
    of an array."""

    piece: Piece = Piece("")
    quoted: bool = False
    written: bool = False
    ends: bool = False


@dataclass
class Budget:
    """Bounds on the work for one file: evaluated statements and expanded characters."""

    steps: int = 20_000
    chars: int = 1 << 24

    def spend(self, steps: int = 0, chars: int = 0) -> None:
        """Subtract from the budget. ValueError if nothing is left."""
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0:
            raise ValueError("the script does too much to be read: it is not a launch script")


def find_closing(text: str, at: int, close: str, marks: str = _BOTH) -> int:
    """Return the index of the matching `close`; the end of the text if there is none. marks: the quote characters."""
    while at < len(text) and text[at] != close:
        char, two = text[at], text[at : at + 2]
        if char == "\\":
            at += 2
        elif char == "'" and "'" in marks:
            at = (text.find("'", at + 1) + 1) or len(text)
        elif char == "`" or char == '"' and '"' in marks:
            at = find_closing(text, at + 1, char, "") + 1
        elif two == "$(" or char == "(" and close == ")":
            at = find_closing(text, at + (2 if char == "$" else 1), ")") + 1
        elif two == "${":
            at = find_closing(text, at + 2, "}", marks or '"') + 1
        else:
            at += 1
    return min(at, len(text))


class WordExpansion:
    """Word expansion. substitute(script, source): the value of a command substitution. script: the path of `$0`."""

    def __init__(self, state: State, budget: Budget, substitute: Callable[[str, str], Text], script: str = "") -> None:
        self.state, self.budget, self._substitute, self._script = state, budget, substitute, script

    def value(self, source: str, marks: str = _BOTH) -> Text:
        """Expand to one value without field splitting, as in an assignment. marks: quote characters; "" in heredocs."""
        return self._bounded(part.piece if not part.ends else Piece(" ") for part in self._parts(source, marks))

    def fields(self, source: str) -> list[Text]:
        """Expand to words, with field splitting."""
        parts = list(self._parts(source, _BOTH))
        if braces := _BRACES.search("".join(part.piece.text if part.written else "x" for part in parts)):
            return [named_unknown(source, f"bash makes several words of {braces[0]}: quote it")]
        found: list[list[Piece]] = []
        is_open = False  # whether a piece goes to the last field
        separators = self.state.text("IFS", BLANKS)
        for part in parts:
            whole = part.quoted or (part.piece.why and not part.piece.doubt)
            if not whole and separators != BLANKS and re.search(f"[{BLANKS}{re.escape(separators)}]", part.piece.text):
                return [named_unknown(source, "it is split by $IFS: quote it")]
            if part.ends:
                is_open = False
                continue
            split = [("", "")] if whole else re.findall(r"(\s+)|(\S+)", part.piece.text)
            for blank, word in split:
                if not blank and not is_open:
                    found.append([])
                is_open = not blank
                if not blank:
                    found[-1].append(part.piece if whole else replace(part.piece, text=word))
            if not split and part.piece.why and is_open:  # of an empty value that is in doubt
                found[-1].append(part.piece)
        self.budget.spend(steps=len(found) // 100)
        return [self._bounded(pieces) for pieces in found]

    def _bounded(self, pieces: Iterable[Piece]) -> Text:
        text = join(pieces)
        num = len(text.text)
        self.budget.spend(chars=num)
        if num > MOST_CHARS:
            return named_unknown(text.head[:80], f"{text.text[:40]}...: a word has more than {MOST_CHARS:,} characters")
        return text

    # Parts of words

    def _parts(self, text: str, marks: str) -> Iterator[WordPart]:
        """Yield the parts of a word; literal parts are not split. marks: the quote characters."""
        is_bare, at = marks == _BOTH, 0
        while at < len(text):
            char, two = text[at], text[at : at + 2]
            if match := _PLAIN[marks].match(text, at):
                yield WordPart(Piece(match[0]), quoted=True, written=is_bare)
                at = match.end()
            elif char == "\\":
                kept = "" if is_bare or two[1:] in ("$", "`", '"', "\\", "\n") else "\\"
                yield WordPart(Piece(kept + two[1:].replace("\n", "")), quoted=True)
                at += 2
            elif char == "'":
                end = (text.find("'", at + 1) + 1) or len(text)
                yield WordPart(Piece(text[at + 1 : end - 1]), quoted=True)
                at = end
            elif char == '"':
                end = find_closing(text, at + 1, '"', "")
                inner = text[at + 1 : end]
                if not re.fullmatch(r"\$@|\$\{(?:@|\w+\[@\])\}", inner):  # empty ones yield no word
                    yield WordPart(quoted=True)
                yield from self._parts(inner, "")
                at = end + 1
            elif two == "$'" and is_bare:
                end = re.compile(r"(?:[^'\\]|\\.)*", re.S).match(text, at + 2).end()  # pyright: ignore[reportOptionalMemberAccess]
                yield WordPart(Piece(_ansi(text[at + 2 : end])), quoted=True)
                at = end + 1
            elif two in ("<(", ">("):
                end = find_closing(text, at + 2, ")") + 1
                yield WordPart(Piece(text[at:end], "what a process prints is not known"), quoted=True)
                at = end
            elif char in "$`":
                end, parts = self._expanded(text, at, marks)
                yield from parts
                at = end
            else:
                yield WordPart(Piece(char), quoted=True, written=is_bare)
                at += 1

    def _expanded(self, text: str, at: int, marks: str) -> tuple[int, Iterable[WordPart]]:
        """Return the end of the expansion at `at`, and its parts."""
        two, quoted = text[at : at + 2], marks != _BOTH
        if text[at] == "`" or two == "$(":
            start = at + (1 if text[at] == "`" else 2)
            end = find_closing(text, start, "`" if text[at] == "`" else ")") + 1
            source, inner = text[at:end], text[start : end - 1]
            if inner[:1] == "(" and inner[-1:] == ")":
                return end, self._sum(inner[1:-1], source)
            return end, (WordPart(piece, quoted) for piece in self._substitute(inner, source).pieces)
        if two == "${":
            end = find_closing(text, at + 2, "}", marks or '"') + 1
            return end, self._expansion(text[at + 2 : end - 1], text[at:end], marks)
        if match := _NAME.match(text, at):
            return match.end(), self._expansion(match[1], match[0], marks)
        return at + 1, [] if two == '$"' and not quoted else [WordPart(Piece("$"), quoted=True)]

    def _expansion(self, inner: str, source: str, marks: str) -> Iterator[WordPart]:
        """Expand `$NAME` or `${...}`."""
        quoted = marks != _BOTH
        items = self.state.items_of(inner)
        if sliced := re.fullmatch(r"@:([1-9]\d{0,3})", inner):
            items = None if self.state.arguments is None else self.state.arguments[int(sliced[1]) - 1 :]
        if items is None:
            yield from (WordPart(piece, quoted) for piece in self._value_of(inner, source, marks).pieces)
            return
        separators = self.state.named("IFS", "") or plain(BLANKS)
        between = [WordPart(piece, quoted=True) for piece in separators.with_text(separators.text[:1]).pieces]
        for i, item in enumerate(items):
            yield from (between if quoted and "*" in inner else [WordPart(ends=True)]) if i else []
            yield from [WordPart(quoted=True)] if quoted else []
            yield from (WordPart(piece, quoted) for piece in item.pieces)

    def _value_of(self, inner: str, source: str, marks: str) -> Text:
        match = _PARAMETER.fullmatch(inner)
        if match is None or match[1] and match[3]:
            return not_evaluated(source)
        sign, name, rest = match.groups()
        value = self.state.named(name, self._script)
        if sign == "#":
            items = self.state.items_of(name)
            if items is not None:
                return plain(str(len(items)))
            is_certain = value is not None and value.head == value.text
            return value.with_text(str(len(value.text))) if value is not None and is_certain else not_evaluated(source)
        if sign == "!":
            found = (
                self.state.named(value.text, self._script)
                if value is not None and value.known
                else not_evaluated(source)
            )
            return unset_name(value.text) if found is None and value is not None else found or not_evaluated(source)
        if not rest:
            return unset_name(name) if value is None else value
        if (operator := _OPERATOR.match(rest)) is None:
            return not_evaluated(source)
        sign, rest = operator[0], rest[operator.end() :]
        if sign[-1] in "-=+?":
            return self._default(name, value, sign, self.value(rest, marks or '"'))
        if value is None:
            return unset_name(name)
        if not (value.known or value.in_doubt):
            return unknown(source, value.why)
        try:
            return value.with_text(self._changed(value.text, sign, rest))
        except (ValueError, IndexError, re.error):
            return not_evaluated(source)

    def _changed(self, text: str, operator: str, rest: str) -> str:
        if operator in _CASES and not rest:
            return _CASES[operator](text)
        if operator[0] in "#%":
            return remove_match(text, self._known(rest), operator)
        if operator[0] not in "/:":
            raise ValueError("it is not evaluated")
        middle = find_closing(rest, 0, operator[0])
        first, second = self._known(rest[:middle]), self._known(rest[middle + 1 :])
        if operator[0] == "/":
            return replace_match(text, first, second, operator)
        start = int(first)
        return "" if start < -len(text) else text[start:][: int(second) if middle < len(rest) else None]

    def _known(self, source: str) -> str:
        value = self.value(source)
        if not value.known:
            raise ValueError(value.why)
        return value.text

    def _default(self, name: str, value: Text | None, operator: str, other: Text) -> Text:
        is_set = value is not None and (bool(value.text) or value.why != "" or not operator.startswith(":"))
        if value is None and self.state.unset_doubt and name not in self.state.environment:
            other = other.doubted(self.state.unset_doubt)
            if operator.endswith("+"):
                return other
        if operator.endswith("+"):
            return (other if value is None or value.known else other.doubted(value.why)) if is_set else Text()
        if is_set and value is not None:
            return value
        if operator.endswith("?"):
            return unset_name(name)
        if operator.endswith("="):
            self.state.assign(name, other)
        return other

    def _sum(self, inner: str, source: str) -> list[WordPart]:
        """Evaluate `$((...))`, whose operands may be names without `$`."""
        pieces: list[Piece] = []
        at = 0
        while at < len(inner):
            if inner[at] in "$`":
                at, parts = self._expanded(inner, at, "")
                pieces += [_number(part.piece) for part in parts]
            elif match := re.compile(r"[A-Za-z_]\w*").match(inner, at):
                value = self.state.named(match[0], self._script) or unset_name(match[0])
                pieces, at = [*pieces, *map(_number, value.pieces)], match.end()
            else:
                pieces.append(Piece(inner[at].replace('"', " ")))
                at += 1
        self.state.set_counted_unknown(inner)
        missing = next((piece for piece in pieces if piece.why and not piece.doubt), None)
        if missing is not None or not inner.strip():
            found = unknown(source, missing.why) if missing else not_evaluated(source)
        else:
            try:
                found = join(pieces).with_text(str(arithmetic("".join(piece.text for piece in pieces))))
            except ValueError as error:
                found = unknown(source, f"{source}: {error}")
        return [WordPart(piece, quoted=True) for piece in found.pieces]


def _number(piece: Piece) -> Piece:
    """Return an operand; mark it unknown if it is no integer."""
    if (piece.why and not piece.doubt) or re.fullmatch(r"\s*-?\d+\s*|", piece.text):
        return piece
    return Piece(piece.text, f"{piece.text[:40]} is not an integer")


def _ansi(text: str) -> str:
    """Evaluate $'text'."""

    def put(match: re.Match[str]) -> bytes:
        byte, code, octal, letter = match.groups()
        if byte or octal:
            return bytes([int(byte or octal, 16 if byte else 8) & 255])
        if code and int(code, 16) <= 0x10FFFF:
            return chr(int(code, 16)).encode(errors="replace")
        return _ANSI_LETTERS.get(letter or "", match[0]).encode()

    encoded = re.sub(_ANSI, lambda match: put(match).decode("latin-1"), text.encode().decode("latin-1"))
    return encoded.encode("latin-1", errors="replace").partition(b"\0")[0].decode(errors="replace")

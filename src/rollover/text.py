"""Texts that somebody else wrote (a model, a data set, an exception), made harmless for a terminal, a file or a page.

A model can write anything: escape sequences that a terminal obeys, characters that turn the reading order around, ones
without a shape, and lone surrogates, which cannot be encoded. Owns what becomes of them; nothing else replaces any.
"""

from __future__ import annotations

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # printable, and of no shape
# Control characters as the pictures that Unicode has of them; what turns the direction of a text, by its number.
_NAMED = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **{code: f"[U+{code:04X}]" for code in (*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F)},
    **{code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)},
}
MOST_CHARS = 10_000
"""Of one text in a page of a tracker."""


def printable(text: str) -> str:
    """Return `text` with a question mark for each character that is not printable, or has no shape."""
    return "".join(c if c.isprintable() and c not in _UNSEEN else "?" for c in text)


def one_line(text: str) -> str:
    """Return `text` as one printable line, with single spaces between its words."""
    return printable(" ".join(text.split()))


def printable_lines(text: str) -> str:
    """Return the printable lines of `text`. Tabs become spaces."""
    return "\n".join(printable(line.expandtabs()) for line in text.replace("\r\n", "\n").split("\n"))


def encodable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with a question mark for each character that `encoding` has not: of UTF-8 lone surrogates."""
    return text.encode(encoding, "replace").decode(encoding)


def whole_characters(text: str) -> str:
    """Return `text` with U+FFFD for each lone surrogate, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def named(text: str, most: int = MOST_CHARS) -> str:
    """Return `text` for a page: control and direction characters by name, lone surrogates as U+FFFD.

    A text longer than `most` is cut, with a note of how long it was.
    """
    note = f" [cut here: {len(text):,} characters]" if len(text) > most else ""
    return whole_characters(text[:most]).translate(_NAMED) + note

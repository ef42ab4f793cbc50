"""What the pages of the documentation show: code blocks, inline code, and the commands in both."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))  # their blocks are run by test_tutorials.py
RECIPES = sorted((ROOT / "configs").glob("*.toml"))

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(
    r"(?:\w+=\S+ |nice )*(?:rollover \w|bench \w|make \w|(?:\S*bin/)?pytest\b"
    r"|(?:(?:\S*bin/)?python )?(?:scripts|experiments)/\w+\.py|(?:\S*bin/)?python -m (?:rollover|pytest))"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code: where it stands, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> list[Block]:
    out = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            out.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return out


def spans(page: Path) -> Iterator[str]:
    """Inline code, each on one line."""
    for match in re.finditer(r"`([^`]+)`", _BLOCK.sub("", page.read_text(encoding="utf-8"))):
        yield " ".join(match[1].split())


def commands() -> list[tuple[str, str]]:
    """(where, command) of everything that a reader could type, once for each page."""
    found: dict[tuple[str, str], None] = {}
    for page in [*PAGES, *TUTORIALS]:
        for span in spans(page):
            if _COMMAND.match(span):
                found[page.name, span] = None
    for block in blocks():
        # An indented line goes on with the command above it.
        text = re.sub(r"\s*(?:#.*)?\n[ \t]+(?=\S)", " ", block.text) if block.language == "bash" else ""
        for line in filter(_COMMAND.match, text.splitlines()):
            found[block.page.name, line] = None
    for recipe in RECIPES:
        for match in re.finditer(r"^#\s+(rollover .*?)(?:  .*)?$", recipe.read_text(encoding="utf-8"), re.MULTILINE):
            found[recipe.name, match[1]] = None
    return list(found)


def variants(command: str) -> list[list[str]]:
    """The words of a command; of one in the form of a usage line, `a|b` and `[x | y]`, one list for each choice."""
    words = shlex.split(re.sub(r"\s>\s\S+$", "", command.replace(" | ", "|")), comments=True)
    words = [word.strip("[]") for word in words if word.strip("[].")]
    return [list(choice) for choice in product(*(word.split("|") for word in words))]

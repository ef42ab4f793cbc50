"""Texts that somebody else wrote (a model, a data set, an exception), as a terminal may have them.

A model can write anything, also what a terminal obeys (escape sequences), what turns the reading order around, or what
cannot be encoded: each such character is shown as a question mark.
"""

from __future__ import annotations

from rich.console import Console

from rollover.functions import printable, printable_lines

MAX_CHARS = 400  # of an excerpt
_WIDTH = 80  # of a console that says that it has none
_READ_CHARS = 16 * MAX_CHARS  # of a text that may be long, with its spaces


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError, as any other stream does: rich ends the process."""
        raise  # noqa: PLE0704


def new_console() -> Console:
    """A console on stdout, of at least one column: with COLUMNS=0, as some schedulers set it, rich prints nothing."""
    console = _Console()
    return console if console.width > 0 else _Console(width=_WIDTH)


def excerpt(text: str, console: Console) -> str:
    """The beginning of a text on one line, as this console can show it."""
    start = text[:_READ_CHARS]
    line = shown(" ".join(start.split()), console)
    return line if len(line) <= MAX_CHARS and len(start) == len(text) else line[: MAX_CHARS - 3] + "..."


def shown(text: str, console: Console) -> str:
    """A text of one line, as this console can show it."""
    return printable(text).encode(console.encoding, "replace").decode(console.encoding)


def shown_lines(text: str, console: Console) -> str:
    """A text of several lines, as this console can show it."""
    return "\n".join(shown(line, console) for line in printable_lines(text).split("\n"))

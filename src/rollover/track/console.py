"""Texts that somebody else wrote (text.py), as a console of this encoding can show them."""

from __future__ import annotations

from rich.console import Console

from rollover.text import encodable, printable, printable_lines

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
    return encodable(printable(text), console.encoding)


def shown_lines(text: str, console: Console) -> str:
    """A text of several lines, as this console can show it."""
    return encodable(printable_lines(text), console.encoding)

"""Untrusted text made printable (text.py) in the encoding of a console."""

from __future__ import annotations

from rich.console import Console

from rollover.text import encodable, printable, printable_lines

MAX_CHARS = 400  # of an excerpt
_WIDTH = 80  # of a console that reports 0 columns
_READ_CHARS = 16 * MAX_CHARS  # of a text that may be long, with its spaces


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError; rich would end the process."""
        raise  # noqa: PLE0704


def new_console() -> Console:
    """Return a console on stdout. With COLUMNS=0, as some schedulers set it, rich would print nothing."""
    console = _Console()
    return console if console.width > 0 else _Console(width=_WIDTH)


def excerpt(text: str, console: Console) -> str:
    """Return the beginning of a text on one printable line."""
    start = text[:_READ_CHARS]
    line = shown(" ".join(start.split()), console)
    return line if len(line) <= MAX_CHARS and len(start) == len(text) else line[: MAX_CHARS - 3] + "..."


def shown(text: str, console: Console) -> str:
    """Return a one-line text in printable form."""
    return encodable(printable(text), console.encoding)


def shown_lines(text: str, console: Console) -> str:
    """Return a text of several lines in printable form."""
    return encodable(printable_lines(text), console.encoding)

"""The rows of a JSONL file that somebody may be writing: each look parses only what is new."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rollover.files import MOST_ROW_BYTES, lines_of, open_regular
from rollover.functions import is_number
from rollover.track.jsonl import parse_row

_NUMBERS = {int, float, type(None)}


class GrowingRows(ABC):
    """Rows with a key "step" of a file that grows, and is cut back or replaced where its run goes on from before.

    Half a line at its end, of a writer at work or killed, is no row yet. `numbers`: each value of a row is a number, or
    None. What becomes of a row is its heirs' matter. `patience`: seconds that a look may take; it takes in one row at
    least, and `share` says how much of the file that makes.
    """

    def __init__(self, path: Path, *, numbers: bool = False) -> None:
        self.path, self.numbers = path, numbers
        self.patience, self.share = float("inf"), 1.0
        self._end, self._last = 0, b""  # how far it is parsed, and the line that ends there

    def look(self) -> None:
        """Take in what is new, as far as patience goes; without a file there is nothing. ValueError for a line that is
        no row."""
        until, self.share = time.monotonic() + self.patience, 1.0
        try:
            with open_regular(self.path) as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:  # cut back meanwhile, and perhaps written on
                    self._start_over()
                    file.seek(0)
                for line in lines_of(file, self.path, MOST_ROW_BYTES):
                    if not line.endswith(b"\n"):
                        break
                    self._add(self._checked(parse_row(self.path, line)))
                    self._end, self._last = self._end + len(line), line
                    if time.monotonic() >= until:
                        self.share = self._end / max(self._end, os.fstat(file.fileno()).st_size)
                        break
        except FileNotFoundError:
            self._start_over()

    def _start_over(self) -> None:
        self._end, self._last = 0, b""
        self._forget()

    def _checked(self, row: dict[str, Any]) -> dict[str, Any]:
        if not is_number(row.get("step")):
            raise ValueError(f"{self.path} has a row without a number of its step: restore the file")
        if self.numbers and not {type(value) for value in row.values()} <= _NUMBERS:
            wrong = next(key for key, value in row.items() if type(value) not in _NUMBERS)
            raise ValueError(f"{self.path} has a row whose {wrong!r} is no number: restore the file")
        return row

    @abstractmethod
    def _forget(self) -> None:
        """There are no rows any more."""

    @abstractmethod
    def _add(self, row: dict[str, Any]) -> None:
        """A row more; those of its step and of later ones were made again."""


class Tail(GrowingRows):
    """All rows as they are. A step that was made again is there once: the newer row stands."""

    def __init__(self, path: Path, *, numbers: bool = False) -> None:
        super().__init__(path, numbers=numbers)
        self._rows: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        """In the order of their steps. ValueError for a line that is no row."""
        self.look()
        return [dict(row) for row in self._rows]

    def _forget(self) -> None:
        self._rows = []

    def _add(self, row: dict[str, Any]) -> None:
        while self._rows and self._rows[-1]["step"] >= row["step"]:
            self._rows.pop()
        # The names are the same in every row: one copy of each.
        self._rows.append({sys.intern(key): value for key, value in row.items()})

"""The rows of a JSONL file that somebody may be writing: each look parses only what is new."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rollover.functions import is_number
from rollover.track.sinks import row_of_line


class Tail:
    """Rows with a key "step" of a file that grows, and is cut back or replaced where its run goes on from before.

    Half a line at its end, of a writer at work or killed, is no row yet. A step that was made again is there once: the
    newer row stands. `numbers`: each value of a row is a number, or None.
    """

    def __init__(self, path: Path, *, numbers: bool = False) -> None:
        self.path, self.numbers = path, numbers
        self._rows: list[dict[str, Any]] = []
        self._end, self._last = 0, b""  # how far it is parsed, and the line that ends there

    def rows(self) -> list[dict[str, Any]]:
        """All of them, in the order of their steps; [] where there is no file. ValueError for a line that is no row."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:  # cut back meanwhile, and perhaps written on
                    self._rows, self._end, self._last = [], 0, b""
                    file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._add(row_of_line(self.path, line))
                    self._end, self._last = self._end + len(line), line
        except FileNotFoundError:
            self._rows, self._end, self._last = [], 0, b""
        return [dict(row) for row in self._rows]

    def _add(self, row: dict[str, Any]) -> None:
        if not is_number(row.get("step")):
            raise ValueError(f"{self.path} has a row without a number of its step: restore the file")
        if self.numbers:
            for key, value in row.items():
                if not (value is None or is_number(value)):
                    raise ValueError(f"{self.path} has a row whose {key!r} is no number: restore the file")
        while self._rows and self._rows[-1]["step"] >= row["step"]:
            self._rows.pop()
        # The names are the same in every row: one copy of each.
        self._rows.append({sys.intern(key): value for key, value in row.items()})

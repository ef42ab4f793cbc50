"""The metrics of a run as columns: the data of curves over 100,000 steps, in little memory.

Rows as dicts take some 15 kB per step. Here the latest rows are dicts, and earlier ones are blocks of numbers: a key
that is constant in a block takes one number, other keys four or eight bytes per step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.run.run_files import GrowingRows

_BLOCK = 256  # steps
_LATEST = 32  # fewest steps that stay rows
_Block = dict[str, np.ndarray]  # key -> [step] values, nan if missing; a single value if all are equal


class Columns(GrowingRows):
    """Columns of the metrics file at `path`, each step once. Call `look` before reading.

    `latest`: newest value of each key, in the order of the first steps with them. `rollbacks`: how often rows were
    removed again, as after a resume.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, numbers=True)
        self.rollbacks = 0
        self._clear()

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Columns:
        """Make columns without a file."""
        made = cls(Path())
        made.extend(rows)
        return made

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows that are in no file."""
        for row in rows:
            self._add(self._checked(dict(row)))

    def __len__(self) -> int:
        return len(self._blocks) * _BLOCK + len(self._rows)

    @property
    def kept(self) -> tuple[int, int]:
        """Number of rows kept as dicts, and bytes of the blocks."""
        return len(self._rows), sum(values.nbytes for block in self._blocks for values in block.values())

    @property
    def newest(self) -> Sequence[Mapping[str, Any]]:
        """The latest rows as dicts, in order."""
        return self._rows[-_LATEST:]

    @property
    def last(self) -> Mapping[str, Any]:
        """The last row, {} without rows."""
        return self._rows[-1] if self._rows else {}

    def column(self, key: str, first: int = 0) -> np.ndarray:
        """Return [step] float64 of a metric from row `first` on, nan if missing."""
        skipped = min(first // _BLOCK, len(self._blocks))
        parts = [np.broadcast_to(block.get(key, np.float64("nan")), _BLOCK) for block in self._blocks[skipped:]]
        rows = np.array([row.get(key) for row in self._rows], np.float64)
        return np.concatenate([*parts, rows])[first - skipped * _BLOCK :].astype(np.float64)

    def rows(self, keys: Sequence[str], first: int = 0) -> Iterator[dict[str, float | None]]:
        """Yield "step" and the existing ones of `keys` for each row from `first` on, None if missing."""
        names = [key for key in ("step", *keys) if key in self.latest]
        for values in zip(*(self.column(key, first).tolist() for key in names), strict=True):
            yield {name: value if value == value else None for name, value in zip(names, values, strict=True)}

    def _clear(self) -> None:
        self.rollbacks += 1
        self.latest: dict[str, Any] = {}
        self._blocks: list[_Block] = []
        self._rows: list[dict[str, Any]] = []

    def _add(self, row: dict[str, Any]) -> None:
        while len(self) and self._rows[-1]["step"] >= row["step"]:
            self._remove_last()
        # One copy of each name in memory.
        self._rows.append({sys.intern(key): value for key, value in row.items()})
        self.latest |= self._rows[-1]
        if len(self._rows) >= _BLOCK + _LATEST:
            self._blocks.append(_packed(self._rows[:_BLOCK]))
            del self._rows[:_BLOCK]

    def _remove_last(self) -> None:
        self.rollbacks += 1
        self._rows.pop()
        if not self._rows and self._blocks:
            block = self._blocks.pop()
            columns = {key: np.broadcast_to(values, _BLOCK).tolist() for key, values in block.items()}
            self._rows = [{key: values[n] for key, values in columns.items()} for n in range(_BLOCK)]
            self._rows = [{key: value for key, value in row.items() if value == value} for row in self._rows]
            for row in self._rows:
                row["step"] = int(row["step"])


def _packed(rows: Sequence[Mapping[str, Any]]) -> _Block:
    found = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = np.array([row.get(key) for row in rows], np.float64)
        small = values.astype(np.float32)
        if np.array_equal(values, np.broadcast_to(values[0], len(values)), equal_nan=True):
            found[key] = values[:1].copy()
        else:
            found[key] = small if np.array_equal(small, values, equal_nan=True) else values
    return found

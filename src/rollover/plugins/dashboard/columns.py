"""The metrics of a run by their keys, as far as they are written: what a curve needs of 100,000 steps, and no more.

Rows as dicts take some 15 kB a step. Here the latest rows are dicts, and all before them are numbers in blocks: of a
key that did not change in a block one number, else four or eight bytes a step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.run.run_files import GrowingRows

_BLOCK = 256  # steps
_LATEST = 32  # steps that are left as rows, at least
_Block = dict[str, np.ndarray]  # of each key its [step] values, nan where there is none; one value where all are alike


class Columns(GrowingRows):
    """Of the file at `path`, each step once. Call `look` before anything else is asked.

    `latest`: of each key that some step has its newest value, in the order of their first steps. `cuts`: how often rows
    went away again, as where a run goes on from before.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, numbers=True)
        self.cuts = 0
        self._clear()

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Columns:
        """Of rows that are in no file."""
        made = cls(Path())
        made.extend(rows)
        return made

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Further rows, which are in no file."""
        for row in rows:
            self._add(self._checked(dict(row)))

    def __len__(self) -> int:
        return len(self._blocks) * _BLOCK + len(self._rows)

    @property
    def kept(self) -> tuple[int, int]:
        """How many rows are kept as they are, and how many bytes the numbers of all others take."""
        return len(self._rows), sum(values.nbytes for block in self._blocks for values in block.values())

    @property
    def newest(self) -> Sequence[Mapping[str, Any]]:
        """The latest rows as they were written, the last one last; some of those that there are."""
        return self._rows[-_LATEST:]

    @property
    def last(self) -> Mapping[str, Any]:
        """The last row; {} before there is one."""
        return self._rows[-1] if self._rows else {}

    def column(self, key: str, first: int = 0) -> np.ndarray:
        """[step] float64 of a metric, from the row number `first` on; nan where a step has none."""
        skipped = min(first // _BLOCK, len(self._blocks))
        parts = [np.broadcast_to(block.get(key, np.float64("nan")), _BLOCK) for block in self._blocks[skipped:]]
        rows = np.array([row.get(key) for row in self._rows], np.float64)
        return np.concatenate([*parts, rows])[first - skipped * _BLOCK :].astype(np.float64)

    def rows(self, keys: Sequence[str], first: int = 0) -> Iterator[dict[str, float | None]]:
        """Of each row, from the number `first` on, "step" and those of these keys that any row has: None where it has
        none itself."""
        names = [key for key in ("step", *keys) if key in self.latest]
        for values in zip(*(self.column(key, first).tolist() for key in names), strict=True):
            yield {name: value if value == value else None for name, value in zip(names, values, strict=True)}

    def _clear(self) -> None:
        self.cuts += 1
        self.latest: dict[str, Any] = {}
        self._blocks: list[_Block] = []
        self._rows: list[dict[str, Any]] = []

    def _add(self, row: dict[str, Any]) -> None:
        while len(self) and self._rows[-1]["step"] >= row["step"]:
            self._take_back()
        # The names are the same in every row: one copy of each.
        self._rows.append({sys.intern(key): value for key, value in row.items()})
        self.latest |= self._rows[-1]
        if len(self._rows) >= _BLOCK + _LATEST:
            self._blocks.append(_packed(self._rows[:_BLOCK]))
            del self._rows[:_BLOCK]

    def _take_back(self) -> None:
        self.cuts += 1
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

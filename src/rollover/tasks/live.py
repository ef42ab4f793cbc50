"""Rows of tasks that a program handed over: a list, a `datasets.Dataset`, or an iterable without a length.

Owns how each is read by row number, as rows.py needs it. Nothing is copied, so later changes by the program are seen.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# The newest rows of an iterable are kept: those looked at before the run, and a task that failed, are read again.
WINDOW = 10_000


class LiveTable:
    """A sequence of dicts as a table. A value that a row lacks is None. ValueError for a row that is no dict."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self.column_names = list(dict.fromkeys(name for i, row in enumerate(rows) for name in _checked(row, i)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**dict.fromkeys(self.column_names), **self._rows[index]}


class LiveStream:
    """Rows of an iterable, in its order. The newest WINDOW rows are held; older ones are read again from the beginning,
    where the iterable allows it. Its columns are those of the first row.

    ValueError where it is empty, and for an older row of an iterator, which cannot begin again.
    """

    num_rows: int | None = None

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = rows
        self._iterator: Iterator[Mapping[str, Any]] = iter(rows)
        self._held: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._num = 0  # rows read so far
        if not self.together(0):
            raise ValueError("the iterable of tasks is empty")
        self._first = self._held[0]
        self.columns = list(self._first)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self.together(index):
            raise IndexError(index)
        return {**dict.fromkeys(self.columns), **self._held[index - self._num]}

    def together(self, index: int) -> range:
        """Row `index` alone, as nothing is shuffled; an empty range behind the last row."""
        if index < self._num - len(self._held):
            if iter(self._rows) is self._rows:
                raise ValueError(
                    f"row {index} of the iterable of tasks is asked for again, but it cannot be begun again (it is an"
                    " iterator, such as a generator): set tasks.epochs = 1, hand over a new one, or an object whose"
                    " __iter__ begins anew"
                )
            self._iterator, self._num = iter(self._rows), 0
            self._held.clear()
        for row in itertools.islice(self._iterator, max(0, index + 1 - self._num)):
            self._held.append(dict(_checked(row, self._num)))
            self._num += 1
        return range(index, min(index + 1, self._num))

    def fingerprint(self, column: str) -> str:
        """A digest of this column in the first row. A change behind it is not noticed."""
        text = json.dumps(self._first[column], default=str)
        return f"an iterable, {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def live_rows(tasks: Any) -> Any:
    """`tasks` as a table (`column_names`, a length, rows by number) or a LiveStream. ValueError if it has no rows."""
    if isinstance(tasks, LiveStream) or hasattr(tasks, "column_names") and hasattr(tasks, "__len__"):
        return tasks
    if isinstance(tasks, str | bytes | Mapping) or not isinstance(tasks, Iterable):
        raise ValueError(f"tasks is a {type(tasks).__name__}: expected dicts with a prompt, in a list or an iterable")
    if isinstance(tasks, Sequence):
        if not tasks:
            raise ValueError("tasks is empty: give at least one dict with a prompt")
        return LiveTable(tasks)
    return LiveStream(tasks)


def _checked(row: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(
            f"tasks: row {index + 1} is a {type(row).__name__}: expected a dict with a prompt, as"
            ' {"prompt": "1 + 1 =", "answer": "2"}'
        )
    return row

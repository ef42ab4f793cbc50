"""metrics.parquet: the rows of metrics.jsonl as one table, a column for each key, for whoever looks at many runs.

metrics.jsonl stays what a run goes on from; the table is written anew from it at every start. Between two steps it is
written at most so often that this takes a five hundredth of the time, and at the end of the process: after a kill it
may be some steps behind, and never torn or twice the same step. Owns its schema (docs/parquet.md).
"""

from __future__ import annotations

import io
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.files import atomic_write_bytes
from rollover.track.jsonl import read_rows
from rollover.track.rollout_table import METADATA, pyarrow_module
from rollover.track.tracker import Cut, Row, Tracker

if TYPE_CHECKING:
    import pyarrow as pa

METRICS, VERSION = "metrics", 1
_INTEGERS = ("step", "policy_version")
_TIMES_ITS_COST = 500  # how much longer than a write the pause after it is, at least


class MetricsTable(Tracker):
    """Writes `path` of the rows of `source`, and of those that it is told. `clock` gives seconds.

    ValueError where pyarrow is not installed.
    """

    def __init__(self, path: Path, source: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.path, self.source, self._clock = path, source, clock
        self._parquet = pyarrow_module("pyarrow.parquet")
        self._columns: dict[str, array[float]] = {}  # nan: the step has no such value
        self._num_rows = 0
        self._unwritten, self._not_before = False, clock()

    def truncate(self, cut: Cut) -> None:
        """`source` has been cut: the table is what that has now."""
        self._columns, self._num_rows = {}, 0
        for row in read_rows(self.source):
            self._add(row)
        if self._num_rows:
            self._write()
        else:
            self.path.unlink(missing_ok=True)

    def on_step(self, row: Row) -> None:
        self._add(row)
        if self._clock() >= self._not_before:
            self._write()

    def close(self) -> None:
        if self._unwritten:
            self._write()

    def _add(self, row: Row) -> None:
        for key in row.keys() - self._columns.keys():
            self._columns[key] = array("d", [float("nan")]) * self._num_rows
        for key, column in self._columns.items():
            value = row.get(key)
            column.append(float("nan") if value is None else value)
        self._num_rows += 1
        self._unwritten = True

    def _write(self) -> None:
        begun, buffer = self._clock(), io.BytesIO()
        self._parquet.write_table(self._table(), buffer, compression="zstd")
        atomic_write_bytes(self.path, buffer.getbuffer())
        now = self._clock()
        self._unwritten, self._not_before = False, now + _TIMES_ITS_COST * (now - begun)

    def _table(self) -> pa.Table:
        import numpy as np

        pa = pyarrow_module()
        names = [*(key for key in _INTEGERS if key in self._columns), *sorted(self._columns.keys() - set(_INTEGERS))]
        columns = []
        for name in names:
            column = pa.array(np.array(self._columns[name]), from_pandas=True)  # nan is null
            columns.append(column.cast(pa.int64()) if name in _INTEGERS else column)
        fields = [(name, column.type) for name, column in zip(names, columns, strict=True)]
        metadata = {METADATA: f"{METRICS}/{VERSION}".encode()}
        return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=metadata))

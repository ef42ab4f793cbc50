"""Rollouts and metrics as Parquet tables. docs/parquet.md describes both schemas.

`rollouts/step-*.parquet`: one row per rollout, with the keys of a JSONL record (track/records.py), but siblings do not
share values, `messages`, `media` and `later_media` are JSON strings, and `extras`, `shaping` and `texts` are maps. So
all files have one schema.

`metrics.parquet`: one column per key of metrics.jsonl, rebuilt from that file at every start. Writes between steps take
at most 1/500 of the time, so after a kill the table may lack some steps; it is never torn and has no step twice.

pyarrow is imported where a table is written or read.
"""

from __future__ import annotations

import io
import json
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.files import atomic_write_bytes
from rollover.text import encodable
from rollover.track.jsonl import read_rows
from rollover.track.token_stats import KEYS
from rollover.track.tracker import Cut, Row, Tracker

if TYPE_CHECKING:
    import pyarrow as pa

ROLLOUTS, ROLLOUTS_VERSION = "rollouts", 5  # under METADATA of every file; each change of the schema increases it
METADATA = b"rollover.schema"
# Earlier schemas: subsets of the columns of this one.
_BEFORE = {f"{ROLLOUTS}/{version}" for version in range(1, ROLLOUTS_VERSION)}
_AS_JSON, _MAPS = ("messages", "media", "later_media"), ("extras", "shaping", "texts")
_MOST_ROWS = 64  # per row group: a reader of a few rows unpacks whole row groups


def pyarrow_module(name: str = "pyarrow") -> Any:
    """Import a module of pyarrow; ValueError if it is not installed."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"Parquet needs the package pyarrow ({error}): pip install 'rollover[parquet]'") from error


@cache
def schema() -> pa.Schema:
    """Return the schema of rollouts/*.parquet."""
    pa = pyarrow_module()
    numbers = pa.map_(pa.string(), pa.float64())
    sampling = {"temperature": pa.float64(), "top_p": pa.float64(), "top_k": pa.int64(), "min_p": pa.float64()}
    segment = {
        "policy_version": pa.int64(),
        "num_tokens": pa.int32(),
        "stop_reason": pa.string(),
        "trainable": pa.bool_(),
        "sampling": pa.struct(list(sampling.items())),
    }
    credit = {
        "compared": pa.int32(),
        "reward": pa.float64(),
        "terms": numbers,
        "kl_penalty": pa.float64(),
        "left_out": pa.string(),
    }
    fields = {
        "rollout_id": pa.string(),
        "group_id": pa.int64(),
        "sibling": pa.int32(),
        "role": pa.string(),
        "trajectory": pa.int32(),
        "context": pa.int32(),
        "group_size": pa.int32(),
        "task_id": pa.string(),
        "attempt": pa.int32(),
        "source": pa.string(),
        "reward": pa.string(),
        "step": pa.int64(),
        "outcome": pa.string(),
        "messages": pa.string(),
        "prompt": pa.string(),
        "plain": pa.bool_(),
        "columns": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "media": pa.string(),
        "later_media": pa.string(),
        "completion": pa.string(),
        "score": pa.float64(),
        "extras": numbers,
        "shaping": numbers,
        "texts": pa.map_(pa.string(), pa.string()),
        "error": pa.string(),
        "turns": pa.list_(pa.float64()),
        "advantage": pa.float64(),
        "credit": pa.struct(list(credit.items())),
        "stop_reason": pa.string(),
        "num_tokens": pa.int32(),
        "segments": pa.list_(pa.struct(list(segment.items()))),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        **dict.fromkeys(("loss_mask", "rejected"), pa.list_(pa.int32())),
        **dict.fromkeys(KEYS[2:], pa.list_(pa.float32())),
    }
    return pa.schema(list(fields.items()), metadata={METADATA: f"{ROLLOUTS}/{ROLLOUTS_VERSION}".encode()})


def append_rollouts(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the file, or append rows to it. Each record has the values that siblings share.

    The file is replaced as a whole: a kill leaves the previous one.
    """
    pa = pyarrow_module()
    table = pa.Table.from_pylist([_row(record) for record in records], schema=schema())
    _write_table(path, pa.concat_tables([_read(path), table]) if path.exists() else table)


def remove_groups(path: Path, is_repeated: Callable[[int], bool]) -> None:
    """Rewrite the file without the groups for which `is_repeated` is true."""
    table = _read(path)
    kept = [not is_repeated(group_id) for group_id in table["group_id"].to_pylist()]
    if not all(kept):
        _write_table(path, table.filter(pyarrow_module().array(kept, "bool")))


def read_table_rows(path: Path, rows: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, or those of the given row numbers, with the values that siblings share.

    ValueError for another kind of file.
    """
    for row in (_read(path) if rows is None else _read(path, rows=rows)).to_pylist():
        try:
            shown = {name: json.loads(row[name]) for name in _AS_JSON if row[name] is not None}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not recorded rollouts: {error}") from error
        shown |= {name: dict(row[name]) for name in _MAPS if row[name] is not None}
        if (credit := row["credit"]) is not None and credit["terms"] is not None:
            shown["credit"] = credit | {"terms": dict(credit["terms"])}
        yield row | shown


def read_columns(path: Path, names: Collection[str]) -> dict[str, list[Any]]:
    """Read some columns of a file; ValueError for another kind of file."""
    table = _read(path, list(names))
    return {name: table[name].to_pylist() for name in names}


def _read(path: Path, names: list[str] | None = None, rows: Sequence[int] | None = None) -> pa.Table:
    """`names`: columns; `rows`: row numbers in the order of the result; None: all."""
    parquet = pyarrow_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            found = (file.schema_arrow.metadata or {}).get(METADATA, b"nothing").decode()
            if found not in {f"{ROLLOUTS}/{ROLLOUTS_VERSION}", *_BEFORE}:
                raise ValueError(f"its schema is {found}, and {ROLLOUTS}/{ROLLOUTS_VERSION} is what this version reads")
            table = file.read(columns=names) if rows is None else _rows_of(file, names, rows)
            return table if found not in _BEFORE else _with_all_columns(table, names)
    except (pyarrow_module().ArrowException, ValueError) as error:
        raise ValueError(f"{path}: not recorded rollouts: {error}") from error


def _rows_of(file: Any, names: list[str] | None, rows: Sequence[int]) -> pa.Table:
    """Read only the row groups that contain one of `rows`."""
    groups: list[int] = []
    place_of: dict[int, int] = {}  # row number -> index in the table that is read
    begin = taken = 0
    for group in range(file.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        if any(begin <= row < end for row in rows):
            place_of |= {begin + place: taken + place for place in range(end - begin)}
            groups.append(group)
            taken += end - begin
        begin = end
    if missing := [row for row in rows if row not in place_of]:
        raise ValueError(f"it has no row {missing[0]}")
    return file.read_row_groups(groups, columns=names).take([place_of[row] for row in rows])


def _with_all_columns(table: pa.Table, names: list[str] | None) -> pa.Table:
    """Add the missing columns of an earlier schema as nulls."""
    pa, wanted = pyarrow_module(), schema()
    fields = [of for of in wanted if names is None or of.name in names]
    has = set(table.column_names)
    columns = [table[of.name] if of.name in has else pa.nulls(len(table), of.type) for of in fields]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=wanted.metadata))


def _write_table(path: Path, table: pa.Table) -> None:
    buffer = io.BytesIO()
    pyarrow_module("pyarrow.parquet").write_table(table, buffer, compression="zstd", row_group_size=_MOST_ROWS)
    atomic_write_bytes(path, buffer.getbuffer())


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: json.dumps(record[name], ensure_ascii=False) for name in _AS_JSON if record[name] is not None}
    shown |= {name: list(record[name].items()) for name in _MAPS if record[name] is not None}
    if (credit := record["credit"]) is not None and credit["terms"] is not None:
        shown["credit"] = credit | {"terms": _utf8(list(credit["terms"].items()))}
    return {name: _utf8(shown.get(name, value)) for name, value in record.items()}


def _utf8(value: Any) -> Any:
    # A lone surrogate is not UTF-8; a failed write would end the run.
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return [(_utf8(name), _utf8(of)) for name, of in value]
    return value


METRICS, METRICS_VERSION = "metrics", 1
_INTEGERS = ("step", "policy_version")
_TIMES_ITS_COST = 500  # shortest pause after a write, as a multiple of its time


class MetricsTable(Tracker):
    """Tracker that writes the rows of `source` and of later steps to `path`. `clock` returns seconds.

    ValueError if pyarrow is not installed.
    """

    def __init__(self, path: Path, source: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.path, self.source, self._clock = path, source, clock
        self._parquet = pyarrow_module("pyarrow.parquet")
        self._columns: dict[str, array[float]] = {}  # nan: missing
        self._num_rows = 0
        self._unwritten, self._not_before = False, clock()

    def truncate(self, cut: Cut) -> None:
        """Rebuild the table from `source`, which is truncated before."""
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
        metadata = {METADATA: f"{METRICS}/{METRICS_VERSION}".encode()}
        return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=metadata))

"""Rows of JSON and CSV files, with the types of the files: a text that looks like a date stays a text.

Libraries that read tables guess the type of a column, and convert its values.

    JSON lines, or one list   JSON's types; integers of any size
    CSV                       texts

Files may be gzipped, or fsspec URLs. For access by number, rows are written to a temporary file, a line of JSON each,
and only their offsets are kept in memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import IO, Any

JSON_SUFFIXES, CSV_SUFFIXES = (".jsonl", ".json", ".ndjson"), (".csv",)
_FIELD_CHARS = 2**31 - 1
Row = dict[str, Any]


class TextTable:
    """Rows by number. `column_names`: of all rows; missing values are None. ValueError, with file and row, for an
    invalid row."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="rollover-rows-")
        self._starts = array("q", [0])
        columns: dict[str, None] = {}
        for path in paths:
            for row in rows_of(path):
                columns |= dict.fromkeys(row)
                line = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
                self._starts.append(self._starts[-1] + self._file.write(line))
        self._file.flush()
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Row:
        start = self._starts[index]
        line = os.pread(self._file.fileno(), self._starts[index + 1] - start, start)
        row = json.loads(line.decode("utf-8", "surrogatepass"))
        return {name: row.get(name) for name in self.column_names}


class TextStream:
    """Rows in order, read on demand and not stored."""

    column_names = None

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def skip(self, num: int) -> Iterator[Row]:
        """Iterate over the rows after the first `num`."""
        return itertools.islice(itertools.chain.from_iterable(map(rows_of, self._paths)), num, None)


def rows_of(path: str) -> Iterator[Row]:
    """Yield the rows of one file."""
    import fsspec

    opened: Any = fsspec.open(path, "rb", compression="infer")
    suffix = suffix_of(path)
    try:
        with opened as file:
            yield from _of_csv(path, file) if suffix in CSV_SUFFIXES else _of_json(path, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: it is no gzip file, or is cut off: {error}") from error


def _of_json(path: str, file: IO[bytes]) -> Iterator[Row]:
    lines = enumerate(file, 1)
    first, line = next(((n, line) for n, line in lines if line.strip()), (0, b""))
    text = line.removeprefix(b"\xef\xbb\xbf")
    if text.lstrip().startswith(b"[") or (text.strip() == b"{" and path.lower().endswith((".json", ".json.gz"))):
        yield from _of_whole(path, text + b"".join(rest for _, rest in lines))
        return
    for number, content in itertools.chain([(first, text)] if text else [], lines):
        if content.strip():
            yield _row(_parsed(path, content, f"line {number}"), path, f"line {number}")


def _of_whole(path: str, content: bytes) -> Iterator[Row]:
    """Yield the rows of one JSON value: a list of rows, or one row."""
    found = _parsed(path, content, "it")
    for number, row in enumerate(found if isinstance(found, list) else [found], 1):
        yield _row(row, path, f"row {number}")


def _of_csv(path: str, file: IO[bytes]) -> Iterator[Row]:
    csv.field_size_limit(min(_FIELD_CHARS, sys.maxsize))
    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = cells
                if twice := next((name for name in header if header.count(name) > 1), None):
                    raise ValueError(f"{path}, line 1: the column {twice!r} is there twice: rename one")
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(cells)} values for {len(header)} columns"
                    f" ({', '.join(header)}): quote values with commas"
                )
            yield dict(zip(header, cells, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, line {reader.line_num + 1}: it is no CSV: {error}") from error


def _parsed(path: str, content: bytes, what: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, {what} is no JSON: {error}") from error


def _row(found: Any, path: str, what: str) -> Row:
    if not isinstance(found, dict):
        raise ValueError(f"{path}, {what} is {_kind(found)}: a row is a JSON object, with a name for each column")
    return found


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), f"the value {value!r:.50}")


def suffix_of(path: str) -> str:
    """Return the suffix of a file's name in lower case, without that of a compression."""
    return PurePosixPath(path.lower().removesuffix(".gz")).suffix


def is_text(paths: Iterable[str]) -> bool:
    """Return whether all of these files are JSON or CSV."""
    suffixes = set(map(suffix_of, paths))
    return bool(suffixes) and suffixes <= {*JSON_SUFFIXES, *CSV_SUFFIXES}

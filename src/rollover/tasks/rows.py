"""The rows of a dataset: a file, a folder of files, or a data set of the hub, on disk or streamed; or live rows, which
the user's program passed: a list, a `datasets.Dataset`, or an iterable without a length.

text_rows.py reads local JSON and CSV, the library `datasets` everything else. Rows keep the order of their files;
dataset.py interprets them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.files import did_you_mean_path, local_path
from rollover.live_objects import is_live, live_object
from rollover.system import hub_is_away
from rollover.tasks.text_rows import CSV_SUFFIXES, JSON_SUFFIXES, TextStream, TextTable, is_text, suffix_of

# Rows of a stream that are read together, and shuffled together.
STREAM_ROWS = 1000
# Newest rows of an iterable that are kept: rows that were read before the run, and a task that failed, are read again.
WINDOW = 10_000
_BUILDERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}
_HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


@dataclass(frozen=True)
class TableLocation:
    """Location of a table of rows.

    `path`: a file, a folder or a hub id; a local path is relative to `base_dir`. `key`: its option in `table`. `subset`
    and `split` select within a folder or a data set of the hub; a file has one split, train.
    """

    path: str
    subset: str = ""
    split: str = "train"
    streaming: bool = False
    key: str = "path"
    base_dir: str | os.PathLike[str] = "."
    table: str = "tasks.sources"

    @property
    def option(self) -> str:
        return f"{self.table}.{self.key} = {self.path!r}"

    @property
    def folder(self) -> Path | None:
        """Base of relative paths in its rows; None if they are on another machine."""
        if is_live(self.path):
            return local_path("")
        local = local_path(self.path, self.base_dir)
        if "://" in self.path or not local.exists():
            return None
        return local if local.is_dir() else local.parent


class StoredRows:
    """All rows of a table: a memory-mapped Arrow table on disk, or live rows with a length."""

    def __init__(self, table: Any) -> None:
        self._table = _Encoded(table) if _has_images(getattr(table, "features", None)) else table
        self.columns: list[str] = table.column_names
        self.num_rows: int | None = len(table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._table[index])

    def together(self, index: int) -> range:
        """Return the rows that are shuffled together with row `index`: all of them."""
        return range(len(self._table))

    def fingerprint(self, column: str) -> str:
        """Return the number of rows and a digest of this column in up to 1,000 evenly spaced rows, which changes with
        the file and the order."""
        num = len(self._table)
        return f"{num} rows, {_digest(self._table[i][column] for i in range(0, num, max(1, num // 1000)))}"


class _Encoded:
    """The rows of a data set with images as {"bytes", "path"}, which the library would decode."""

    def __init__(self, table: Any) -> None:
        self.column_names: list[str] = table.column_names
        self._arrow = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._arrow)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._arrow[index].to_pylist()[0]


class StreamedRows:
    """Rows that are read on demand, STREAM_ROWS at a time. Jumping to other rows reads again from the first row.

    `num_rows` is None: the length of a stream is unknown. ValueError, with `place`, if it is empty or unreadable.
    """

    num_rows: int | None = None

    def __init__(self, stream: Any, place: TableLocation) -> None:
        self._stream, self._place = stream, place
        self._held: list[dict[str, Any]] = []
        self._start = 0
        self._ahead: Iterator[dict[str, Any]] | None = None
        self._read(0)
        if not self._held:
            raise ValueError(f"{place.option} has no rows")
        self._first = self._held
        self.columns: list[str] = stream.column_names or list(self._held[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._held[index - self.together(index).start])

    def together(self, index: int) -> range:
        """Return the rows that are shuffled together with row `index`; a range without `index` beyond the last row."""
        start = index - index % STREAM_ROWS
        if start != self._start:
            self._read(start)
        return range(start, start + len(self._held))

    def fingerprint(self, column: str) -> str:
        """Return a digest of this column in the first STREAM_ROWS rows only."""
        return f"streamed, {_digest(row[column] for row in self._first)}"

    def _read(self, start: int) -> None:
        if self._ahead is None or start != self._start + len(self._held):
            self._ahead = iter(self._stream.skip(start))
        try:
            self._held = list(itertools.islice(self._ahead, STREAM_ROWS))
        except Exception as error:  # boundary: the network, and every format, have errors of their own
            self._ahead = None
            raise ValueError(
                f"{self._place.option} cannot be read from row {start + 1} on: {type(error).__name__}: {error}"
            ) from error
        self._start = start


class LiveTable:
    """A sequence of dicts as a table, not copied. Missing values are None. ValueError for a row that is no dict."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self.column_names = list(dict.fromkeys(name for i, row in enumerate(rows) for name in _checked(row, i)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**dict.fromkeys(self.column_names), **self._rows[index]}


class LiveStream:
    """Rows of an iterable, in its order; its columns are those of the first row. The newest WINDOW rows are kept; older
    ones are read again from the beginning.

    ValueError if it is empty, and for an older row of an iterator, which cannot be restarted.
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
        """Return the range of row `index` only, since nothing is shuffled; an empty range beyond the last row."""
        if index < self._num - len(self._held):
            if iter(self._rows) is self._rows:
                raise ValueError(
                    f"row {index} of the iterable of tasks is needed again, but it cannot be restarted (it is an"
                    " iterator, such as a generator): set tasks.epochs = 1, or pass a new one, or an object whose"
                    " __iter__ returns a new iterator"
                )
            self._iterator, self._num = iter(self._rows), 0
            self._held.clear()
        for row in itertools.islice(self._iterator, max(0, index + 1 - self._num)):
            self._held.append(dict(_checked(row, self._num)))
            self._num += 1
        return range(index, min(index + 1, self._num))

    def fingerprint(self, column: str) -> str:
        """Return a digest of this column in the first row only."""
        text = json.dumps(self._first[column], default=str)
        return f"an iterable, {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


Rows = StoredRows | StreamedRows | LiveStream


def open_rows(place: TableLocation) -> Rows:
    """Open the rows at `place`. ValueError, with the option and the fix, if that fails."""
    if is_live(place.path):
        rows = live_rows(live_object(place.path))
        return rows if isinstance(rows, LiveStream) else StoredRows(rows)
    if files := _text_files(place):
        return _open_text(place, files)
    try:
        import datasets
        from datasets import config
        from datasets.exceptions import DatasetGenerationError
    except ModuleNotFoundError as error:
        raise ValueError("tasks.sources.kind = 'dataset' needs the package datasets: pip install datasets") from error
    builder = _BUILDERS.get(suffix_of(place.path))
    if builder is None:
        where, away = _folder_or_id(place)
    else:
        where, away = {"path": builder, "data_files": _file(place)}, ""
    load: Any = datasets.load_dataset
    bars, offline = datasets.is_progress_bar_enabled(), config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    config.HF_HUB_OFFLINE = offline or bool(away)  # else the library retries the hub for half a minute
    try:
        found = load(**where, split=place.split, streaming=place.streaming)
        return StreamedRows(_encoded_stream(found), place) if place.streaming else StoredRows(found)
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        raise ValueError(f"{place.option} cannot be read as {builder or 'a data set'}: {cause}") from error
    except (ValueError, OSError) as error:
        if str(error).startswith(place.option) or getattr(error, "errno", None):  # ours, or the machine's: a full disk
            raise
        if away:
            raise ValueError(f"{place.option}: no data set of that name is in the cache, and {away}") from error
        if builder is None:
            choice = "tasks.sources.subset and .split choose among what it has"
            raise ValueError(f"{place.option} cannot be loaded: {error}. {choice}") from error
        # The library's error for a file with columns only.
        raise ValueError(f"{place.option} has no rows, or none that can be read: {error}") from error
    finally:
        config.HF_HUB_OFFLINE = offline
        if bars:
            datasets.enable_progress_bars()


def _text_files(place: TableLocation) -> list[str]:
    """Return the JSON or CSV files at `place`: a file, or a folder with only such files for the split."""
    if suffix_of(place.path) in (*JSON_SUFFIXES, *CSV_SUFFIXES):
        return [_file(place)]
    folder = local_path(place.path, place.base_dir)
    if not folder.is_dir():
        return []
    try:
        found = _files_of_folder(folder, place.subset)
    except (ImportError, OSError, ValueError):  # the library will report the error
        return []
    files = [str(path) for path in found.get(place.split, [])]
    return files if is_text(files) else []


def _files_of_folder(folder: Path, subset: str) -> Mapping[str, Any]:
    """Return the data files by split, as `datasets` finds them; {} if the folder's card configures their reading."""
    from datasets import BuilderConfig, load_dataset_builder
    from datasets.data_files import DataFilesDict, get_data_patterns

    if not subset and not any((folder / name).exists() for name in ("README.md", ".huggingface.yaml")):
        return DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    with tempfile.TemporaryDirectory() as cache:
        config = load_dataset_builder(str(folder), subset or None, cache_dir=cache).config
    said = {field.name for field in dataclasses.fields(BuilderConfig)}
    plain = type(config)(**{name: getattr(config, name) for name in said})
    return (config.data_files or {}) if config == plain else {}


def _open_text(place: TableLocation, files: list[str]) -> Rows:
    try:
        if place.streaming:
            return StreamedRows(TextStream(files), place)
        table = TextTable(files)
    except ValueError as error:
        raise (
            error if str(error).startswith(place.option) else ValueError(f"{place.option} cannot be read: {error}")
        ) from error
    if not len(table):
        raise ValueError(f"{place.option} has no rows")
    return StoredRows(table)


def _file(place: TableLocation) -> str:
    """Return the file's location for the library. ValueError for a missing or empty file."""
    import fsspec

    for name, value in (("subset", place.subset), ("split", place.split.partition("[")[0] != "train")):
        if value:
            raise ValueError(f"{place.table}.{name} has no effect: {place.path!r} is a file, which has none. Remove it")
    located = place.path if "://" in place.path else str(local_path(place.path, place.base_dir))
    try:
        filesystem, inside = fsspec.core.url_to_fs(located)
    except (ValueError, ImportError) as error:  # unknown protocol, or its package is not installed
        raise ValueError(f"{place.option} cannot be opened: {error}") from error
    if not filesystem.isfile(inside):
        near = "" if "://" in place.path else did_you_mean_path(located, _BUILDERS)
        raise ValueError(f"{place.option}: there is no such file{near}")
    if filesystem.size(inside) == 0:
        raise ValueError(f"{place.option} is empty")
    return located


def _folder_or_id(place: TableLocation) -> tuple[dict[str, Any], str]:
    """Return the library's arguments for a folder or a data set of the hub, and why the hub is unreachable, or ""."""
    local = local_path(place.path, place.base_dir)
    arguments = {"path": str(local), "name": place.subset or None}
    if local.is_dir():
        return arguments, ""
    if local.exists() or not re.fullmatch(_HUB_ID, place.path):
        raise ValueError(
            f"{place.option}: expected a file ending in {', '.join(_BUILDERS)}, a folder with such files, or a data set"
            " of the hub (owner/name)"
        )
    if local.parent.is_dir():
        raise ValueError(f"{place.option}: there is no such file or folder{did_you_mean_path(local)}")
    away = hub_is_away()
    if away and place.streaming:
        raise ValueError(f"{place.option}: it is streamed from the hub, and {away}")
    return arguments | {"path": place.path}, away


def row_name(place: TableLocation, index: int) -> str:
    """Return the name of row `index` in messages, counted from 1; its line in a file of JSON lines."""
    lines = suffix_of(place.path) in (".jsonl", ".ndjson")
    return f"dataset {place.path!r}, {'line' if lines else 'row'} {index + 1}"


def _encoded_stream(stream: Any) -> Any:
    return stream.decode(False) if _has_images(stream.features) else stream


def _has_images(feature: Any) -> bool:
    """Whether the library `datasets` decodes values of a feature (a table, a list) as images."""
    if isinstance(feature, Mapping | list):
        return any(map(_has_images, feature.values() if isinstance(feature, Mapping) else feature))
    return type(feature).__name__ == "Image" or _has_images(getattr(feature, "feature", {}))


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(json.dumps(value, default=_text_of).encode())
    return digest.hexdigest()


def _text_of(value: Any) -> str:
    """Return a text for a value that is not JSON, equal in all processes."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    return f"an image of {value.size}" if hasattr(value, "getbands") else str(value)


def live_rows(tasks: Any) -> Any:
    """Wrap live rows as a table (`column_names`, a length, rows by number) or a LiveStream. ValueError without rows."""
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

"""The rows of a dataset: a file, a folder of files, or a data set of the hub, on disk or streamed; or rows that a
program handed over (live.py). Local JSON and CSV are read by text_rows.py, all else by the library `datasets`.

Owns how a dataset is found and opened, and the error messages where it cannot be. Knows no prompt and no answer
(dataset.py does), and never shuffles: rows keep the order of their files.
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

# Rows of a stream that are held at once, and so shuffled among each other.
STREAM_ROWS = 1000
# The newest rows of an iterable are kept: those looked at before the run, and a task that failed, are read again.
WINDOW = 10_000
_BUILDERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}
_HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


@dataclass(frozen=True)
class Table:
    """A table of rows, by where it is.

    `path` is a file, a folder or a hub id, relative to `base_dir` if it is local; `key` is the option of `table` that
    gave it. `subset` and `split` choose within a folder or a data set of the hub; a file has one split, train.
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
        """Where relative paths in its rows begin; None where they are on another machine."""
        if is_live(self.path):
            return local_path("")
        local = local_path(self.path, self.base_dir)
        if "://" in self.path or not local.exists():
            return None
        return local if local.is_dir() else local.parent


class StoredRows:
    """All rows of a table: a memory-mapped Arrow table on disk, or a list that the program handed over."""

    def __init__(self, table: Any) -> None:
        self._table = _Encoded(table) if _has_images(getattr(table, "features", None)) else table
        self.columns: list[str] = table.column_names
        self.num_rows: int | None = len(table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._table[index])

    def together(self, index: int) -> range:
        """The rows that are shuffled among each other with row `index`: all of them."""
        return range(len(self._table))

    def fingerprint(self, column: str) -> str:
        """The number of rows and a digest of this column in up to 1,000 rows, evenly spaced. It tells another file, and
        another order, from the one of before."""
        num = len(self._table)
        return f"{num} rows, {_digest(self._table[i][column] for i in range(0, num, max(1, num // 1000)))}"


class _Encoded:
    """The rows of a data set with images as they are stored, as {"bytes", "path"}: the library would decode them."""

    def __init__(self, table: Any) -> None:
        self.column_names: list[str] = table.column_names
        self._arrow = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._arrow)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._arrow[index].to_pylist()[0]


class StreamedRows:
    """Rows that are read as they are needed, STREAM_ROWS at a time. A row behind those, or far ahead of them, costs
    reading again from the first row.

    `num_rows` is None: the length of a stream is unknown. ValueError, which names `place`, where it is empty or cannot
    be read.
    """

    num_rows: int | None = None

    def __init__(self, stream: Any, place: Table) -> None:
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
        """The rows that are shuffled among each other with row `index`. Behind the last row: a range
        without `index`."""
        start = index - index % STREAM_ROWS
        if start != self._start:
            self._read(start)
        return range(start, start + len(self._held))

    def fingerprint(self, column: str) -> str:
        """A digest of this column in the first STREAM_ROWS rows. A change behind them is not noticed."""
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


Rows = StoredRows | StreamedRows | LiveStream


def open_rows(place: Table) -> Rows:
    """Opens the rows at `place`. ValueError, which names the option and the fix, where that fails."""
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
    config.HF_HUB_OFFLINE = offline or bool(away)  # else the hub would be tried again for half a minute
    try:
        found = load(**where, split=place.split, streaming=place.streaming)
        return StreamedRows(_encoded_stream(found), place) if place.streaming else StoredRows(found)
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        raise ValueError(f"{place.option} cannot be read as {builder or 'a data set'}: {cause}") from error
    except (ValueError, OSError) as error:
        if str(error).startswith(place.option) or getattr(error, "errno", None):  # said, or of the machine: a full disk
            raise
        if away:
            raise ValueError(f"{place.option}: no data set of that name is in the cache, and {away}") from error
        if builder is None:
            choice = "tasks.sources.subset and .split choose among what it has"
            raise ValueError(f"{place.option} cannot be loaded: {error}. {choice}") from error
        # What the library makes of a file with columns only.
        raise ValueError(f"{place.option} has no rows, or none that can be read: {error}") from error
    finally:
        config.HF_HUB_OFFLINE = offline
        if bars:
            datasets.enable_progress_bars()


def _text_files(place: Table) -> list[str]:
    """The files of JSON or CSV at `place`: it is one, or a folder that has no others for the split."""
    if suffix_of(place.path) in (*JSON_SUFFIXES, *CSV_SUFFIXES):
        return [_file(place)]
    folder = local_path(place.path, place.base_dir)
    if not folder.is_dir():
        return []
    try:
        found = _files_of_folder(folder, place.subset)
    except (ImportError, OSError, ValueError):  # the library says what is wrong
        return []
    files = [str(path) for path in found.get(place.split, [])]
    return files if is_text(files) else []


def _files_of_folder(folder: Path, subset: str) -> Mapping[str, Any]:
    """The data files by split, as datasets finds them. None where its card says how they are to be read."""
    from datasets import BuilderConfig, load_dataset_builder
    from datasets.data_files import DataFilesDict, get_data_patterns

    if not subset and not any((folder / name).exists() for name in ("README.md", ".huggingface.yaml")):
        return DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    with tempfile.TemporaryDirectory() as cache:
        config = load_dataset_builder(str(folder), subset or None, cache_dir=cache).config
    said = {field.name for field in dataclasses.fields(BuilderConfig)}
    plain = type(config)(**{name: getattr(config, name) for name in said})
    return (config.data_files or {}) if config == plain else {}


def _open_text(place: Table, files: list[str]) -> Rows:
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


def _file(place: Table) -> str:
    """The file's location as the library takes it. ValueError where it does not exist or is empty."""
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


def _folder_or_id(place: Table) -> tuple[dict[str, Any], str]:
    """The library's arguments for a folder of files or a data set of the hub, and why the hub cannot be reached ("": it
    can)."""
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


def place_of_row(place: Table, index: int) -> str:
    """How a message names row `index`, counted from 1: by its line in a file of JSON lines."""
    lines = suffix_of(place.path) in (".jsonl", ".ndjson")
    return f"dataset {place.path!r}, {'line' if lines else 'row'} {index + 1}"


def _encoded_stream(stream: Any) -> Any:
    return stream.decode(False) if _has_images(stream.features) else stream


def _has_images(feature: Any) -> bool:
    """Whether values of a feature of the library `datasets` (of its table, a list) are decoded as images."""
    if isinstance(feature, Mapping | list):
        return any(map(_has_images, feature.values() if isinstance(feature, Mapping) else feature))
    return type(feature).__name__ == "Image" or _has_images(getattr(feature, "feature", {}))


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(json.dumps(value, default=_text_of).encode())
    return digest.hexdigest()


def _text_of(value: Any) -> str:
    """What stands for a value that is not JSON: the same in every process."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    return f"an image of {value.size}" if hasattr(value, "getbands") else str(value)


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

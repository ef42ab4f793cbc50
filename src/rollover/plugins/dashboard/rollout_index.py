"""Index of all recorded rollouts, some hundred bytes each: values to sort and filter by, and the place of the record.

    rollouts/step-*.jsonl, .parquet ──short values──▶ entries (one array) ──place──▶ record (read again)

Texts and tokens are read only for single records. Unchanged files are not read again, so a live run can be queried
often.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rollover.files import line_of, lines_of, open_regular
from rollover.plugins.dashboard.numbers import WordIndex, structured
from rollover.track.parquet import read_columns, read_table_rows
from rollover.track.records import StepFile, invalid_record, own_prompt_fields, records_of, shared_fields, step_files

NO_VERSION = int(np.iinfo("i4").min)  # not -1: versions may be negative (checkpoint.lost_steps = "roll_back")
UNFINISHED = "unfinished"
# One rollout. `place`: offset of its line, or number of its row. `head`: place of its group's first line. `outcome`,
# `source`, `stop`, `role`: codes of `RolloutIndex.words`; `stop` without a stop reason: UNFINISHED. `oldest`, `newest`:
# policy versions of its sampled tokens, NO_VERSION without any. `score`, `advantage`: nan if missing.
ENTRY = np.dtype(
    [
        ("file", "i4"), ("place", "i8"), ("head", "i8"), ("step", "i4"), ("group_id", "i8"), ("sibling", "i4"),
        ("trajectory", "i4"), ("context", "i4"), ("num_tokens", "i4"), ("segments", "i4"), ("oldest", "i4"),
        ("newest", "i4"), ("score", "f8"), ("advantage", "f8"), ("outcome", "i2"), ("source", "i2"), ("stop", "i2"),
        ("role", "i2"),
    ]
)  # fmt: skip
_COLUMNS = (
    "step", "group_id", "sibling", "trajectory", "context", "num_tokens", "segments", "score", "advantage", "outcome",
    "source", "stop_reason", "role",
)  # fmt: skip
_KINDS = {"completion": str, "columns": str, "segments": list, "prompt_ids": list, "token_ids": list, "logprobs": list}
# Begins the largest, unneeded part of a line; a string cannot contain these quotes unescaped.
_TOKENS = b', "token_ids": ['


@dataclass(frozen=True, slots=True, eq=False)  # identity: the file was not read again
class IndexedFile:
    """A file's part of the index, with its size and modification time when it was read."""

    stamp: tuple[int, int]
    entries: np.ndarray


class RolloutIndex:
    """Index of the folder `rollouts/` of a run, which may be missing or growing.

    `patience`: seconds for reading new files, at least one at a time, in the order of steps. `share`: share of the
    files that are read.
    """

    def __init__(self, dir: Path) -> None:
        self.dir, self.patience, self.share = dir, float("inf"), 1.0
        self.words = WordIndex()  # "trained", "dropped:stale", "eos", names of sources
        self._files: list[StepFile] = []
        self._seen: dict[Path, IndexedFile] = {}
        self._entries: np.ndarray | None = None

    def entries(self) -> np.ndarray:
        """Return an array of ENTRY in the order in which the rollouts left the run, as far as they are read.

        ValueError for a damaged file.
        """
        files, until = step_files(self.dir), time.monotonic() + self.patience
        before, read, skipped = self._seen, False, 0
        seen: dict[Path, IndexedFile] = {}
        for file in files:
            known = file.path in before
            if not known and read and time.monotonic() >= until:
                skipped += 1  # known files are still checked for changes
                continue
            if (of := self._look(file)) is not None:
                seen[file.path] = of
            read = read or not known
        self.share = 1.0 - skipped / max(1, len(files))
        same = self._entries is not None and [*seen.values()] == [*before.values()]
        self._seen, self._files = seen, [file for file in files if file.path in seen]
        if not same:
            parts = []
            for number, file in enumerate(self._files):
                part = seen[file.path].entries
                part["file"] = number
                parts.append(part)
            self._entries = np.concatenate([np.zeros(0, ENTRY), *parts])
        assert self._entries is not None
        return self._entries

    def look_at_step(self, step: int) -> None:
        """Read the files of this step now, regardless of patience."""
        for file in step_files(self.dir):
            if file.step == step and file.path not in self._seen and (of := self._look(file)) is not None:
                self._seen[file.path], self._entries = of, None

    def record(self, entry: np.void) -> dict[str, Any]:
        """Return the record of an entry, with texts and tokens, as `Run.records` does.

        ValueError if its file is missing or damaged.
        """
        (record,) = self.records_of(np.array([entry], ENTRY))
        return record

    def records_of(self, entries: np.ndarray) -> list[dict[str, Any]]:
        """Return the record of each entry, opening each file once."""
        found: list[dict[str, Any]] = [{}] * len(entries)
        for file in np.unique(entries["file"]):
            of_file = np.flatnonzero(entries["file"] == file)
            path = self._files[int(file)].path
            read = _table_records if path.suffix == ".parquet" else _line_records
            try:
                for place, record in zip(of_file, read(path, entries[of_file]), strict=True):
                    found[place] = record | {"columns": json.loads(record["columns"])}
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}: the rollout cannot be read any more ({what}): look again") from error
        return found

    def path(self, entry: np.void) -> Path:
        """Return the file of an entry."""
        return self._files[int(entry["file"])].path

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all records."""
        for file in step_files(self.dir):
            yield from records_of(file.path)

    def word(self, number: int) -> str:
        """Return the word of a code in "outcome", "source", "stop" or "role"."""
        return self.words[number]

    def _look(self, file: StepFile) -> IndexedFile | None:
        """Read a file's part if it changed; None if the file is gone, as after a rollback."""
        try:
            status = file.path.stat()
            stamp = status.st_size, status.st_mtime_ns
            before = self._seen.get(file.path)
            if before is not None and before.stamp == stamp:
                return before
            rows = _table_heads(file.path) if file.path.suffix == ".parquet" else _line_heads(file.path)
            return IndexedFile(stamp, structured([self._entry(*row) for row in rows], ENTRY))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if str(error).startswith(str(file.path)):  # the message has the file already
                raise
            what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{file.path}: it has no recorded rollouts: {what}") from error

    def _entry(self, place: int, head: int, record: Mapping[str, Any]) -> tuple[Any, ...]:
        sampled = [s["policy_version"] for s in record["segments"] if s["trainable"]] or [NO_VERSION]
        score, advantage = record["score"], record["advantage"]
        return (
            0, place, head, record["step"], record["group_id"], record["sibling"], record.get("trajectory") or 0,
            record.get("context") or 0, record["num_tokens"], len(record["segments"]), min(sampled), max(sampled),
            np.nan if score is None else score, np.nan if advantage is None else advantage,
            self.words.number(record["outcome"]), self.words.number(record["source"]),
            self.words.number(record["stop_reason"] or UNFINISHED), self.words.number(record.get("role") or ""),
        )  # fmt: skip


def rollout_id(entry: np.void) -> str:
    """Return the id of the rollout as in its record."""
    name = f"{entry['group_id']}-{entry['sibling']}"
    inner = entry["trajectory"], entry["context"]
    return name if inner == (0, 0) else f"{name}.{inner[0]}.{inner[1]}"


def find(entries: np.ndarray, step: int, of: str) -> int | None:
    """Return the index of the rollout with this id and step, the last one of several; None without it."""
    places = map(int, np.flatnonzero(entries["step"] == step)[::-1])
    return next((place for place in places if rollout_id(entries[place]) == of), None)


def staleness(entries: np.ndarray | np.void) -> np.ndarray:
    """Return trainer version when it left minus oldest sampled version, 0 without sampled tokens.

    Step n is trained at version n - 1.
    """
    age = entries["step"] - 1 - entries["oldest"].astype("i8")
    return np.where(entries["oldest"] == NO_VERSION, 0, np.maximum(age, 0))


def versions(entries: np.ndarray | np.void, name: str) -> np.ndarray:
    """Return float64 "oldest" or "newest" policy versions, nan without sampled tokens."""
    return np.where(entries[name] == NO_VERSION, np.nan, entries[name])


_Head = tuple[int, int, Mapping[str, Any]]  # place, head, values


def _line_heads(path: Path) -> Iterator[_Head]:
    heads: dict[int, int] = {}
    place = 0
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                record = short_line(line)
                head = heads.setdefault(record["group_id"], place)
                yield place, head, record
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, ValueError) and not line.endswith(b"\n"):
                    return  # a truncated last line of an unfinished copy
                raise invalid_record(path, number, error) from error
            place += len(line)


def short_line(line: bytes) -> dict[str, Any]:
    """Parse a line without its tokens."""
    end = line.find(_TOKENS) if line.endswith(b"\n") else -1  # a truncated line must fail
    try:
        return json.loads(line if end < 0 else line[:end] + b"}")
    except ValueError:
        return json.loads(line)


def _table_records(path: Path, entries: np.ndarray) -> Iterator[dict[str, Any]]:
    return read_table_rows(path, entries["place"].tolist())


def _line_records(path: Path, entries: np.ndarray) -> Iterator[dict[str, Any]]:
    with open_regular(path) as file:
        for entry in entries:
            place, head = int(entry["place"]), int(entry["head"])
            record = _line_at(file, path, place)
            first = {} if place == head else _line_at(file, path, head)
            record = record | (shared_fields(first) if first else {}) | own_prompt_fields(record)
            if wrong := [key for key, kind in _KINDS.items() if not isinstance(record[key], kind)]:
                raise TypeError(f"{wrong[0]} is {record[wrong[0]]!r:.50}")
            yield record


def _table_heads(path: Path) -> Iterable[_Head]:
    columns = read_columns(path, _COLUMNS)
    rows: Sequence[tuple[Any, ...]] = list(zip(*columns.values(), strict=True))
    return ((place, place, dict(zip(_COLUMNS, row, strict=True))) for place, row in enumerate(rows))


def _line_at(file: BinaryIO, path: Path, place: int) -> dict[str, Any]:
    file.seek(place)
    record = json.loads(line_of(file, path))
    if not isinstance(record, dict):
        raise TypeError("no object")
    return record

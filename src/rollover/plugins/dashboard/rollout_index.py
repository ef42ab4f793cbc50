"""All rollouts that a run recorded, at some hundred bytes each: what there is to sort and choose by, and where it lies.

    rollouts/step-*.jsonl, .parquet ──the short values of each──▶ numbers (one array) ──place──▶ record (read again)

Owns what is known of a rollout without reading its text. A file that did not change is not read again, so an index of a
live run is asked again and again.
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

NO_VERSION = int(np.iinfo("i4").min)  # versions before the first are below 0 (checkpoint.lost_steps = "roll_back")
UNFINISHED = "unfinished"
# A rollout as numbers. `place`: where its line begins, or the number of its row. `head`: the place of its group's first
# line. `outcome`, `source`, `stop`, `role`: places in `RolloutIndex.words`; `stop` of what never stopped: UNFINISHED.
# `oldest`, `newest`: policy versions of what was sampled, NO_VERSION of nothing. `score`, `advantage`: nan where there
# is none.
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
_TOKENS = b', "token_ids": ['  # nothing after it is of interest here, and most of a line is; no string has such a quote


@dataclass(frozen=True, slots=True, eq=False)  # the same only where it was not read again
class Seen:
    """A file as it was read: (its size, when it was written), and its part of the index."""

    stamp: tuple[int, int]
    entries: np.ndarray


class RolloutIndex:
    """Of the folder `rollouts/` of a run. It may not be there (yet), and grow.

    `patience`: seconds that a look at it may take; it reads one new file at least, and `share` says how many
    of the files that makes. Those of early steps come first.
    """

    def __init__(self, dir: Path) -> None:
        self.dir, self.patience, self.share = dir, float("inf"), 1.0
        self.words = WordIndex()  # "trained", "dropped:stale", "eos", names of sources
        self._files: list[StepFile] = []
        self._seen: dict[Path, Seen] = {}
        self._entries: np.ndarray | None = None

    def entries(self) -> np.ndarray:
        """An array of ENTRY, in the order in which the rollouts left the run: those that are there now, as far as
        patience goes.

        ValueError for a file that is damaged.
        """
        files, until = step_files(self.dir), time.monotonic() + self.patience
        before, read, skipped = self._seen, False, 0
        seen: dict[Path, Seen] = {}
        for file in files:
            known = file.path in before
            if not known and read and time.monotonic() >= until:
                skipped += 1  # what is known is still looked at
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
        """Have what left with this step among the next `entries`, however impatient these are."""
        for file in step_files(self.dir):
            if file.step == step and file.path not in self._seen and (of := self._look(file)) is not None:
                self._seen[file.path], self._entries = of, None

    def record(self, entry: np.void) -> dict[str, Any]:
        """One dict with texts and tokens, as `Run.records` gives it, of one of `entries()`.

        ValueError where its file is gone since, or damaged.
        """
        (record,) = self.records_of(np.array([entry], ENTRY))
        return record

    def records_of(self, entries: np.ndarray) -> list[dict[str, Any]]:
        """`record` of each, in their order: a file is opened once for all that lie in it."""
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
        """The file that one of `entries()` lies in."""
        return self._files[int(entry["file"])].path

    def records(self) -> Iterator[dict[str, Any]]:
        """All records, one after the other."""
        for file in step_files(self.dir):
            yield from records_of(file.path)

    def word(self, number: int) -> str:
        """What stands in "outcome", "source" or "stop" of an entry."""
        return self.words[number]

    def _look(self, file: StepFile) -> Seen | None:
        """The part of a file; None where it is gone, as a step is that is made again."""
        try:
            status = file.path.stat()
            stamp = status.st_size, status.st_mtime_ns
            before = self._seen.get(file.path)
            if before is not None and before.stamp == stamp:
                return before
            rows = _table_heads(file.path) if file.path.suffix == ".parquet" else _line_heads(file.path)
            return Seen(stamp, structured([self._entry(*row) for row in rows], ENTRY))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if str(error).startswith(str(file.path)):  # it has said where
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
    """The id of the rollout, as records have it."""
    name = f"{entry['group_id']}-{entry['sibling']}"
    inner = entry["trajectory"], entry["context"]
    return name if inner == (0, 0) else f"{name}.{inner[0]}.{inner[1]}"


def find(entries: np.ndarray, step: int, of: str) -> int | None:
    """Where among them the rollout is that has this id and left with this step; the last one, where it left more than
    once."""
    places = map(int, np.flatnonzero(entries["step"] == step)[::-1])
    return next((place for place in places if rollout_id(entries[place]) == of), None)


def staleness(entries: np.ndarray | np.void) -> np.ndarray:
    """Of each rollout, or of one: trainer version at the step that it left with, less the oldest version that sampled
    of it; 0 where nothing was sampled. A step of number n is made at version n - 1."""
    age = entries["step"] - 1 - entries["oldest"].astype("i8")
    return np.where(entries["oldest"] == NO_VERSION, 0, np.maximum(age, 0))


def versions(entries: np.ndarray | np.void, name: str) -> np.ndarray:
    """float64: the "oldest" or the "newest" policy version that sampled of each, nan where none did."""
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
                    return  # half a line, of a copy that is being made
                raise invalid_record(path, number, error) from error
            place += len(line)


def short_line(line: bytes) -> dict[str, Any]:
    """A line without its tokens."""
    cut = line.find(_TOKENS) if line.endswith(b"\n") else -1  # half a line must be found out
    try:
        return json.loads(line if cut < 0 else line[:cut] + b"}")
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

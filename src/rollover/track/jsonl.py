"""The append-only JSONL files of a run: metrics and evaluations.

Owns how a row becomes a line and where a resumed run goes on. It never decides what is in a row, and never rewrites
a line: resuming cuts the file back to the step of the snapshot, so no step appears twice.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rollover.files import MOST_ROW_BYTES, lines_of, naming, open_regular
from rollover.functions import is_number
from rollover.track.metrics import validate
from rollover.track.tracker import Cut, Row, Tracker


def to_json(value: Any) -> Any:
    """`value` as strict JSON: NaN and infinities become None, numpy scalars and arrays plain numbers and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    raise TypeError(f"{type(value).__name__} is not JSON: {value!r}")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The complete rows of a JSONL file, [] where there is none; half a line, left by a killed writer, is no row.

    ValueError for a line that is not JSON.
    """
    path = Path(path)
    if not path.exists():
        return []
    with open_regular(path) as file:
        lines = lines_of(file, path, MOST_ROW_BYTES)
        return [row_of_line(path, line) for line in lines if line.endswith(b"\n")]


class JsonlSink(Tracker):
    """Append rows to a JSONL file, one object a line, visible to readers at once.

    `check` is called with every row before it is written (metrics.validate for metrics.jsonl).
    """

    def __init__(self, path: str | Path, check: Callable[[Mapping[str, object]], None] | None = None) -> None:
        self.path = Path(path)
        self._check = check
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what could not be written must not follow later, behind what another start has written since.
        self._file = open(self.path, "ab", buffering=0)

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row. NaN and infinities are written as null."""
        if self._check is not None:
            self._check(row)
        line = json.dumps(to_json(row), ensure_ascii=False, allow_nan=False)
        left = memoryview(line.encode("utf-8", "replace") + b"\n")  # data may call a source by half a character
        with naming(self.path):
            while left:
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Return when every row is on disk: before a checkpoint that counts on them."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """The complete rows of the file."""
        return read_rows(self.path)

    def truncate(self, cut: Cut) -> None:
        """Forget the rows of later steps (their key "step"), half-written ones included."""
        with naming(self.path):
            self._file.truncate(self._up_to(cut.step)[0])
            os.fsync(self._file.fileno())

    def reaches(self, step: int) -> bool:
        """Whether the row of `step` would be the last after `truncate(Cut(step))`."""
        return self._up_to(step)[1] == step

    def _up_to(self, step: int) -> tuple[int, int | None]:
        """Bytes of the rows up to `step`, and the step of the last of them (None: there is none)."""
        kept, last = 0, None
        with open_regular(self.path) as file:
            for line in lines_of(file, self.path, MOST_ROW_BYTES):
                try:
                    of_line = row_of_line(self.path, line)["step"]
                    whole = line.endswith(b"\n") and of_line <= step
                except (ValueError, KeyError, TypeError):  # torn by a crash: what follows is not whole either
                    break
                if not whole:
                    break
                kept, last = kept + len(line), of_line
        return kept, last

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class MetricsFile(JsonlSink):
    """metrics.jsonl: a row for each step, of registered keys."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, check=validate)

    @property
    def last_row(self) -> dict[str, Any]:
        """The newest row; {} where there is none."""
        return (self.rows() or [{}])[-1]

    def on_step(self, row: Row) -> None:
        self.write(row)


class EvalFile(JsonlSink):
    """eval.jsonl: a row for each evaluation."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self.write(row)

    def rows(self) -> list[dict[str, Any]]:
        """The complete rows of the file. ValueError for values of another kind than evaluations have."""
        rows = super().rows()
        for row in rows:
            check_evaluation(self.path, row)
        return rows


_FIGURE = re.compile(r"mean|seconds|step|policy_version|left_out|(pass|maj)@\d+")
_PARTS = ("settings", "sources", "data_sources", "roles")
_OF_SAMPLE = {"prompt": str, "completion": str, "score": (int, float, type(None))}


def check_evaluation(path: Path, row: Mapping[str, Any], place: str = "") -> None:
    """ValueError where a row of the file at `path`, or the part at `place` of one, has a value of another kind than
    what reads it takes: a run must not end by it when all its steps are made."""
    for name, value in row.items():
        if _FIGURE.fullmatch(name):
            is_one = value is None or is_number(value)
        elif name == "ci":
            is_one = value is None or _is_interval(value)
        elif name == "samples" and not place:
            is_one = isinstance(value, list) and all(map(_is_sample, value))
        elif name in _PARTS:
            is_one = isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())
        else:
            continue
        if not is_one:
            raise ValueError(f"{path} has an evaluation whose {place + name!r} is {value!r:.100}: restore the file")
        if name in _PARTS and isinstance(value, dict):
            for inner, part in value.items():
                check_evaluation(path, part, f"{place}{name}/{inner}/")


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(of is None or is_number(of) for of in value)


def _is_sample(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in _OF_SAMPLE.items())


def row_of_line(path: Path, line: bytes) -> dict[str, Any]:
    """The row that a line of the file at `path` is. ValueError where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a line that is not JSON ({error}): restore the file") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} has a line that is no row ({row!r:.100}): restore the file")
    return row

"""The append-only JSONL files of a run: metrics and evaluations, and which evaluation is the best one.

Lines are never rewritten. Resuming truncates a file to the step of the snapshot, so no step appears twice. The rows are
the only state of the best evaluation and of early stopping: a resumed run decides the same.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rollover.config import EvalConfig
from rollover.files import MOST_ROW_BYTES, lines_of, naming, open_regular
from rollover.functions import is_number
from rollover.suggest import did_you_mean
from rollover.track.metrics import validate
from rollover.track.tracker import Cut, Row, Tracker


def to_json(value: Any) -> Any:
    """Convert to strict JSON: NaN and infinities to None, numpy scalars and arrays to numbers and lists."""
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
    """Read the complete rows of a JSONL file, [] without a file. A truncated last line is ignored.

    ValueError for a line that is not JSON.
    """
    path = Path(path)
    if not path.exists():
        return []
    with open_regular(path) as file:
        lines = lines_of(file, path, MOST_ROW_BYTES)
        return [parse_row(path, line) for line in lines if line.endswith(b"\n")]


class JsonlSink(Tracker):
    """Appends rows to a JSONL file, one object per line, visible to readers at once.

    `check` is called with every row before it is written.
    """

    def __init__(self, path: str | Path, check: Callable[[Mapping[str, object]], None] | None = None) -> None:
        self.path = Path(path)
        self._check = check
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: after a failed write, no bytes may follow later, behind the rows of a resumed process.
        self._file = open(self.path, "ab", buffering=0)

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row; NaN and infinities are written as null."""
        if self._check is not None:
            self._check(row)
        line = json.dumps(to_json(row), ensure_ascii=False, allow_nan=False)
        left = memoryview(line.encode("utf-8", "replace") + b"\n")  # the name of a source may have a lone surrogate
        with naming(self.path):
            while left:
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Flush every row to disk, before a checkpoint that refers to them."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """Read the complete rows of the file."""
        return read_rows(self.path)

    def truncate(self, cut: Cut) -> None:
        """Remove the rows of later steps (their key "step"), half-written ones included."""
        with naming(self.path):
            self._file.truncate(self._up_to(cut.step)[0])
            os.fsync(self._file.fileno())

    def reaches(self, step: int) -> bool:
        """Return whether the row of `step` would be the last after `truncate(Cut(step))`."""
        return self._up_to(step)[1] == step

    def _up_to(self, step: int) -> tuple[int, int | None]:
        """Return the bytes of the rows up to `step`, and the step of the last one (None without rows)."""
        kept, last = 0, None
        with open_regular(self.path) as file:
            for line in lines_of(file, self.path, MOST_ROW_BYTES):
                try:
                    of_line = parse_row(self.path, line)["step"]
                    whole = line.endswith(b"\n") and of_line <= step
                except (ValueError, KeyError, TypeError):  # torn by a crash: later lines are incomplete, too
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
    """metrics.jsonl: one row per step, of registered keys."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, check=validate)

    @property
    def last_row(self) -> dict[str, Any]:
        """The newest row, {} without rows."""
        return (self.rows() or [{}])[-1]

    def on_step(self, row: Row) -> None:
        self.write(row)


class EvalFile(JsonlSink):
    """eval.jsonl: one row per evaluation."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self.write(row)

    def rows(self) -> list[dict[str, Any]]:
        """Read the complete rows of the file. ValueError for a value of a wrong type."""
        rows = super().rows()
        for row in rows:
            check_evaluation(self.path, row)
        return rows


_FIGURE = re.compile(r"mean|seconds|step|policy_version|left_out|(pass|maj)@\d+")
_PARTS = ("settings", "sources", "data_sources", "roles")
_OF_SAMPLE = {"prompt": str, "completion": str, "score": (int, float, type(None))}


def check_evaluation(path: Path, row: Mapping[str, Any], place: str = "") -> None:
    """Raise ValueError for a value of a wrong type in a row of `path`, or in the part of it at `place`.

    Called at the start of a run: the summary at its end must not fail on such a value.
    """
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


def parse_row(path: Path, line: bytes) -> dict[str, Any]:
    """Parse a line of the file at `path`; ValueError if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a line that is not JSON ({error}): restore the file") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} has a line that is no row ({row!r:.100}): restore the file")
    return row


# The best evaluation


def metric_value(row: Mapping[str, Any], metric: str) -> float | None:
    """Return the number at path `metric` of a row: keys joined by / (a key may have one itself). None if missing."""
    value = row.get(metric)
    if isinstance(value, int | float):
        return float(value)
    for name, inner in row.items():
        if isinstance(inner, Mapping) and metric.startswith(f"{name}/"):
            found = metric_value(inner, metric.removeprefix(f"{name}/"))
            if found is not None:
                return found
    return None


def check_metric(row: Mapping[str, Any], metric: str) -> None:
    """Raise ValueError where an evaluation lacks this metric."""
    if metric_value(row, metric) is None:
        known = sorted(_metrics(row))
        raise ValueError(
            f"eval.metric = {metric!r}: the evaluation has no such figure. There are {', '.join(known)}"
            f"{did_you_mean(metric, known)}"
        )


def best_of(rows: Sequence[Mapping[str, Any]], metric: str) -> Mapping[str, Any] | None:
    """Return the first row with the largest value of `metric`; None where no row has it."""
    best, most = None, -math.inf
    for row in rows:
        value = metric_value(row, metric)
        if value is not None and value > most:
            best, most = row, value
    return best


def early_stop_reason(rows: Sequence[Mapping[str, Any]], config: EvalConfig) -> str:
    """Return why training ends early by eval.patience; "" where it continues.

    An evaluation is an improvement if it exceeds the last improvement by more than eval.min_improvement; one without
    the metric is none.
    """
    if not config.patience:
        return ""
    step, most, worse = 0, -math.inf, 0
    for row in rows:
        value = metric_value(row, config.metric)
        if value is not None and (most == -math.inf or value > most + config.min_improvement):
            step, most, worse = row["step"], value, 0
        else:
            worse += 1
    if worse < config.patience:
        return ""
    return (
        f"{worse} evaluations in a row were no better than that after step {step} ({config.metric} {most:.4g};"
        f" eval.patience = {config.patience})"
    )


def _metrics(row: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the paths of the numbers by which evaluations can be compared."""
    found = [
        path + name
        for name, value in row.items()
        if (name == "mean" or name.startswith(("pass@", "maj@"))) and isinstance(value, int | float)
    ]
    for name in _PARTS:
        for key, inner in (row.get(name) or {}).items():
            found += _metrics(inner, f"{path}{name}/{key}/")
    return found

"""The process of one adapter: handles the messages of the run and replies to each.

    {"about": ...} once, {"cut": step}, {"row": ...}, {"eval": ...}, {"rollouts": [...], "step": n},
    {"artifacts": [...]} after the last step of a finished run, {"close": failed}
    "gap" in a message: an earlier message was lost; its content is read from metrics.jsonl and eval.jsonl

    {"done": true} for each; before it any of {"say": text}, {"failed": text, "again": whether it is retried}

Tracks which steps the tracker has. An adapter that cannot be opened, or fails at a step, is retried with the next
message, so no row is skipped or logged twice. No artifact contains checkpoints, logs, settings (the tracker has them as
its configuration), or a file with a credential.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from rollover.functions import explained
from rollover.plugins.trackers.adapter import About, Adapter, LastSteps, redacted, secrets
from rollover.plugins.trackers.sample import sample_of_records
from rollover.text import named
from rollover.track.jsonl import read_rows
from rollover.track.parquet import pyarrow_module
from rollover.track.records import records_of, step_files
from rollover.track.tracker import Cut
from rollover.workers.child import Calls

_TRIES = 3  # of one row: what a tool will not take must not keep it from the next
_BROKEN = 2  # rows in a row that it would not take: it is opened again
_OPEN_AGAIN_S = 30.0
_NICE = 5
_ALL = 1 << 62
_MOST_SAMPLES = 100  # steps whose rollouts are read again, the last_steps ones: a step's record may be large
_ANSWER = ("task_id", "source", "setting", "prompt", "answer", "expected", "score", "stop_reason", "num_tokens")


def main(name: str, tracker: str, num_shown: str) -> None:
    """What the process does. `tracker`: the tool's, as module:Class; `num_shown`: rollouts of a step, and answers of an
    evaluation."""
    calls = Calls()
    with contextlib.suppress(OSError):
        os.nice(_NICE)  # training comes first
    teller = AdapterHost(name, tracker, int(num_shown), calls.reply)
    for message in calls:
        try:
            teller.take(message)
        except Exception as error:  # boundary: the tool, and all that it imports
            calls.reply(failed=explained(error, redacted), again=not {"artifacts", "close"} & message.keys())
        calls.reply(done=True)
        if "close" in message:
            return


class AdapterHost:
    """Tells one tool. `answer(say=...)` is heard by the run."""

    def __init__(self, name: str, tracker: str, num_shown: int, answer: Callable[..., None]) -> None:
        self.name, self.tracker, self.num_shown, self.answer = name, tracker, num_shown, answer
        self.tool: Adapter | None = None  # None: it could not be loaded
        self._about: About | None = None
        self._is_open, self._tried_at = False, -_OPEN_AGAIN_S
        self._behind = True  # the files may have what the tool lacks
        self._last_steps = LastSteps()
        self._failures: dict[tuple[int, str], int] = {}
        self._given_up, self._step = 0, -1  # rows, one after the other; the last_steps that was told
        self._sampled: set[int] = set()  # steps whose rollouts were told since it was opened
        self._place = ""

    def take(self, message: dict[str, Any]) -> None:
        """Do what a message says. Whatever the tool raises is raised."""
        self._behind |= message.get("gap", False)
        if "about" in message:
            about = message["about"]
            self._about = About(**about | {"directory": Path(about["directory"])})
        elif "cut" in message:
            self._step = message["cut"]
            self._open(self._step)
            self._catch_up(self._step, self._step)
        elif "row" in message:
            row = message["row"]
            self._step = row["step"]
            self._ready(row["step"] - 1)
            self._catch_up(row["step"] - 1, row["step"] - 1)
            self._tell(row["step"], "row", row)
        elif "eval" in message:
            row = message["eval"]
            self._ready(row["step"])
            self._catch_up(row["step"], row["step"] - 1)
            self._tell(row["step"], "eval", row)
        elif "rollouts" in message:
            self._catch_up(message["step"] - 1, message["step"] - 1)  # tools take steps in their order
            self._rollouts(message["step"], message["rollouts"])
        elif "artifacts" in message:
            try:
                self._catch_up(_ALL, _ALL)  # before what may take long
            finally:
                self._artifacts(message["artifacts"])
        elif "close" in message:
            self._close(message["close"])

    def _open(self, step: int) -> None:
        """Open the tool at `step`: what it has of later ones is forgotten."""
        assert self._about is not None
        self._is_open, self._tried_at = False, time.monotonic()
        tool = self.tool
        if tool is None:
            module, kind = self.tracker.split(":")
            tool = self.tool = cast(Adapter, getattr(importlib.import_module(module), kind)(self._about))
        tool.truncate(Cut(step))
        self._is_open, self._behind, self._last_steps = True, True, tool.last_steps
        self._given_up = 0
        self._failures.clear()
        self._sampled.clear()
        if tool.place != self._place:
            self._place = tool.place
            self.answer(say=redacted(f"{self.name}: this run is shown at {self._place}"))

    def _ready(self, step: int) -> None:
        """A tool that could not be opened is tried again, now and then."""
        if not self._is_open:
            if time.monotonic() < self._tried_at + _OPEN_AGAIN_S:
                return
            self._open(step)

    def _catch_up(self, row: int, eval: int) -> None:
        """Tell the rows and evaluations that the files have, up to these steps, and the tool has not."""
        if not (self._is_open and self._behind):
            return
        assert self._about is not None
        folder = self._about.directory
        rows = [(r["step"], "row", r) for r in read_rows(folder / "metrics.jsonl") if r["step"] <= row]
        evals = [(r["step"], "eval", r) for r in read_rows(folder / "eval.jsonl") if r["step"] <= eval]
        last_steps = rows[-1][0] if rows else 0
        recorded = {of.step: of.path for of in step_files(folder / "rollouts")} if self.num_shown else {}
        for step, kind, what in sorted([*rows, *evals], key=lambda told: (told[0], told[1] == "eval")):
            lacks = kind == "row" and self._last_steps.row < step not in self._sampled
            if lacks and step in recorded and last_steps - step < _MOST_SAMPLES:
                self._rollouts(step, self._sample(recorded[step]))
            self._tell(step, kind, what)
        self._behind = False

    def _sample(self, path: Path) -> list[dict[str, Any]]:
        """Of a step's record. One that is damaged is said, and is not worth the step's row."""
        try:
            return sample_of_records(list(records_of(path)), self.num_shown)
        except ValueError as error:
            self.answer(failed=explained(error, redacted))
            return []

    def _rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        if self._is_open and self.tool is not None and rows:
            self._sampled.add(step)
            self.tool.show("rollouts", step, rows)

    def _artifacts(self, names: list[str]) -> None:
        """Hand the files over. Each failure is said, and is not worth the next one."""
        if not self._is_open or self.tool is None:
            raise ConnectionError(f"it is not open, and {' and '.join(names)} did not go there (track.artifacts)")
        assert self._about is not None
        for name in names:
            files, left_out = files_of(name, self._about.directory)
            if left_out:
                which = ", ".join(left_out)
                self.answer(failed=f"{which} of {name} did not go there: a credential is in it", again=False)
            try:
                if files:
                    self.tool.on_artifact(name, files)
            except Exception as error:  # boundary: the tool
                self.answer(failed=f"{name} did not go there: {explained(error, redacted)}", again=False)

    def _tell(self, step: int, kind: str, row: dict[str, Any]) -> None:
        """Tell the tool, if it has not that already. One that fails is behind: the file has the row."""
        if not self._is_open or self.tool is None:
            return
        if step <= getattr(self._last_steps, kind):
            return
        try:
            self.tool.on_step(row) if kind == "row" else self._evaluation(row)
        except BaseException:
            tries = self._failures[step, kind] = self._failures.get((step, kind), 0) + 1
            self._behind = True
            if tries >= _TRIES:
                self._last_steps = self._last_steps._replace(**{kind: step})
                self._given_up += 1
                self._is_open = self._given_up < _BROKEN
            raise
        self._given_up = 0
        self._last_steps = self._last_steps._replace(**{kind: step})

    def _evaluation(self, row: dict[str, Any]) -> None:
        assert self.tool is not None and self._about is not None
        self.tool.on_eval(row)
        file = self._about.directory / "evaluations" / f"step-{row['step']:06d}.jsonl"
        if self.num_shown and file.exists():
            answers = [{key: _cell(of.get(key)) for key in _ANSWER} for of in read_rows(file)[: self.num_shown]]
            self.tool.show("answers", row["step"], answers)

    def _close(self, failed: bool) -> None:
        """What a failure held up is told for a last time, if that is possible."""
        if not self._is_open:
            self._open(self._step)
        assert self.tool is not None
        try:
            self._catch_up(_ALL, _ALL)
        finally:
            self.tool.failed = failed
            self.tool.close()


def _cell(value: Any) -> Any:
    return named(value) if isinstance(value, str) else value


_PARTS = {
    "model": ("model",),
    "best_model": ("best_model",),
    "records": (
        "metrics.jsonl",
        "metrics.parquet",
        "eval.jsonl",
        "trace.jsonl",
        "rollouts",
        "evaluations",
    ),
}
_WEIGHTS = {".safetensors", ".bin", ".pt"}  # numbers, and gigabytes of them
_CHUNK = 1 << 22


def files_of(name: str, run: Path) -> tuple[dict[str, Path], list[str]]:
    """The files of an artifact of the run in the directory `run`, by their paths in it; and those that hold a
    credential of this environment, which are left out."""
    parts, hidden = _PARTS[name], secrets()
    root = run / parts[0] if len(parts) == 1 else run
    found = [file for part in parts for file in _files(run / part)]
    kept, left_out = {}, []
    for file in found:
        path = file.relative_to(root).as_posix()
        if file.suffix not in _WEIGHTS and (_table_holds if file.suffix == ".parquet" else _holds)(file, hidden):
            left_out.append(path)
        else:
            kept[path] = file
    return kept, left_out


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    return [place] if place.is_file() else []


def _holds(file: Path, secrets: list[str]) -> bool:
    """Whether one of these is in the file, as it is or in JSON, which is read in pieces."""
    values = [form.encode() for value in secrets for form in (value, json.dumps(value)[1:-1])]
    longest = max(map(len, values), default=0)
    before = b""
    with file.open("rb") as opened:
        while longest and (piece := opened.read(_CHUNK)):
            if any(value in before + piece for value in values):
                return True
            before = piece[-longest:]
    return False


def _table_holds(file: Path, secrets: list[str]) -> bool:
    """The same of the texts of a Parquet file, which is packed."""
    pa, parquet = pyarrow_module(), pyarrow_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            leaves = [table.schema.column(number) for number in range(len(table.schema))]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            for group in range(table.num_row_groups if texts and secrets else 0):
                said = str(table.read_row_group(group, columns=texts).to_pylist())
                if any(form in said for value in secrets for form in (value, repr(value)[1:-1])):
                    return True
        return False
    except (pa.ArrowException, ValueError):  # it is none: as any other file
        return _holds(file, secrets)

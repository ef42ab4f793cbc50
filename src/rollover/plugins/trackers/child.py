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

_TRIES = 3  # per row: a row that always fails must not block the next
_BROKEN = 2  # failed rows in succession before the tracker is opened again
_OPEN_AGAIN_S = 30.0
_NICE = 5
_ALL = 1 << 62
_MOST_SAMPLES = 100  # latest steps whose rollouts are read again: a step's record may be large
_ANSWER = ("task_id", "source", "setting", "prompt", "answer", "expected", "score", "stop_reason", "num_tokens")


def main(name: str, adapter: str, num_shown: str) -> None:
    """Run the process. `adapter`: module:Class; `num_shown`: rollouts per step, and answers per evaluation."""
    calls = Calls()
    with contextlib.suppress(OSError):
        os.nice(_NICE)  # training comes first
    host = AdapterHost(name, adapter, int(num_shown), calls.reply)
    for message in calls:
        try:
            host.handle(message)
        except Exception as error:  # boundary: the adapter and its library
            calls.reply(failed=explained(error, redacted), again=not {"artifacts", "close"} & message.keys())
        calls.reply(done=True)
        if "close" in message:
            return


class AdapterHost:
    """Owner of one adapter: opens it, sends it rows, and replays what it missed. `reply(say=...)` reaches the run."""

    def __init__(self, name: str, adapter: str, num_shown: int, reply: Callable[..., None]) -> None:
        self.name, self.num_shown, self.reply = name, num_shown, reply
        self.adapter: Adapter | None = None  # None: not loaded (yet)
        self._class = adapter
        self._about: About | None = None
        self._is_open, self._tried_at = False, -_OPEN_AGAIN_S
        self._behind = True  # the files may have more than the tracker
        self._last_steps = LastSteps()
        self._failures: dict[tuple[int, str], int] = {}
        self._failed_rows, self._step = 0, -1  # in succession; the latest step
        self._sampled: set[int] = set()  # steps whose rollouts were sent since it was opened
        self._place = ""

    def handle(self, message: dict[str, Any]) -> None:
        """Handle a message; exceptions of the adapter pass through."""
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
            self._send(row["step"], "row", row)
        elif "eval" in message:
            row = message["eval"]
            self._ready(row["step"])
            self._catch_up(row["step"], row["step"] - 1)
            self._send(row["step"], "eval", row)
        elif "rollouts" in message:
            self._catch_up(message["step"] - 1, message["step"] - 1)  # trackers need steps in order
            self._rollouts(message["step"], message["rollouts"])
        elif "artifacts" in message:
            try:
                self._catch_up(_ALL, _ALL)  # before the uploads, which may take long
            finally:
                self._artifacts(message["artifacts"])
        elif "close" in message:
            self._close(message["close"])

    def _open(self, step: int) -> None:
        """Open the tracker at `step`, which removes later steps there."""
        assert self._about is not None
        self._is_open, self._tried_at = False, time.monotonic()
        adapter = self.adapter
        if adapter is None:
            module, kind = self._class.split(":")
            adapter = self.adapter = cast(Adapter, getattr(importlib.import_module(module), kind)(self._about))
        adapter.truncate(Cut(step))
        self._is_open, self._behind, self._last_steps = True, True, adapter.last_steps
        self._failed_rows = 0
        self._failures.clear()
        self._sampled.clear()
        if adapter.place != self._place:
            self._place = adapter.place
            self.reply(say=redacted(f"{self.name}: this run is shown at {self._place}"))

    def _ready(self, step: int) -> None:
        """Open the tracker again, at most every _OPEN_AGAIN_S seconds."""
        if not self._is_open:
            if time.monotonic() < self._tried_at + _OPEN_AGAIN_S:
                return
            self._open(step)

    def _catch_up(self, row: int, eval: int) -> None:
        """Send the rows and evaluations up to these steps that the files have and the tracker lacks."""
        if not (self._is_open and self._behind):
            return
        assert self._about is not None
        folder = self._about.directory
        rows = [(r["step"], "row", r) for r in read_rows(folder / "metrics.jsonl") if r["step"] <= row]
        evals = [(r["step"], "eval", r) for r in read_rows(folder / "eval.jsonl") if r["step"] <= eval]
        last_steps = rows[-1][0] if rows else 0
        recorded = {of.step: of.path for of in step_files(folder / "rollouts")} if self.num_shown else {}
        for step, kind, what in sorted([*rows, *evals], key=lambda row: (row[0], row[1] == "eval")):
            lacks = kind == "row" and self._last_steps.row < step not in self._sampled
            if lacks and step in recorded and last_steps - step < _MOST_SAMPLES:
                self._rollouts(step, self._sample(recorded[step]))
            self._send(step, kind, what)
        self._behind = False

    def _sample(self, path: Path) -> list[dict[str, Any]]:
        """Read a sample of a step's records; damaged records are reported, and the step's row is sent anyway."""
        try:
            return sample_of_records(list(records_of(path)), self.num_shown)
        except ValueError as error:
            self.reply(failed=explained(error, redacted))
            return []

    def _rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        if self._is_open and self.adapter is not None and rows:
            self._sampled.add(step)
            self.adapter.show("rollouts", step, rows)

    def _artifacts(self, names: list[str]) -> None:
        """Upload the artifacts; a failure is reported and does not stop the others."""
        if not self._is_open or self.adapter is None:
            raise ConnectionError(f"it is not open, and {' and '.join(names)} did not go there (track.artifacts)")
        assert self._about is not None
        for name in names:
            files, left_out = files_of(name, self._about.directory)
            if left_out:
                which = ", ".join(left_out)
                self.reply(failed=f"{which} of {name} did not go there: a credential is in it", again=False)
            try:
                if files:
                    self.adapter.on_artifact(name, files)
            except Exception as error:  # boundary: the adapter
                self.reply(failed=f"{name} did not go there: {explained(error, redacted)}", again=False)

    def _send(self, step: int, kind: str, row: dict[str, Any]) -> None:
        """Send a row unless the tracker has it. After a failure the row comes again from the file."""
        if not self._is_open or self.adapter is None:
            return
        if step <= getattr(self._last_steps, kind):
            return
        try:
            self.adapter.on_step(row) if kind == "row" else self._evaluation(row)
        except BaseException:
            tries = self._failures[step, kind] = self._failures.get((step, kind), 0) + 1
            self._behind = True
            if tries >= _TRIES:
                self._last_steps = self._last_steps._replace(**{kind: step})
                self._failed_rows += 1
                self._is_open = self._failed_rows < _BROKEN
            raise
        self._failed_rows = 0
        self._last_steps = self._last_steps._replace(**{kind: step})

    def _evaluation(self, row: dict[str, Any]) -> None:
        assert self.adapter is not None and self._about is not None
        self.adapter.on_eval(row)
        file = self._about.directory / "evaluations" / f"step-{row['step']:06d}.jsonl"
        if self.num_shown and file.exists():
            answers = [{key: _cell(of.get(key)) for key in _ANSWER} for of in read_rows(file)[: self.num_shown]]
            self.adapter.show("answers", row["step"], answers)

    def _close(self, failed: bool) -> None:
        """Send missed rows for a last time, and close the adapter."""
        if not self._is_open:
            self._open(self._step)
        assert self.adapter is not None
        try:
            self._catch_up(_ALL, _ALL)
        finally:
            self.adapter.failed = failed
            self.adapter.close()


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
_WEIGHTS = {".safetensors", ".bin", ".pt"}  # gigabytes without texts
_CHUNK = 1 << 22


def files_of(name: str, run: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files of an artifact by their paths in it, and the names of excluded files with a credential."""
    parts, hidden = _PARTS[name], secrets()
    root = run / parts[0] if len(parts) == 1 else run
    found = [file for part in parts for file in _files(run / part)]
    kept, left_out = {}, []
    for file in found:
        path = file.relative_to(root).as_posix()
        if file.suffix not in _WEIGHTS and (_table_contains if file.suffix == ".parquet" else _contains)(file, hidden):
            left_out.append(path)
        else:
            kept[path] = file
    return kept, left_out


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    return [place] if place.is_file() else []


def _contains(file: Path, secrets: list[str]) -> bool:
    """Return whether the file contains one of the secrets, plain or in JSON. Reads it in pieces."""
    values = [form.encode() for value in secrets for form in (value, json.dumps(value)[1:-1])]
    longest = max(map(len, values), default=0)
    before = b""
    with file.open("rb") as opened:
        while longest and (piece := opened.read(_CHUNK)):
            if any(value in before + piece for value in values):
                return True
            before = piece[-longest:]
    return False


def _table_contains(file: Path, secrets: list[str]) -> bool:
    """Return whether a text of a Parquet file contains one of the secrets."""
    pa, parquet = pyarrow_module(), pyarrow_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            leaves = [table.schema.column(number) for number in range(len(table.schema))]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            for group in range(table.num_row_groups if texts and secrets else 0):
                rows = str(table.read_row_group(group, columns=texts).to_pylist())
                if any(form in rows for value in secrets for form in (value, repr(value)[1:-1])):
                    return True
        return False
    except (pa.ArrowException, ValueError):  # not a Parquet file
        return _contains(file, secrets)

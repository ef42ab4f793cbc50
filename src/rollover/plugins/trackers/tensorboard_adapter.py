"""TensorBoard: event files, as `tensorboard --logdir` reads them.

Under <run.dir>/tensorboard, or a folder of the run under TENSORBOARD_LOGGING_DIR (or TENSORBOARD_DIR, as in verl). A
step is one event with all its values. Steps after a rollback are purged in TensorBoard's way: a record contains the
step of the restart, and readers drop everything from there on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # pyright: ignore[reportMissingImports]
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore  (generated: unknown symbols)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore  (generated: unknown symbols)
from tensorboard.plugins.text.summary_v2 import text_pb  # pyright: ignore[reportMissingImports]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

from rollover.plugins.trackers.adapter import About, Adapter, LastSteps
from rollover.track.tracker import Cut


class TensorBoard(Adapter):
    """`place`: the folder."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        shared = os.environ.get("TENSORBOARD_LOGGING_DIR") or os.environ.get("TENSORBOARD_DIR")
        self.place = str(Path(shared) / about.file_name if shared else about.directory / "tensorboard")
        self._writer: EventFileWriter | None = None

    def truncate(self, cut: Cut) -> None:
        with contextlib.suppress(Exception):  # a failed writer: its file stays as it is
            self.close()
        row, evaluation = self._found()
        self.last_steps = LastSteps(min(row, cut.step), min(evaluation, cut.step))
        self._writer = writer = EventFileWriter(self.place)
        # Readers take the first START as the beginning, and purge at each later one.
        self._add(cut.step + 1, session_log=SessionLog(status=SessionLog.START))
        if max(row, evaluation) < 0:
            self._text("config", -1, json.dumps(self.about.config, indent=2))
        writer.flush()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        self._add(step, summary=Summary(value=values))

    def show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._text(name, step, "\n\n".join(_record(row) for row in rows))

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _text(self, tag: str, step: int, text: str) -> None:
        # A code block: the text is neither Markdown nor HTML.
        block = "\n".join(f"    {line}" for line in text.split("\n"))
        self._add(max(step, 0), summary=text_pb(tag, block))

    def _add(self, step: int, **what: Any) -> None:
        assert self._writer is not None
        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))
        self._writer.flush()  # each step reaches the file before the next one begins

    def _found(self) -> LastSteps:
        """Read the last steps of the files, up to a truncated record."""
        row = evaluation = -1
        for path in sorted(Path(self.place).glob("events.out.tfevents.*")):
            for record in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(record)
                if event.HasField("session_log"):
                    row, evaluation = min(row, event.step - 1), min(evaluation, event.step - 1)
                elif any(value.HasField("simple_value") for value in event.summary.value):
                    if event.summary.value[0].tag.startswith("eval/"):
                        evaluation = event.step
                    else:
                        row = event.step
        return LastSteps(row, evaluation)


def _record(row: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in row.items())

"""Reads the directory of a run, live or ended: configuration, metrics, evaluations, events, its state and its holder.

Owns which file has which content (docs/running.md). Tolerates the files of older and of killed runs: a truncated last
line, a missing file. Reads on demand, only new rows where it can, and writes nothing but the lock.

The lock allows one process at a time to write in a directory, and ends with the process. Its file names the holder; the
lock itself is the operating system's (flock), so the file of a killed run locks nothing. On a network file system it
works between machines where the mount has locks (NFS has, unless mounted with nolock); without locks the run continues
with a warning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rollover.files import (
    MOST_ROW_BYTES,
    did_you_mean_path,
    lines_of,
    local_path,
    open_regular,
    read_regular,
    read_tables,
    short_path,
)
from rollover.functions import is_number
from rollover.track.jsonl import check_evaluation, parse_row
from rollover.track.trace import TRACE, TraceEvent, trace_events

_NUMBERS = {int, float, type(None)}


class GrowingRows(ABC):
    """Rows with a key "step" of a JSONL file that grows, and that a resumed run cuts back or replaces.

    Each look parses only new lines; a truncated last line is ignored. `numbers`: each value of a row is a number or
    None. `patience`: limit in seconds of a look, which reads at least one row; `share`: how much of the file was read.
    """

    def __init__(self, path: Path, *, numbers: bool = False) -> None:
        self.path, self.numbers = path, numbers
        self.patience, self.share = float("inf"), 1.0
        self._end, self._last = 0, b""  # the offset up to which it is parsed, and the line that ends there

    def look(self) -> None:
        """Read new rows, until `patience` is over. A missing file has no rows. ValueError for an invalid line."""
        until, self.share = time.monotonic() + self.patience, 1.0
        try:
            with open_regular(self.path) as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:  # cut back meanwhile, and perhaps extended
                    self._start_over()
                    file.seek(0)
                for line in lines_of(file, self.path, MOST_ROW_BYTES):
                    if not line.endswith(b"\n"):
                        break
                    self._add(self._checked(parse_row(self.path, line)))
                    self._end, self._last = self._end + len(line), line
                    if time.monotonic() >= until:
                        self.share = self._end / max(self._end, os.fstat(file.fileno()).st_size)
                        break
        except FileNotFoundError:
            self._start_over()

    def _start_over(self) -> None:
        self._end, self._last = 0, b""
        self._clear()

    def _checked(self, row: dict[str, Any]) -> dict[str, Any]:
        if not is_number(row.get("step")):
            raise ValueError(f"{self.path} has a row without a number of its step: restore the file")
        if self.numbers and not {type(value) for value in row.values()} <= _NUMBERS:
            wrong = next(key for key, value in row.items() if type(value) not in _NUMBERS)
            raise ValueError(f"{self.path} has a row whose {wrong!r} is no number: restore the file")
        return row

    @abstractmethod
    def _clear(self) -> None:
        """Remove all rows."""

    @abstractmethod
    def _add(self, row: dict[str, Any]) -> None:
        """Add a row, which replaces rows of its step and of later ones."""


class Tail(GrowingRows):
    """All rows of a growing file, one for each step: the newest."""

    def __init__(self, path: Path, *, numbers: bool = False) -> None:
        super().__init__(path, numbers=numbers)
        self._rows: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows in the order of their steps. ValueError for an invalid line."""
        self.look()
        return [dict(row) for row in self._rows]

    def _clear(self) -> None:
        self._rows = []

    def _add(self, row: dict[str, Any]) -> None:
        while self._rows and self._rows[-1]["step"] >= row["step"]:
            self._rows.pop()
        # The names are the same in every row: one copy of each.
        self._rows.append({sys.intern(key): value for key, value in row.items()})


CONFIG, METRICS, EVALUATIONS, FINISHED, ROLLOUTS, EVALUATED, RESUME = (
    "config.resolved.json",
    "metrics.jsonl",
    "eval.jsonl",
    "finished",
    "rollouts",
    "evaluations",
    "resume.json",
)
_MOST_BYTES = 1 << 20  # of finished and resume.json
State = Literal["running", "finished", "stopped"]


class RunFiles:
    """The files of the run in `directory`. `recorded`: the folder of its rollouts. ValueError where there is no run."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = local_path(directory)
        self.check()
        self.recorded = self.directory / ROLLOUTS
        self._metrics = Tail(self.directory / METRICS, numbers=True)
        self._evaluations = Tail(self.directory / EVALUATIONS)

    def check(self) -> None:
        """Raise ValueError where the directory is not, or no longer, that of a run."""
        if not any((self.directory / name).is_file() for name in (CONFIG, METRICS, TRACE)):
            if not self.directory.is_dir():
                what = "is a file" if self.directory.exists() else f"is not there{did_you_mean_path(self.directory)}"
            else:
                what = f"has no {CONFIG}"
            raise ValueError(f"{short_path(self.directory)!r} is not the directory of a run: it {what}")

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run, as in config.resolved.json. {} before the run has begun."""
        path = self.directory / CONFIG
        return read_tables(path) if path.is_file() else {}

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key such as "train.num_steps"; `default` where an older run lacks it."""
        table, _, name = key.partition(".")
        return self.config.get(table, {}).get(name, default)

    @property
    def name(self) -> str:
        """run.name, or the folder's."""
        return self.value("run.name") or self.directory.name

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each training step (docs/metrics.md)."""
        return self._metrics.rows()

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the row of each evaluation: step, mean, ci, pass@k, sources, samples."""
        rows = self._evaluations.rows()
        for row in rows:
            check_evaluation(self._evaluations.path, row)
        return rows

    def events(self) -> Iterator[TraceEvent]:
        """Iterate over the events of all rollouts (docs/trace.md); there are none where track.trace is off.

        ValueError names a damaged line.
        """
        path = self.directory / TRACE
        return trace_events(path) if path.is_file() else iter(())

    @property
    def finished(self) -> bool:
        """Whether it has made all its steps."""
        return (self.directory / FINISHED).is_file()

    @property
    def ended_early(self) -> str:
        """Why a finished run has fewer steps than train.num_steps; "" if it has not."""
        if not self.finished:
            return ""
        try:
            end = json.loads(read_regular(self.directory / FINISHED, _MOST_BYTES))
        except (ValueError, RecursionError):  # written by an older version
            return ""
        if not isinstance(end, dict):
            return ""
        return end.get("enough") or (f"the {end['used_up']} are used up" if end.get("used_up") else "")

    @property
    def resume(self) -> tuple[str, str]:
        """(the command that resumes the run, its folder; "": any), as in resume.json."""
        unknown = f"rollover train FILE.toml --run.dir {shlex.quote(str(self.directory))} --resume", ""
        try:
            resume = json.loads(read_regular(self.directory / RESUME, _MOST_BYTES))
            return str(resume["command"]), str(resume["folder"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # written by an older version, or damaged
            return unknown

    @property
    def holder(self) -> str:
        """Description of the process that has the run open; "" where none has."""
        return holder_of(self.directory)

    @property
    def state(self) -> State:
        """ "stopped": no process has it open, and it has steps left (it was stopped, killed, or failed)."""
        if self.holder:
            return "running"
        return "finished" if self.finished else "stopped"


# Lock

LOCK = "lock"
_MOST_HOLDER_BYTES = 1 << 12
_TRIES, _PAUSE_S = 5, 0.02
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class DirectoryLock:
    """A lock on the existing `folder` until `release`. ValueError, which names the holder, if another run has it.

    `key`: the option that named the folder.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file = open(folder / LOCK, "ab+")
        try:
            self._lock()
        except BlockingIOError:
            holder = _holder_in(self._file)
            self._file.close()
            raise ValueError(
                f"{key} = {str(folder)!r} is in use by {holder}: wait until that run has ended, stop it (Ctrl-C), or"
                f" give another {key}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._file.close()
                raise
            warnings.warn(f"{folder} cannot be locked ({error}): start no second run in it", stacklevel=2)
        self._file.truncate(0)
        who = f"process {os.getpid()} on {socket.gethostname()} (since {time.strftime('%F %T')})\n"
        self._file.write(who.encode("utf-8", "replace"))
        self._file.flush()

    def release(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Raise BlockingIOError where another run has it. `holder_of` takes it for an instant, so try again."""
        for _ in range(_TRIES):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder_of(folder: Path) -> str:
    """Return a description of the process whose run holds the folder; "" where none does, or without locks."""
    try:
        with open_regular(folder / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder_in(file)
    except (OSError, ValueError):  # no such file, a pipe in its place, or no locks there
        pass
    return ""


def _holder_in(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(_MOST_HOLDER_BYTES).decode("utf-8", "replace").strip() or "another process"

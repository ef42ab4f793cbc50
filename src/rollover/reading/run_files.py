"""A run as its directory tells of it: rows, evaluations, rollouts, events, accounts, warnings, and whether it lives.

Owns which file says what (docs/running.md), and what of an older or a killed run's files is put up with: half a line at
an end, a file that is not there yet. Reads when it is asked, only what is new where it can, and writes nothing.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from typing import Any, Literal

from rollover.files import did_you_mean_path, local_path, read_regular, read_tables, short_path
from rollover.reading.accounts import Accounts, accounts_of
from rollover.reading.columns import Columns
from rollover.reading.rollout_index import RolloutIndex
from rollover.reading.tail import Tail
from rollover.reading.trace_index import TraceIndex
from rollover.reading.warnings import HealthWarning, warnings_of
from rollover.run.lock import holder_of
from rollover.track.sinks import check_evaluation
from rollover.track.trace import TRACE, TraceEvent, trace_events

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
    """The run in `directory`. ValueError where there is none.

    `rollouts`: the index of what was recorded. `trace`: that of what happened when. `patience_s`: how long one look at
    the columns, the rollouts or the trace may take; without an end by default.
    """

    def __init__(self, directory: str | os.PathLike[str], *, patience_s: float = float("inf")) -> None:
        self.directory = local_path(directory)
        self.check()
        self._metrics = Tail(self.directory / METRICS, numbers=True)
        self._columns = Columns(self.directory / METRICS)
        self._evaluations = Tail(self.directory / EVALUATIONS)
        self.rollouts = RolloutIndex(self.directory / ROLLOUTS)
        self.trace = TraceIndex(self.directory / TRACE)
        self._columns.patience = self.rollouts.patience = self.trace.patience = patience_s

    @property
    def shares(self) -> dict[str, float]:
        """How much of the metrics (as columns), the rollouts and the trace is read, as of the last look at each."""
        return {"metrics": self._columns.share, "rollouts": self.rollouts.share, "trace": self.trace.share}

    def check(self) -> None:
        """ValueError where the directory is not, or no longer, that of a run."""
        if not any((self.directory / name).is_file() for name in (CONFIG, METRICS, TRACE)):
            if not self.directory.is_dir():
                what = "is a file" if self.directory.exists() else f"is not there{did_you_mean_path(self.directory)}"
            else:
                what = f"has no {CONFIG}"
            raise ValueError(f"{short_path(self.directory)!r} is not the directory of a run: it {what}")

    @property
    def config(self) -> dict[str, Any]:
        """Every value that the run uses, as in config.resolved.json. {} before the run has begun."""
        path = self.directory / CONFIG
        return read_tables(path) if path.is_file() else {}

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key such as "train.num_steps"; `default` where the run (an older one, say) has none."""
        table, _, name = key.partition(".")
        return self.config.get(table, {}).get(name, default)

    @property
    def name(self) -> str:
        """run.name, or the folder's."""
        return self.value("run.name") or self.directory.name

    def metrics(self) -> list[dict[str, Any]]:
        """One dict a training step (docs/metrics.md), each step once."""
        return self._metrics.rows()

    def columns(self) -> Columns:
        """The same by key, for whoever stays: what they take of memory is a small part of what the rows do."""
        self._columns.look()
        return self._columns

    def evaluations(self) -> list[dict[str, Any]]:
        """One dict an evaluation: step, mean, ci, pass@k, sources, samples."""
        rows = self._evaluations.rows()
        for row in rows:
            check_evaluation(self._evaluations.path, row)
        return rows

    def events(self) -> Iterator[TraceEvent]:
        """What happened to every rollout, and when (docs/trace.md), one after the other; nothing where track.trace is
        off. ValueError names a line that is damaged."""
        path = self.directory / TRACE
        return trace_events(path) if path.is_file() else iter(())

    def accounts(self) -> Accounts | None:
        """Where everything is that was generated, as of the last step; None before the first."""
        rows = self.metrics()
        return accounts_of(rows[-1]) if rows else None

    def warnings(self) -> list[HealthWarning]:
        """What the run was warned of, as of its rows."""
        return warnings_of(self.metrics(), self.config)

    @property
    def finished(self) -> bool:
        """Whether it has made all its steps."""
        return (self.directory / FINISHED).is_file()

    @property
    def ended_early(self) -> str:
        """Why a finished run has fewer steps than it was to make; "" if it has not."""
        if not self.finished:
            return ""
        try:
            end = json.loads(read_regular(self.directory / FINISHED, _MOST_BYTES))
        except (ValueError, RecursionError):  # of an older version
            return ""
        if not isinstance(end, dict):
            return ""
        return end.get("enough") or (f"the {end['used_up']} are used up" if end.get("used_up") else "")

    @property
    def resume(self) -> tuple[str, str]:
        """What to type to go on with the run, and in which folder ("": any), as it said itself when it began."""
        unknown = f"rollover train FILE.toml --run.dir {shlex.quote(str(self.directory))} --resume", ""
        try:
            told = json.loads(read_regular(self.directory / RESUME, _MOST_BYTES))
            return str(told["command"]), str(told["folder"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # of an older version, or somebody else's
            return unknown

    @property
    def holder(self) -> str:
        """The process that makes the run at this moment, in words; "" where none does."""
        return holder_of(self.directory)

    @property
    def state(self) -> State:
        """ "stopped": no process makes it, and it has steps left (it was stopped, killed, or failed)."""
        if self.holder:
            return "running"
        return "finished" if self.finished else "stopped"

"""A run's directory: configuration, metrics, evaluations, events, and whether the run is active.

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
from rollover.run.lock import holder_of
from rollover.run.tail import Tail
from rollover.track.jsonl import check_evaluation
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
    """The run in `directory`. `recorded`: the folder of its rollouts. ValueError where there is no run."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = local_path(directory)
        self.check()
        self.recorded = self.directory / ROLLOUTS
        self._metrics = Tail(self.directory / METRICS, numbers=True)
        self._evaluations = Tail(self.directory / EVALUATIONS)

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

"""One run as the page asks for it: every question, and its answer as JSON.

    GET /api/runs/0/<name>?<query>  ──▶  RunData.answer(name, query)

Owns the names of the questions and of their values. Answers are made of RunFiles, which reads only what is new. Locks
keep two questions about one part of it apart: while 100,000 rollouts are read for the first time, metrics are
answered. "state" is cheap, and asked every second: it says with which files' revisions the other answers would be, so
that the page asks again only for what changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

from rollover.reading.pace import seconds_a_step
from rollover.reading.run_files import EVALUATIONS, METRICS, RunFiles
from rollover.track.trace import TRACE
from rollover.track.waits import verdict
from rollover.view.balance import ledger
from rollover.view.found import Wanted, choices, page
from rollover.view.intervals import reward_intervals
from rollover.view.lanes import window
from rollover.view.numbers import number
from rollover.view.pieces import RunTokens
from rollover.view.planned import plan_of
from rollover.view.series import keys_of, series
from rollover.view.told import Pieces, told

Query = Mapping[str, str]
Part = Literal["rows", "rollouts", "trace"]
PARTS: tuple[Part, ...] = get_args(Part)
_POINTS = 800


class RunData:
    """Of the run in `directory`. ValueError where there is none. `pieces`: told.py; by default as its tokenizer
    says."""

    def __init__(self, directory: str | Path, pieces: Pieces | None = None) -> None:
        self.files = RunFiles(directory)
        self.pieces = RunTokens(self.files) if pieces is None else pieces
        self._locks = {part: threading.Lock() for part in PARTS}
        self._questions: dict[str, tuple[Callable[[Query], Any], tuple[Part, ...]]] = {
            "state": (self._state, ("rows",)),
            "keys": (lambda query: keys_of(self.files.metrics()), ("rows",)),
            "metrics": (self._metrics, ("rows",)),
            "evaluations": (self._evaluations, ("rows",)),
            "warnings": (lambda query: [of._asdict() for of in self.files.warnings()], ("rows",)),
            "choices": (lambda query: choices(self.files.rollouts), ("rollouts",)),
            "intervals": (lambda query: reward_intervals(self.files.rollouts), ("rollouts",)),
            "rollouts": (lambda query: page(self.files.rollouts, Wanted.of_query(query)), ("rollouts",)),
            "rollout": (self._rollout, ("rollouts", "trace")),
            "lanes": (self._lanes, ("trace",)),
            "ledger": (lambda query: ledger(self.files), PARTS),
            "config": (lambda query: self.files.config, ()),
            "plan": (lambda query: plan_of(self.files), ()),
        }

    @property
    def questions(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._questions)

    def answer(self, name: str, query: Query) -> Any:
        """JSON-able. KeyError where there is no such question, or what it asks for is not there; ValueError for a value
        that cannot be meant, and for files that are damaged."""
        if name not in self._questions:
            raise KeyError(f"there is no question {name}: there are {', '.join(self._questions)}")
        question, parts = self._questions[name]
        with self.reading(*parts):
            return question(query)

    def read_ahead(self) -> None:
        """Read what a first question about rollouts or the trace would wait for. What is damaged is told to that."""
        with suppress(ValueError, OSError):
            with self.reading("rollouts") as files:
                files.rollouts.entries()
            with self.reading("trace") as files:
                files.trace.look()

    @contextmanager
    def reading(self, *parts: Part) -> Iterator[RunFiles]:
        """The run's files, of which nobody else reads these parts meanwhile."""
        with ExitStack() as held:
            for part in PARTS:  # in one order, or two could wait for each other
                if part in parts:
                    held.enter_context(self._locks[part])
            yield self.files

    def revisions(self) -> dict[str, str]:
        """Of what the run writes: another word where there may be something new."""
        directory = self.files.directory
        names = {"metrics": METRICS, "evaluations": EVALUATIONS, "trace": TRACE}
        # A file of rollouts is replaced as a whole: the folder changes with each.
        return {of: _revision(directory / name) for of, name in names.items()} | {
            "rollouts": _revision(self.files.rollouts.dir)
        }

    # Questions

    def _state(self, query: Query) -> dict[str, Any]:
        files, rows = self.files, self.files.metrics()
        num_steps, step, state = files.value("train.num_steps"), rows[-1]["step"] if rows else 0, files.state
        pace = seconds_a_step(rows)
        left = None if state != "running" or num_steps is None or pace is None else max(0, num_steps - step) * pace
        waits = verdict(rows[-1]) if rows else None
        return {
            "name": files.name,
            "directory": str(files.directory),
            "state": state,
            "holder": files.holder if state == "running" else "",
            "ended_early": files.ended_early,
            "step": step,
            "num_steps": num_steps,
            "seconds_a_step": number(pace),
            "seconds_left": number(left),
            "waits": None if waits is None else {"bound": waits.bound, "text": waits.text, "advice": waits.advice},
            "revisions": self.revisions(),
        }

    def _metrics(self, query: Query) -> dict[str, Any]:
        keys = [key for key in query.get("keys", "").split(",") if key]
        return series(
            self.files.metrics(),
            keys,
            integer(query, "points", _POINTS) or _POINTS,
            integer(query, "from"),
            integer(query, "to"),
            query.get("x", "step"),
            self.files.value("rollout.group_size"),
        )

    def _evaluations(self, query: Query) -> list[dict[str, Any]]:
        rows = self.files.evaluations()
        return [{key: value for key, value in row.items() if key != "samples"} for row in rows]

    def _rollout(self, query: Query) -> dict[str, Any]:
        step, of = integer(query, "step"), query.get("id", "")
        if step is None or not of:
            raise ValueError("rollout: give the id of the rollout, and the step that it left with")
        first, count = integer(query, "first", 0) or 0, integer(query, "count", 2000) or 0
        return told(self.files, step, of, first, count, self.pieces)

    def _lanes(self, query: Query) -> dict[str, Any]:
        index = self.files.trace
        index.look()
        start, end = seconds(query, "from", 0.0), seconds(query, "to", max(index.seconds, 1e-3))
        return window(index, start, end, integer(query, "columns", _POINTS) or _POINTS)


def integer(query: Query, name: str, default: int | None = None) -> int | None:
    """ValueError names it where it is none, or below 0."""
    text = query.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{name}: {text!r} is no number from 0")
    return int(text)


def seconds(query: Query, name: str, default: float) -> float:
    """ValueError names it where it is no time."""
    text = query.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e12:
        raise ValueError(f"{name}: {text!r} is no number of seconds")
    return value


def _revision(path: Path) -> str:
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"

"""All queries about one run, with their answers as JSON.

    GET /api/runs/0/<name>?<query>  ──▶  RunData.answer(name, query)

Owns the names of the queries and of their values. IndexedRun provides the data and reads only new parts of the files.
One lock per part (rows, rollouts, trace, answers): metrics are answered while 100,000 rollouts are read for the first
time. "state" is cheap and requested every second: it has a revision per file, so the page repeats a query only after a
change. With a limited patience, queries about metrics, rollouts or the trace are answered from the part that was read
in time; the state then reports the share, and reading more changes the revision.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

from rollover.plugins.dashboard.eval_answers import answer, answers
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.lanes import window
from rollover.plugins.dashboard.metrics import LiveWarnings, keys_of, seconds_a_step, series
from rollover.plugins.dashboard.numbers import number
from rollover.plugins.dashboard.prediction import predict
from rollover.plugins.dashboard.query import NotFound, Query, count, integer, keys_in, seconds
from rollover.plugins.dashboard.rollout_detail import RunTokenTexts, TokenTexts, picture, rollout_detail
from rollover.plugins.dashboard.rollout_query import RolloutFilter, choices, episode, page
from rollover.plugins.dashboard.run_statistics import ledger, reward_intervals, staleness_map
from rollover.run.run_files import EVALUATIONS, METRICS
from rollover.track.bottleneck import find_bottleneck
from rollover.track.jsonl import to_json
from rollover.track.trace import TRACE

DataPart = Literal["rows", "rollouts", "trace", "answers"]
DATA_PARTS: tuple[DataPart, ...] = get_args(DataPart)
PATIENCE_S = 0.15  # of a server: a first view sends some six queries, and each may also wait for reading ahead
_PAUSE_S = 0.002  # lets queries take the lock
_HEAD_START_S = 1.0  # delay of reading ahead, for a first view
_QUIET_S = 0.03  # pause of reading ahead after an answer: a view sends several queries in sequence
_POINTS = 800
_LOOKS: dict[DataPart, Callable[[IndexedRun], Any]] = {
    "rows": lambda files: files.columns(),
    "rollouts": lambda files: files.rollouts.entries(),
    "trace": lambda files: files.trace.look(),
}
_DAMAGE_ERRORS = (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)


class RunData:
    """Answers the page's queries about the run in `directory`; ValueError without a run.

    `token_texts`: texts of tokens (rollout_detail.py), by default from the run's tokenizer. `patience_s`: how long a
    query may read new files, unlimited by default."""

    def __init__(
        self, directory: str | Path, token_texts: TokenTexts | None = None, *, patience_s: float = float("inf")
    ) -> None:
        self.files = IndexedRun(directory, patience_s=patience_s)
        self._warnings_so_far = LiveWarnings()
        self.token_texts = RunTokenTexts(self.files) if token_texts is None else token_texts
        self._locks = {part: threading.Lock() for part in DATA_PARTS}
        self._answering: set[int] = set()  # threads that answer a query now
        self._first_query, self._answered_at = threading.Event(), 0.0
        self._queries: dict[str, tuple[Callable[[Query], Any], tuple[DataPart, ...]]] = {
            "state": (self._state, ("rows",)),
            "keys": (lambda query: keys_of(self.files.columns()), ("rows",)),
            "metrics": (self._metrics, ("rows",)),
            "evaluations": (self._evaluations, ("rows",)),
            "warnings": (self._warnings, ("rows",)),
            "choices": (lambda query: choices(self.files.rollouts), ("rollouts",)),
            "intervals": (lambda query: reward_intervals(self.files.rollouts, self._untrained()), ("rollouts",)),
            "rollouts": (lambda query: page(self.files.rollouts, RolloutFilter.from_query(query)), ("rollouts",)),
            "rollout": (self._rollout, ("rollouts", "trace")),
            "picture": (self._picture, ("rollouts",)),
            "episode": (self._episode, ("rollouts",)),
            "staleness": (lambda query: staleness_map(self.files.rollouts), ("rollouts",)),
            # One at a time: a file of answers is read as a whole, and may be large.
            "answers": (lambda query: answers(self.files.directory, query), ("answers",)),
            "answer": (lambda query: answer(self.files.directory, query), ("answers",)),
            "lanes": (self._lanes, ("trace",)),
            "ledger": (lambda query: ledger(self.files), ("rows", "rollouts", "trace")),
            "config": (lambda query: to_json(self.files.config), ()),  # it may contain infinity
            "plan": (lambda query: predict(self.files), ()),
        }

    @property
    def queries(self) -> tuple[str, ...]:
        """Names of the queries."""
        return tuple(self._queries)

    def answer(self, name: str, query: Query) -> Any:
        """Answer a query as JSON-able data.

        NotFound (a KeyError) for an unknown query or a missing item; ValueError for invalid values and damaged files.
        """
        if name not in self._queries:
            raise NotFound(f"there is no query {name}: there are {', '.join(self._queries)}")
        function, parts = self._queries[name]
        with self.reading(*parts):
            return function(query)

    def state(self) -> dict[str, Any]:
        """Answer "state"; on an error the state is "unreadable", with the reason in "ended_early"."""
        try:
            return self.answer("state", {})
        except ValueError as error:
            directory = self.files.directory
            names = {"name": directory.absolute().name, "directory": str(directory), "state": "unreadable"}
            nothing = dict.fromkeys(("resume", "num_steps", "seconds_a_step", "seconds_left", "waits"))
            found = {"holder": "", "ended_early": str(error), "step": 0, "revisions": {}, "reading": {}}
            return {**names, **nothing, **found}

    def read_ahead(self) -> None:
        """Read the files in parts before the first query, yielding to queries. Errors are left to the queries."""
        self._first_query.wait(_HEAD_START_S)
        with suppress(ValueError, OSError):
            while True:
                for part, look in _LOOKS.items():
                    while self._answering or time.monotonic() < self._answered_at + _QUIET_S:
                        time.sleep(_PAUSE_S)
                    with self._held(part):
                        look(self.files)
                    time.sleep(_PAUSE_S)
                if not self._still_reading():
                    break

    @contextmanager
    def reading(self, *parts: DataPart) -> Iterator[IndexedRun]:
        """Lock these parts of the run's files for an answer, and pause reading ahead; ValueError for damaged files."""
        self._answering.add(threading.get_ident())
        try:
            with self._held(*parts):
                yield self.files
        finally:
            self._answering.discard(threading.get_ident())
            self._answered_at = time.monotonic()
            self._first_query.set()

    @contextmanager
    def _held(self, *parts: DataPart) -> Iterator[None]:
        with ExitStack() as held:
            for part in DATA_PARTS:  # in one order, against deadlocks
                if part in parts:
                    held.enter_context(self._locks[part])
            try:
                yield
            except (NotFound, ValueError):
                raise
            except OSError as error:
                where = error.filename or self.files.directory
                raise ValueError(f"{where} cannot be read: {error.strerror or error}") from error
            except _DAMAGE_ERRORS as error:  # values of a type that no run writes
                what = f"{type(error).__name__}: {error}"
                raise ValueError(f"a file of the run in {self.files.directory} is damaged ({what})") from error

    def revisions(self) -> dict[str, str]:
        """Return a revision per kind of file, which differs after a change."""
        directory = self.files.directory
        names = {"metrics": METRICS, "evaluations": EVALUATIONS, "trace": TRACE}
        # Files of rollouts are replaced as a whole, which changes the folder.
        paths = {of: directory / name for of, name in names.items()} | {"rollouts": self.files.rollouts.dir}
        left = self._still_reading()
        return {of: _revision(path) + (f"@{left[of]:.4f}" if of in left else "") for of, path in paths.items()}

    def _still_reading(self) -> dict[str, float]:
        """Return the share read of each part that is not read completely."""
        return {part: share for part, share in self.files.shares.items() if share < 1}

    def _state(self, query: Query) -> dict[str, Any]:
        self.files.check()
        files, columns = self.files, self.files.columns()
        num_steps, step, state = files.value("train.num_steps"), columns.last.get("step", 0), files.state
        pace = seconds_a_step(columns.newest)
        left = None
        if state == "running" and num_steps is not None and pace is not None and files.shares["metrics"] == 1:
            left = max(0, num_steps - step) * pace
        waits = find_bottleneck(columns.last) if columns.last else None
        return {
            "name": files.name,
            "directory": str(files.directory),
            "state": state,
            "holder": files.holder if state == "running" else "",
            "ended_early": files.ended_early,
            "resume": dict(zip(("command", "folder"), files.resume, strict=True)) if state == "stopped" else None,
            "step": step,
            "num_steps": num_steps,
            "seconds_a_step": number(pace),
            "seconds_left": number(left),
            "waits": None if waits is None else {"bound": waits.bound, "text": waits.text, "advice": waits.advice},
            "revisions": self.revisions(),
            "reading": self._still_reading(),
        }

    def _untrained(self) -> list[str]:
        roles = self.files.value("workflow.roles", {})
        return [name for name, role in roles.items() if not role.get("trained", True)]

    def _warnings(self, query: Query) -> list[dict[str, Any]]:
        return [of._asdict() for of in self._warnings_so_far.update(self.files.columns(), self.files.config)]

    def _metrics(self, query: Query) -> dict[str, Any]:
        return series(
            self.files.columns(),
            keys_in(query),
            count(query, "points", _POINTS) or _POINTS,
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
            raise ValueError("rollout: give the id and the step of the rollout")
        first, num = count(query, "first", 0), count(query, "count", 2000)
        self.files.rollouts.look_at_step(step)  # do not report an unread rollout as missing
        return rollout_detail(self.files, step, of, first, num, self.token_texts)

    def _picture(self, query: Query) -> dict[str, Any]:
        step, of, number = integer(query, "step"), query.get("id", ""), integer(query, "number")
        if step is None or not of or number is None:
            raise ValueError("picture: give the id and the step of the rollout, and the number of the image")
        self.files.rollouts.look_at_step(step)
        return picture(self.files, step, of, number)

    def _episode(self, query: Query) -> dict[str, Any]:
        step, group, sibling = (integer(query, name) for name in ("step", "group", "sibling"))
        if step is None or group is None or sibling is None:
            raise ValueError("episode: give step, group and sibling")
        self.files.rollouts.look_at_step(step)
        return episode(self.files.rollouts, step, group, sibling)

    def _lanes(self, query: Query) -> dict[str, Any]:
        index = self.files.trace
        index.look()
        start, end = seconds(query, "from", 0.0), seconds(query, "to", max(index.seconds, 1e-3))
        return window(index, start, end, count(query, "columns", _POINTS) or _POINTS)


def _revision(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"

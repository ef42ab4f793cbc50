"""Several runs as the page asks for them: the questions of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollover.plugins.dashboard.compare import curves, differences, evaluations
from rollover.plugins.dashboard.query import NotThere, count, keys_in
from rollover.plugins.dashboard.run_data import RunData

_POINTS = 400


class Several:
    """Of these runs, whose numbers are their places."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self._runs = runs
        self._questions: dict[str, Callable[[Mapping[str, str], list[RunData]], Any]] = {
            "config": lambda query, runs: differences([run.answer("config", {}) for run in runs]),
            "metrics": self._metrics,
            "evaluations": lambda query, runs: evaluations([run.files for run in runs]),  # files that never change
        }

    @property
    def questions(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._questions)

    def answer(self, name: str, query: Mapping[str, str]) -> Any:
        """JSON-able, of the runs in `query["runs"]` ("0,2"; all without it). KeyError where there is no such question
        or run; ValueError for a value that cannot be meant."""
        places = dict.fromkeys(self._place(text) for text in query.get("runs", "").split(",") if text)
        chosen = [self._runs[place] for place in places] or list(self._runs)
        if name not in self._questions:
            raise NotThere(f"there is no question {name}: there are {', '.join(self._questions)}")
        return self._questions[name](query, chosen)

    def _place(self, text: str) -> int:
        if not text.isdecimal() or not int(text[:9]) < len(self._runs):
            raise NotThere(f"runs: there is no run {text:.20}: there are {len(self._runs)}")
        return int(text[:9])

    def _metrics(self, query: Mapping[str, str], runs: list[RunData]) -> list[dict[str, Any]]:
        keys = keys_in(query)
        points = count(query, "points", _POINTS) or _POINTS
        found = []
        for run in runs:
            with run.reading("rows") as files:
                found += curves([files], keys, query.get("x", "step"), points)
        return found

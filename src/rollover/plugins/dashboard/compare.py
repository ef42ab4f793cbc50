"""Several runs beside each other: differing settings, curves over one axis, evaluations paired by task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.metrics import series
from rollover.plugins.dashboard.numbers import numbers
from rollover.plugins.dashboard.query import NotFound, count, keys_in
from rollover.plugins.dashboard.run_data import RunData
from rollover.run.run_files import EVALUATED
from rollover.track.compare_evals import compare_recorded, read_recorded

_IGNORED = ("run.dir", "run.name")  # always differ


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that differ between runs, with their "values" as TOML-like JSON, None if missing."""
    flat = [_flat(config) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    found = [{"key": key, "values": [config.get(key) for config in flat]} for key in keys if key not in _IGNORED]
    return [of for of in found if len(set(of["values"])) > 1]


def curves(runs: Sequence[IndexedRun], keys: Sequence[str], x: str, points: int) -> list[dict[str, Any]]:
    """Return `series` of each run; ValueError for an unknown axis."""
    return [series(run.columns(), keys, points, x=x, group_size=run.value("rollout.group_size")) for run in runs]


def evaluations(runs: Sequence[IndexedRun]) -> list[dict[str, Any]]:
    """Compare the newest evaluation of each later run with that of the first.

    "comparisons": one per setting; [] and a reason in "why" if there is nothing to compare.
    """
    found = []
    first, why_not = _answers(runs[0])
    for run in runs[1:]:
        rows, why = _answers(run)
        why = why_not or why
        comparisons = [] if why else compare_recorded(rows, first)
        if not why and not comparisons:
            why = "no task has a score in both (the same task_id and prompt, in the same setting)"
        shown = [{**of.as_json(), "text": str(of), "ci": of.ci and numbers(of.ci)} for of in comparisons]
        found.append({"comparisons": shown, "why": why})
    return found


def _answers(run: IndexedRun) -> tuple[list[dict[str, Any]], str]:
    """Return (rows, "") or ([], reason)."""
    if not (run.directory / EVALUATED).is_dir():
        return [], f"{run.name} has no recorded evaluation (track.answers, eval.num_tasks)"
    try:
        return read_recorded(run.directory, ""), ""
    except ValueError as error:
        return [], str(error)


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested tables to "table.key"."""
    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{name}": text for name, text in _flat(value).items()}
        else:
            found[key] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return found


_POINTS = 400


class RunComparison:
    """Queries about several runs; a run's number is its place."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self._runs = runs
        self._queries: dict[str, Callable[[Mapping[str, str], list[RunData]], Any]] = {
            "config": lambda query, runs: differences([run.answer("config", {}) for run in runs]),
            "metrics": self._metrics,
            # Without a lock: recorded evaluations never change.
            "evaluations": lambda query, runs: evaluations([run.files for run in runs]),
        }

    @property
    def queries(self) -> tuple[str, ...]:
        """Names of the queries."""
        return tuple(self._queries)

    def answer(self, name: str, query: Mapping[str, str]) -> Any:
        """Answer a query about the runs in `query["runs"]` ("0,2", default all) as JSON-able data.

        NotFound for an unknown query or run; ValueError for an invalid value.
        """
        places = dict.fromkeys(self._place(text) for text in query.get("runs", "").split(",") if text)
        chosen = [self._runs[place] for place in places] or list(self._runs)
        if name not in self._queries:
            raise NotFound(f"there is no query {name}: there are {', '.join(self._queries)}")
        return self._queries[name](query, chosen)

    def _place(self, text: str) -> int:
        if not text.isdecimal() or not int(text[:9]) < len(self._runs):
            raise NotFound(f"runs: there is no run {text:.20}: there are {len(self._runs)}")
        return int(text[:9])

    def _metrics(self, query: Mapping[str, str], runs: list[RunData]) -> list[dict[str, Any]]:
        keys = keys_in(query)
        points = count(query, "points", _POINTS) or _POINTS
        found = []
        for run in runs:
            with run.reading("rows") as files:
                found += curves([files], keys, query.get("x", "step"), points)
        return found

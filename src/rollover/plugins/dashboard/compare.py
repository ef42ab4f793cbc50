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

_OWN_PLACE = ("run.dir", "run.name")  # differ always, and say nothing


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys that are not the same in all runs: "values" of each, as TOML-like JSON, None where a run has none."""
    flat = [_flat(config) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    found = [{"key": key, "values": [config.get(key) for config in flat]} for key in keys if key not in _OWN_PLACE]
    return [of for of in found if len(set(of["values"])) > 1]


def curves(runs: Sequence[IndexedRun], keys: Sequence[str], x: str, points: int) -> list[dict[str, Any]]:
    """`series` of each run. ValueError for an axis that there is not."""
    return [series(run.columns(), keys, points, x=x, group_size=run.value("rollout.group_size")) for run in runs]


def evaluations(runs: Sequence[IndexedRun]) -> list[dict[str, Any]]:
    """The newest recorded evaluation of each run after the first against that of the first: "comparisons", one for each
    setting; [] and "why" where there is nothing to compare."""
    found = []
    first, why_not = _answers(runs[0])
    for run in runs[1:]:
        rows, why = _answers(run)
        why = why_not or why
        comparisons = [] if why else compare_recorded(rows, first)
        if not why and not comparisons:
            why = "no task has a score in both (the same task_id and prompt, in the same setting)"
        told = [{**of.as_json(), "text": str(of), "ci": of.ci and numbers(of.ci)} for of in comparisons]
        found.append({"comparisons": told, "why": why})
    return found


def _answers(run: IndexedRun) -> tuple[list[dict[str, Any]], str]:
    """(the rows, "") or ([], why there are none)."""
    if not (run.directory / EVALUATED).is_dir():
        return [], f"{run.name} has no recorded evaluation (track.answers, eval.num_tasks)"
    try:
        return read_recorded(run.directory, ""), ""
    except ValueError as error:
        return [], str(error)


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """By "table.key"; tables in tables too."""
    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{name}": text for name, text in _flat(value).items()}
        else:
            found[key] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return found


_POINTS = 400


class RunComparison:
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
            raise NotFound(f"there is no question {name}: there are {', '.join(self._questions)}")
        return self._questions[name](query, chosen)

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

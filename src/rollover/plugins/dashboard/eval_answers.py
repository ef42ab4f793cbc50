"""Answers of a run's evaluations: a filtered page, and one answer with the scores of its task in other evaluations.

Owns the names of the filters. Each query reads the file again; nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.plugins.dashboard.numbers import number
from rollover.plugins.dashboard.query import NotFound, Query, count, real
from rollover.plugins.dashboard.rollout_query import EXCERPT
from rollover.run.run_files import EVALUATED
from rollover.track.compare_evals import read_recorded
from rollover.track.records import step_of

MOST_ROWS, MOST_EVALUATIONS = 500, 8
UNNAMED = "[eval]"  # name of the unnamed setting in a query
_FILTERS = ("step", "text", "setting", "scored", "score_from", "score_to", "sort", "order", "offset", "limit")
_SORTS = {"score": "score", "tokens": "num_tokens"}
_SEARCHED = ("task_id", "prompt", "answer", "expected")


def evaluated_steps(directory: Path) -> dict[int, Path]:
    """Return step -> file of the recorded answers, in order."""
    folder = directory / EVALUATED
    files = sorted(folder.glob("step-*.jsonl")) if folder.is_dir() else []
    return {step: path for path in files if (step := step_of(path.name)) is not None}


def answers(directory: Path, query: Query) -> dict[str, Any]:
    """Return a page of the evaluation after "step" (default: the newest).

    "rows": place in the file, task, score, excerpts of prompt and answer. "steps": of all evaluations; "settings": of
    this one; "of": number of answers; "passed": after filtering; "next": offset of the next page, None after the last.
    ValueError for an unknown filter or an invalid value, NotFound for a missing evaluation.
    """
    if unknown := sorted(query.keys() - set(_FILTERS)):
        raise ValueError(f"{unknown[0]}: there is no such filter; there are {', '.join(_FILTERS)}")
    files = evaluated_steps(directory)
    if not files and not query.get("step"):
        return {"steps": [], "step": None, "settings": [], "rows": [], "of": 0, "passed": 0, "offset": 0, "next": None}
    step = count(query, "step", max(files, default=0))
    rows = _rows_of(files, step)
    offset, limit = count(query, "offset", 0), count(query, "limit", 50, MOST_ROWS)
    passed = _ordered([(place, row) for place, row in enumerate(rows) if _passes(row, query)], query)
    shown = passed[offset : offset + limit]
    after = offset + len(shown)
    return {
        "steps": list(files),
        "step": step,
        "settings": list(dict.fromkeys(row.get("setting", "") for row in rows)),
        "rows": [_row(place, row) for place, row in shown],
        "of": len(rows),
        "passed": len(passed),
        "offset": offset,
        "next": after if after < len(passed) else None,
    }


def answer(directory: Path, query: Query) -> dict[str, Any]:
    """Return the complete answer at "place" of the evaluation after "step"; NotFound without it.

    "over": "step", mean score and "count" of the same task (task_id, prompt and setting) in the first and the newest
    evaluations.
    """
    files = evaluated_steps(directory)
    step, place = count(query, "step", max(files, default=0)), count(query, "place", 0)
    rows = _rows_of(files, step)
    if not place < len(rows):
        raise NotFound(f"the evaluation after step {step} has no answer {place}: it has {len(rows)}")
    row, steps = rows[place], list(files)
    whole = _whole_row(rows, place, step)
    looked_at = sorted({*steps[:1], *steps[-MOST_EVALUATIONS:], step})
    over = []
    for other in looked_at:
        scores = [of["score"] for of in _rows_of(files, other) if _task(of) == _task(row) and of["score"] is not None]
        if scores:
            over.append({"step": other, "mean": number(sum(scores) / len(scores)), "count": len(scores)})
    return {**whole, "over": over}


def lowest(directory: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the answers of the newest evaluation by increasing score: (list row, complete answer without "over")."""
    files = evaluated_steps(directory)
    if not files:
        return
    step = max(files)
    rows = _rows_of(files, step)
    for place, row in _ordered(list(enumerate(rows)), {"sort": "score"}):
        yield _row(place, row), {**_whole_row(rows, place, step), "over": []}


def _whole_row(rows: Sequence[Mapping[str, Any]], place: int, step: int) -> dict[str, Any]:
    row = rows[place]
    same = [other for other, of in enumerate(rows) if _task(of) == _task(row)]
    return {**row, "step": step, "place": place, "of": len(rows), "same_task": same}


def _task(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["task_id"], row["prompt"], row.get("setting", "")


def _rows_of(files: Mapping[int, Path], step: int) -> list[dict[str, Any]]:
    if step not in files:
        raise NotFound(f"no answers were recorded of an evaluation after step {step}")
    return read_recorded(files[step], "")


def _passes(row: Mapping[str, Any], query: Query) -> bool:
    score, text = row["score"], query.get("text", "").lower()
    if (low := real(query, "score_from")) is not None and not (score is not None and score >= low):
        return False
    if (high := real(query, "score_to")) is not None and not (score is not None and score <= high):
        return False
    if (scored := query.get("scored")) and (score is not None) != (scored == "yes"):
        return False
    if (setting := query.get("setting")) and (row.get("setting") or UNNAMED) != setting:
        return False
    return not text or any(text in other.lower() for other in _searched_texts(row))


def _searched_texts(row: Mapping[str, Any]) -> Iterator[str]:
    return (row[key] for key in _SEARCHED if isinstance(row.get(key), str))


def _ordered(passed: list[tuple[int, dict[str, Any]]], query: Query) -> list[tuple[int, dict[str, Any]]]:
    """Sort; rows without a value come last."""
    sort, order = query.get("sort", ""), query.get("order") or "up"
    if sort and sort not in _SORTS:
        raise ValueError(f"sort: {sort!r} is not one of {', '.join(_SORTS)}")
    if order not in ("up", "down"):
        raise ValueError(f"order: {order!r} is neither up nor down")
    sign = 1 if order == "up" else -1
    if not sort:
        return passed[::sign]

    def rank(of: tuple[int, dict[str, Any]]) -> tuple[bool, float]:
        value = of[1].get(_SORTS[sort])
        return value is None, sign * (value or 0.0)

    return sorted(passed, key=rank)


def _row(place: int, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "place": place,
        "task": row["task_id"],
        "sibling": row.get("sibling"),
        "source": row.get("data_source") or row.get("source") or "",
        "setting": row.get("setting", ""),
        "score": number(row["score"]),
        "tokens": row.get("num_tokens"),
        "stop": row.get("stop_reason") or "",
        "asked": row["prompt"][-EXCERPT:],  # the question is at the end, after the common part
        "answered": str(row.get("answer") or "")[:EXCERPT],
        "expected": str(row["expected"])[:EXCERPT] if row.get("expected") is not None else None,
        "error": row.get("error"),
    }

"""The metrics of a run as columns over its steps, thinned out to what a screen can show. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.numbers import number, numbers
from rollover.track.metrics import find

MOST_POINTS = 4_000  # a screen has fewer
AXES = {
    "step": "training steps",
    "tokens": "tokens generated",
    "samples": "rollouts trained (of agents: episodes)",
    "time": "seconds in steps",
}
"""What a curve may be drawn over, and in what it is counted."""


def axis(of: Columns, name: str, group_size: int | None = None) -> np.ndarray:
    """[step] float64: where each step lies on one of AXES. ValueError for another name.

    "time" is the sum of the steps' times, so that an interruption takes none. "samples" counts groups where nobody
    knows `group_size`.
    """
    if name == "step":
        return of.column("step")
    if name == "tokens":
        return of.column("tokens/generated")
    if name == "samples":
        return of.column("groups/consumed") * (group_size or 1)
    if name == "time":
        return np.cumsum(np.nan_to_num(of.column("time/step_s")))
    raise ValueError(f"x: {name!r} is no axis: give one of {', '.join(AXES)}")


def keys_of(of: Columns) -> list[dict[str, Any]]:
    """Every key that some step has, in the order of their first steps: its latest value, unit and meaning."""
    found = []
    for key, value in of.latest.items():
        metric = find(key)
        unit, doc, kind = (metric.unit, metric.doc, metric.kind) if metric else ("", "", "")
        found.append({"key": key, "last": number(value), "unit": unit, "doc": doc, "kind": kind})
    return found


def series(
    of: Columns,
    keys: Sequence[str],
    points: int,
    first: int | None = None,
    last: int | None = None,
    x: str = "step",
    group_size: int | None = None,
) -> dict[str, Any]:
    """Columns of `keys` over the steps from `first` to `last`, of some `points` values each.

    Where there are more steps than that, consecutive ones are one bucket, of which the least and the largest value are
    left: a spike of one step stays a spike. "first", "last": the bucket of each value, which may be of any step in it;
    "steps": where it is drawn, at one end of that; "x": where this lies on the axis; "thinned": how many steps are in a
    bucket, 1 where every step is there.
    """
    place = axis(of, x, group_size)
    steps = of.column("step")
    chosen = np.ones(len(steps), bool)
    if first is not None:
        chosen &= steps >= first
    if last is not None:
        chosen &= steps <= last
    columns = {key: of.column(key)[chosen] for key in keys}
    steps, place = steps[chosen], place[chosen]
    count = len(steps)
    buckets = max(1, min(points, MOST_POINTS) // 2)
    thinned, between = 1, (steps, steps)
    if count > 2 * buckets:
        begins = np.unique(np.linspace(0, count, buckets, endpoint=False).astype(np.int64))
        ends = np.append(begins[1:], count) - 1
        between = np.repeat(steps[begins], 2), np.repeat(steps[ends], 2)
        steps, place = _pairs(steps[begins], steps[ends]), _pairs(place[begins], place[ends])
        columns = {key: _extremes(values, begins, ends) for key, values in columns.items()}
        thinned = -(-count // buckets)
    return {
        "steps": numbers(steps),
        "first": numbers(between[0]),
        "last": numbers(between[1]),
        "x": numbers(place),
        "columns": {key: numbers(values) for key, values in columns.items()},
        "of": count,
        "thinned": thinned,
    }


def _pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([a, b], axis=1).reshape(-1)


def _extremes(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of each bucket its least and its largest value, in the order in which the bucket goes."""
    low, high = np.fmin.reduceat(values, begins), np.fmax.reduceat(values, begins)
    falls = values[ends] < values[begins]
    return _pairs(np.where(falls, high, low), np.where(falls, low, high))

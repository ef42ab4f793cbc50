"""Metrics as columns: every step where there is room, and no spike lost where there is none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.metrics import axis, keys_of, series
from rollover.plugins.dashboard.numbers import number, numbers, times


def rows(count: int) -> list[dict]:
    return [
        {
            "step": step,
            "loss": math.sin(step),
            "tokens/generated": 100 * step,
            "groups/consumed": 2 * step,
            "time/step_s": 0.5,
            **({"rare": step} if step % 7 == 0 else {}),
        }
        for step in range(1, count + 1)
    ]


def test_numbers_are_short_and_strict_json() -> None:
    assert [number(v) for v in (1.0, 0.1 + 0.2, float("nan"), float("inf"), None, 2.0**60, 123456789.0)] == [
        1, 0.3, None, None, None, 1.152922e18, 123456789
    ]  # fmt: skip
    assert numbers(np.array([1.5, np.nan])) == [1.5, None]
    assert times(np.array([1.23456789]), 0.01) == [1.235] and times(np.array([1234.56]), 60.0) == [1235.0]


def test_few_steps_are_all_there() -> None:
    found = series(Columns.from_rows(rows(20)), ["loss", "rare", "absent"], 40)
    assert found["steps"] == list(range(1, 21)) == found["x"] == found["first"] == found["last"]
    assert (found["of"], found["thinned"]) == (20, 1)
    assert found["columns"]["loss"] == [number(math.sin(step)) for step in range(1, 21)]
    assert found["columns"]["rare"] == [step if step % 7 == 0 else None for step in range(1, 21)]
    assert found["columns"]["absent"] == [None] * 20


def test_a_window_of_steps_has_only_these() -> None:
    assert series(Columns.from_rows(rows(20)), ["loss"], 40, first=5, last=7)["steps"] == [5, 6, 7]
    assert series(Columns.from_rows(rows(20)), ["loss"], 40, first=30)["columns"] == {"loss": []}


@pytest.mark.parametrize("spike", [1, 4321, 9999, 10_000])
@pytest.mark.parametrize("value", [1e6, -1e6])
def test_of_many_steps_a_spike_of_one_is_left(spike: int, value: float) -> None:
    many = rows(10_000)
    many[spike - 1]["loss"] = value
    found = series(Columns.from_rows(many), ["loss", "rare"], 200)
    assert found["of"] == 10_000 and found["thinned"] == 100 and len(found["steps"]) <= 200
    place = found["columns"]["loss"].index(value)
    assert found["first"][place] <= spike <= found["last"][place] and found["last"][place] - found["first"][place] < 100
    assert set(found["first"][1:]) - set(found["first"][:1]) == {last + 1 for last in found["last"] if last < 10_000}
    assert found["steps"] == sorted(found["steps"]) and found["steps"][0] == 1 and found["steps"][-1] == 10_000
    assert max(v for v in found["columns"]["rare"] if v is not None) == 9996
    assert len(json.dumps(found)) < 20_000


def test_a_bucket_without_a_value_has_none() -> None:
    many = rows(1000)
    for row in many[:500]:
        row["loss"] = None
    found = series(Columns.from_rows(many), ["loss"], 20)
    assert found["columns"]["loss"][:10] == [None] * 10 and None not in found["columns"]["loss"][10:]


def test_axes() -> None:
    made = rows(3)
    made[1]["time/step_s"] = None
    of = Columns.from_rows(made)
    assert axis(of, "tokens").tolist() == [100, 200, 300]
    assert axis(of, "samples", 4).tolist() == [8, 16, 24] and axis(of, "samples").tolist() == [2, 4, 6]
    assert axis(of, "time").tolist() == [0.5, 0.5, 1.0]
    assert series(of, ["loss"], 10, x="tokens")["x"] == [100, 200, 300]
    with pytest.raises(ValueError, match="x: 'miles' is no axis: give one of step, tokens"):
        axis(of, "miles")


def test_no_rows_are_no_values() -> None:
    assert series(Columns.from_rows([]), ["loss"], 10) == {
        "steps": [], "first": [], "last": [], "x": [], "columns": {"loss": []}, "of": 0, "thinned": 1,
    }  # fmt: skip


def test_keys_have_what_they_mean() -> None:
    columns = Columns.from_rows([{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/a/mean": None}])
    found = {of["key"]: of for of in keys_of(columns)}
    assert found["step"]["last"] == 2 and found["reward/mean"]["last"] == 0.5 and found["reward/a/mean"]["last"] is None
    assert found["reward/mean"]["unit"] == "reward" and "Mean score" in found["reward/mean"]["doc"]

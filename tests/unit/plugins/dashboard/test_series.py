"""The series of a run: columns, predictions, statistics of steps."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorded_run import group, recorded, row, write_run
from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.metrics import LiveWarnings, axis, keys_of, series, warnings_of
from rollover.plugins.dashboard.numbers import number, numbers, times
from rollover.plugins.dashboard.prediction import measured_figures, predict
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.plugins.dashboard.run_data import RunData
from rollover.plugins.dashboard.run_statistics import MOST_COLUMNS, MOST_LEVELS, reward_intervals, staleness_map
from rollover.run.run_files import Tail
from rollover.track.health import Health
from rollover.track.records import FORMATS, RolloutRecorder
from rollover.track.statistics import mean_interval
from rollover.types import DropReason, Group, Rollout

# Metrics as columns: every step where there is room, and no spike lost where there is none


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
    for of in many[:500]:
        of["loss"] = None
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


# Columns: metrics by key are what their rows say, and take little of memory however many there are


def made(count: int, keys: int = 3) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {"step": step, "whole": 3 * step, "same": 0.1, **{f"own/{n}": rng.random() for n in range(keys)}}
        | ({"rare": step / 7} if step % 50 == 0 else {})
        | ({"none": None} if step > 5 else {})
        for step in range(1, count + 1)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(columns: Columns, rows: list[dict[str, Any]]) -> None:
    """The columns are those of the rows."""
    assert len(columns) == len(rows)
    for key in {key for of in rows for key in of} | {"absent"}:
        expected = np.array([of.get(key) for of in rows], np.float64)
        np.testing.assert_array_equal(columns.column(key), expected)
        np.testing.assert_array_equal(columns.column(key, 300), expected[300:])
    assert columns.last == (rows[-1] if rows else {})
    assert list(columns.newest) == rows[-len(columns.newest) :] if rows else not columns.newest


@pytest.mark.parametrize("count", [0, 31, 288, 1300])
def test_they_are_what_the_rows_say(tmp_path: Path, count: int) -> None:
    rows = made(count)
    write(tmp_path / "metrics.jsonl", rows)
    columns = Columns(tmp_path / "metrics.jsonl")
    columns.look()
    check(columns, rows)
    check(Columns.from_rows(rows), rows)
    assert len(columns.newest) == min(count, 32)


def test_they_grow_and_are_cut_back_with_the_file(tmp_path: Path) -> None:
    path, rows = tmp_path / "metrics.jsonl", made(900)
    columns, tail = Columns(path), Tail(path)
    for end in (0, 10, 500, 700, 300, 310, 900):
        write(path, rows[:end])
        before = columns.rollbacks
        columns.look()
        check(columns, tail.rows())
        assert (columns.rollbacks > before) == (end == 300), "who keeps something of them learns that rows went away"
    path.unlink()
    columns.look()
    assert len(columns) == 0


@pytest.mark.parametrize("again", [899, 512, 1])
def test_steps_that_were_made_again_are_there_once(tmp_path: Path, again: int) -> None:
    """Also where they were packed already."""
    path, rows = tmp_path / "metrics.jsonl", made(900)
    write(path, rows + [row | {"same": 0.2} for row in rows[again - 1 : again + 5]])
    columns, tail = Columns(path), Tail(path)
    columns.look()
    expected = tail.rows()
    assert len(columns) == len(expected) == min(again + 5, 900)
    for key in ("step", "whole", "same", "own/1", "rare"):
        np.testing.assert_array_equal(
            columns.column(key), np.array([row.get(key) for row in expected], np.float64), err_msg=key
        )
    assert columns.last == expected[-1] and columns.rollbacks > 1


@pytest.mark.parametrize("wrong", ["nonsense\n", "[1]\n", '{"loss": 1}\n', '{"step": 2, "loss": "low"}\n'])
def test_a_line_that_is_no_row_names_the_file(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + wrong)
    with pytest.raises(ValueError, match="metrics.jsonl.*restore the file"):
        Columns(path).look()


def test_live_warnings_check_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "entropy": 0.01 if step > 290 else 1.0, "grad_norm": None} for step in range(1, 600)]
    rows[400] |= {"train/skipped_steps": 1}
    columns, warned, looked_at = Columns(path), LiveWarnings(), []
    look = Health.look
    monkeypatch.setattr(Health, "look", lambda health, row: looked_at.append(row["step"]) or look(health, row))
    for end in (100, 293, 500, 599):
        write(path, rows[:end])
        columns.look()
        found = warned.update(columns, {})
    assert looked_at == list(range(1, 600)) and [of.key for of in found] == ["entropy", "train/skipped_steps"]
    assert found == warnings_of(rows, {})
    write(path, rows[:299])
    columns.look()
    assert [of.step for of in warned.update(columns, {})] == [295]


# The plan beside what happened


def test_what_happened_is_the_mean_of_the_steps() -> None:
    rows = [row(step, **{"speed/generated_tokens_per_s": 20}) for step in (1, 2, 3)]
    found = measured_figures(rows)
    assert (found["step_s"], found["generate_s"], found["train_s"]) == (2, 1, 0.5)
    assert found["trained_tokens_per_s"] == 6 and found["staleness_max"] == 1 and found["staleness_mean"] is None
    assert found["dropped_share"] == 21 / 61 or abs(found["dropped_share"] - 21 / 61) < 1e-6
    assert measured_figures([]) == {} and measured_figures([{"step": 1}])["step_s"] is None


def test_a_run_that_tells_no_speeds_says_why(tmp_path: Path) -> None:
    assert "its metrics have no engine/decode_steps" in predict(IndexedRun(write_run(tmp_path)))["why"]
    (tmp_path / "config.resolved.json").write_text('{"train": {"num_steps": -1}}')
    assert "cannot be planned" in predict(IndexedRun(tmp_path))["why"]


def test_a_run_is_planned_with_its_own_lengths_and_speeds(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    config = {"rollout": {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 16}, "plan": {"steps": 4}}
    (tmp_path / "config.resolved.json").write_text(json.dumps(config))
    more = {"tokens/step_generated": 16, "time/weights_s": 0.1}
    rows = [row(step, **more, **{"engine/decode_steps": 8 * step}) for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    told = predict(IndexedRun(tmp_path))
    assert told["steps"] == 4 and "lengths" in told["from"]
    assert told["predicted"]["step_s"] > 0 and told["happened"]["step_s"] == 2


# Statistics over steps: how sure the reward of a step is, and the cells of trained rollouts in the staleness map


def test_the_interval_is_over_groups_and_of_what_was_trained(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    recorder.write(1, [recorded(group(0, [1.0, 0.0, None])), recorded(group(1, [1.0, 1.0])), recorded(group(2, [0.0]))])
    recorder.write(2, [recorded(group(3, [1.0, 0.0]))])  # of one group nobody knows how it varies
    dropped = recorded(group(6, [9.0]), DropReason.STALE)
    recorder.write(3, [recorded(group(4, [0.5])), recorded(group(5, [0.5])), dropped, recorded(group(7, [None]))])
    found = reward_intervals(RolloutIndex(tmp_path))
    _, (low, high) = mean_interval([0.5, 1.0, 0.0])
    assert found["steps"] == [1, 3]
    assert found["low"] == pytest.approx([low, 0.5], abs=1e-6) and found["high"] == pytest.approx([high, 0.5], abs=1e-6)


def test_reward_interval_counts_trained_trajectories_once(tmp_path: Path) -> None:
    """As in reward/mean: three contexts of one trajectory have one score."""

    def agents(group_id: int, good: float, judge: float) -> Group:
        of = group(group_id, [good, good, good, 0.0, judge, judge])
        places = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
        of.rollouts = [
            Rollout(
                group_id, sibling, one.task, one.segments, one.state, one.stop_reason, one.reward,
                role="judge" if trajectory else "solver", trajectory=trajectory, context=context,
            )
            for one, (sibling, trajectory, context) in zip(of.rollouts, places, strict=True)
        ]  # fmt: skip
        return of

    for form in FORMATS:
        folder = tmp_path / form
        recorder = RolloutRecorder(folder / "rollouts", formats=(form,))
        recorder.write(1, [recorded(agents(0, 1.0, 7.0)), recorded(agents(1, 0.4, 9.0))])
        roles = {"judge": {"trained": False}, "solver": {"trained": True}}
        (folder / "config.resolved.json").write_text(json.dumps({"workflow": {"roles": roles}}))
        found = RunData(folder).answer("intervals", {})
        _, (low, high) = mean_interval([0.5, 0.2])
        assert (found["low"], found["high"]) == (pytest.approx([low], abs=1e-6), pytest.approx([high], abs=1e-6))


def test_nothing_recorded_has_no_interval(tmp_path: Path) -> None:
    assert reward_intervals(RolloutIndex(tmp_path)) == {"steps": [], "low": [], "high": []}


def test_staleness_map_counts_trained_rollouts(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    recorder.write(3, [recorded(group(1, [1.0, 0.0], [2])), recorded(group(2, [1.0], [0]))])
    recorder.write(4, [recorded(group(3, [1.0], [1, 3])), recorded(group(4, [1.0], [0]), DropReason.STALE)])
    told = staleness_map(RolloutIndex(tmp_path))
    assert (told["first"], told["last"], told["low"], told["high"]) == ([3, 4], [3, 4], [0, 1, 2], [0, 1, 2])
    assert told["counts"] == [[2, 0], [0, 0], [1, 1]] and told["read"] == 1


def test_staleness_map_merges_steps_and_versions(tmp_path: Path) -> None:
    recorder, steps = RolloutRecorder(tmp_path), [*range(1, 1000, 3), 1000]
    for step in steps:
        recorder.write(step, [recorded(group(step, [1.0], [max(0, step - 1 - step % 40)]))])
    told = staleness_map(RolloutIndex(tmp_path))
    counts = np.array(told["counts"])
    assert counts.shape == (len(told["low"]), len(told["first"])) and counts.sum() == len(steps)
    assert len(told["first"]) <= MOST_COLUMNS and len(told["low"]) <= MOST_LEVELS
    assert told["first"][0] == 1 and told["last"][-1] == 1000
    assert all(a + 1 == b for a, b in zip(told["last"], told["first"][1:], strict=False))
    assert all(a + 1 == b for a, b in zip(told["high"], told["low"][1:], strict=False))


def test_nothing_recorded_is_an_empty_map(tmp_path: Path) -> None:
    assert staleness_map(RolloutIndex(tmp_path / "none"))["counts"] == []
    assert len(staleness_map(RolloutIndex(write_run(tmp_path) / "rollouts"))["first"]) == 3

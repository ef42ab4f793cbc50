"""Columns: metrics by key are what their rows say, and take little of memory however many there are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.metrics import LiveWarnings, warnings_of
from rollover.run.run_files import Tail
from rollover.track.health import Health


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
    for key in {key for row in rows for key in row} | {"absent"}:
        expected = np.array([row.get(key) for row in rows], np.float64)
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

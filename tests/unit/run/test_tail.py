"""Tail: rows of a file that somebody writes at the same time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollover.run.run_files import Tail


def line(step: int, **more: float) -> str:
    return json.dumps({"step": step, **more}) + "\n"


def steps(tail: Tail) -> list[int]:
    return [row["step"] for row in tail.rows()]


def test_no_file_has_no_rows_and_may_come_later(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.rows() == []
    tail.path.write_text(line(1))
    assert steps(tail) == [1]
    tail.path.unlink()
    assert tail.rows() == []


def test_half_a_line_is_none_until_it_is_whole(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    whole = line(1) + line(2, **{"reward/mean": 0.5})
    for end in range(len(whole) + 1):
        tail.path.write_text(whole[:end])
        assert steps(tail) == [1, 2][: whole[:end].count("\n")]
    assert tail.rows()[1] == {"step": 2, "reward/mean": 0.5}


def test_only_what_is_new_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    monkeypatch.setattr("rollover.run.run_files.parse_row", lambda path, row: parsed.append(row) or json.loads(row))
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text(line(1) + line(2))
    tail.rows()
    with open(tail.path, "a") as file:
        file.write(line(3))
    assert steps(tail) == [1, 2, 3] and len(parsed) == 3


def test_file_cut_back_and_extended_is_read_again(tmp_path: Path) -> None:
    """As a run does that goes on from a checkpoint: also where the new rows reach as far as the old ones did."""
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text(line(1) + line(2, loss=1.0) + line(3, loss=1.0))
    tail.rows()
    tail.path.write_text(line(1) + line(2, loss=2.0) + line(3, loss=2.0) + line(4, loss=2.0))
    assert [row.get("loss") for row in tail.rows()] == [None, 2.0, 2.0, 2.0]
    tail.path.write_text(line(1))
    assert steps(tail) == [1]


def test_a_step_that_was_made_again_is_there_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text(line(1) + line(2, loss=1.0) + line(3) + line(2, loss=2.0))
    assert tail.rows() == [{"step": 1}, {"step": 2, "loss": 2.0}]


@pytest.mark.parametrize("wrong", ["nonsense\n", "[1]\n", '{"loss": 1}\n', "\n"])
def test_a_line_that_is_no_row_names_the_file(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + wrong + line(2))
    with pytest.raises(ValueError, match="metrics.jsonl.*restore the file"):
        Tail(path).rows()


@pytest.mark.parametrize("wrong", ['{"step": "2"}\n', '{"step": null}\n', '{"step": 2, "reward/mean": "\\u001b[2J"}\n'])
def test_invalid_number_names_file_and_key(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + wrong)
    with pytest.raises(ValueError, match="metrics.jsonl.*(step|reward/mean).*restore the file"):
        Tail(path, numbers=True).rows()


def test_what_a_caller_does_to_a_row_is_not_in_the_next_one(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text(line(1, loss=2.0))
    tail.rows()[0].clear()
    assert tail.rows() == [{"step": 1, "loss": 2.0}]

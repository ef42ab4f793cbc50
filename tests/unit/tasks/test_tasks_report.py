"""The line about the tasks before a run: rows, duplicates, what is held out, and the overlap."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from rollover.config import Config, RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.tasks import split
from rollover.tasks.report import tasks_line
from rollover.tasks.stream import TaskStream


def line_of(sources: list[dict[str, Any]], num_tasks: int = 0, **tasks: Any) -> str:
    config = Config.model_validate({"tasks": {"sources": sources, **tasks}, "eval": {"num_tasks": num_tasks}})
    return tasks_line(config, num_drawn=300, limit_s=math.inf)


def rows(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return str(path)


def test_rows_duplicates_and_what_is_held_out(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", [f"problem {i}" for i in range(100)] + ["Problem 7", "problem  8"])
    line = line_of([{"kind": "dataset", "path": path}], num_tasks=5)
    assert line.startswith("tasks: rows has 102 rows: ") and "\n" not in line
    assert "held out (tasks.eval_fraction = 0.1); 2 repeat another's problem" in line
    trained, held = (int(line.split(marker)[0].split()[-1]) for marker in (" are trained", " held out (tasks"))
    assert trained + held == 102 and 0 < held < 30
    assert "5 held-out tasks (rows 5), of which 0 have the words and the answer of one of 300 training tasks" in line


def test_rows_that_are_left_out_for_their_text_alone_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p {i // 2}", "answer": "1", "id": i}) + "\n" for i in range(100)))
    source = {"kind": "dataset", "path": str(path), "problem_key": "id"}
    line = line_of([source], num_tasks=5, eval_fraction=0.3)
    for_text = int(line.split(" of them for their text alone")[0].split("(")[-1])
    held, trained = (int(line.split(marker)[0].split()[-1]) for marker in (" held out (tasks", " are trained"))
    assert 5 < for_text < held and trained + held == 100
    assert "of which 0 have the words and the answer" in line
    assert "text alone" not in line_of([{"kind": "dataset", "path": str(path)}], num_tasks=5)


def test_rows_that_are_left_out_for_a_held_out_file(tmp_path: Path) -> None:
    path = rows(tmp_path / "train.jsonl", [f"problem {i}" for i in range(10)])
    held = rows(tmp_path / "held.jsonl", [f"Problem {i}" for i in range(8, 12)])
    source = {"kind": "dataset", "path": path, "eval_path": held}
    line = line_of([source], num_tasks=9)
    assert f"train has 10 rows: 8 are trained, 2 left out, as {held} has their problems; 0 repeat" in line
    assert "4 held-out tasks (train 4)" in line and "(eval.num_tasks = 9, but there are no more)" in line
    line = line_of([source])
    assert "which is not evaluated: eval.num_tasks = 0" in line and "held-out tasks" not in line


def test_unreadable_references_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    answers = ["7", "yes", "3/4", "5%", "7:30", "#### no"]
    rows = [{"prompt": f"problem {i}", "answer": answers[i % 6]} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "dataset", "path": str(path)}
    line = line_of([source], eval_fraction=0.0).splitlines()[-1]
    assert line.startswith(
        "tasks.answer_rule = 'last_number' can never read the references of 20 of 60 training tasks, whose answers all"
        " score 0. For example '"
    )
    assert "': last_line, answer_tag, boxed, full_text can. Choose another rule or reward" in line
    both = line_of([source], num_tasks=50, eval_fraction=0.3).splitlines()[-1]
    counts = re.search(r"of (\d+) of (\d+) training tasks and (\d+) of (\d+) held-out tasks", both)
    assert counts is not None
    trained, of_trained, held, of_held = map(int, counts.groups())
    assert (trained + held, of_trained + of_held) == (20, 60)
    for readable in ({"answer_rule": "last_line"}, {"reward": "mine.py:f"}):
        assert "\n" not in line_of([source | readable], eval_fraction=0.0)


def test_a_stream_is_read_ahead_for_evaluation_only(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", [f"problem {i}" for i in range(100)])
    text = Path(path).read_text().replace('"1"', '"yes"')
    Path(path).write_text(text)
    source = {"kind": "dataset", "path": path, "streaming": True}
    assert "references of 1 of 1 training tasks, whose" in line_of([source], eval_fraction=0.0)
    assert "training tasks and 4 of 4 held-out tasks" in line_of([source], num_tasks=4, eval_fraction=0.3)


def test_twins_are_seen_where_keys_are_too_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "UNORDERED", {})
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = {"kind": "reasoning_gym", "name": "products", "params": params}
    line = line_of([source], num_tasks=20, eval_fraction=0.3)
    overlap = int(line.split(" have the words")[0].split()[-1])
    assert overlap > 5 and "tasks.sources.problem_key" in line


def test_generators_without_evaluation_have_no_line() -> None:
    assert line_of([{"kind": "reasoning_gym", "name": "chain_sum"}]) == ""


def test_held_out_problems_that_equal_trained_rows_are_counted(tmp_path: Path) -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    generator = TaskSourceConfig(kind="reasoning_gym", name="chain_sum", params=params)
    config = TasksConfig(sources=[generator], chat=False)
    tasks = itertools.islice(iter(TaskStream(config, 0, "train", rewards=RewardsConfig()).next, None), 100)
    path = rows(tmp_path / "rows.jsonl", [str(task.prompt) for task in tasks])
    line = line_of([generator.model_dump(), {"kind": "dataset", "path": path}], num_tasks=400, eval_fraction=0.5)
    told = re.search(r"; (\d+) more were held out, but are not evaluated: rows that are trained are the same", line)
    assert told and int(told[1]) > 5, line
    assert "more were held out" not in line_of([generator.model_dump()], num_tasks=400, eval_fraction=0.5)

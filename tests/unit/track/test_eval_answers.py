"""The answers of an evaluation: the file, the worst, and figures by file and by data_source."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollover.commands.eval import print_eval
from rollover.config import TaskSourceConfig
from rollover.tasks.source import held_out_names
from rollover.track.answers import Answer, RoleScore, print_worst, summarise_answers, worst, write_answers
from rollover.track.statistics import parts_of


def answer(task: int = 0, score: float | None = 1.0, **fields: Any) -> Answer:
    values: dict[str, Any] = {
        "task_id": f"test/{task}", "sibling": 0, "source": "test", "data_source": None, "expected": "12",
        "stop_reason": "eos", "num_tokens": 3, "score": score, "error": None if score is not None else "timeout",
        "prompt": f"user: 7 + {task}", "answer": "It is 12.",
    }  # fmt: skip
    return Answer(**values | fields)


def test_the_file_has_every_answer_on_a_line(tmp_path: Path) -> None:
    answers = [answer(0), answer(1, None), answer(2, float("nan"), answer="lone \ud800 and \u00fc\n", expected=None)]
    file = tmp_path / "out.jsonl"
    write_answers(file, [answer(9)])
    write_answers(file, answers)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert rows[:2] == [
        {k: v for k, v in dataclasses.asdict(a).items() if k not in ("roles", "setting", "vote", "task_score")}
        for a in answers[:2]
    ]
    assert rows[2]["score"] is None and rows[2]["answer"] == "lone ? and \u00fc\n"


def test_roles_are_written_and_summarised_where_there_are_some(tmp_path: Path) -> None:
    def of(task: int, solver: float | None, judge: float) -> Answer:
        return answer(task, roles=(RoleScore("solver", solver), RoleScore("solver", 1.0), RoleScore("judge", judge)))

    answers = [of(0, 0.0, 0.0), of(0, 1.0, 0.0), of(1, None, 1.0)]
    write_answers(tmp_path / "out.jsonl", answers)
    row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[2])
    assert row["roles"][:2] == [{"role": "solver", "score": None}, {"role": "solver", "score": 1.0}]
    roles = summarise_answers(answers, 1.0, [1])["roles"]
    assert roles["solver"]["mean"] == 0.875 and (roles["solver"]["samples"], roles["solver"]["missing"]) == (5, 1)
    assert roles["judge"]["mean"] == 0.5 and list(roles) == ["judge", "solver"]
    assert "roles" not in summarise_answers([answer(0, roles=(RoleScore("solver", 1.0),))], 1.0, [1])


def test_the_worst_come_first_and_missing_scores_last() -> None:
    answers = [answer(i, score) for i, score in enumerate((0.5, None, 0.0, 1.0, 0.0, -1.0))]
    assert [a.task_id for a in worst(answers, 4)] == [f"test/{i}" for i in (5, 2, 4, 0)]
    assert [a.score for a in worst(answers, 99)] == [-1.0, 0.0, 0.0, 0.5, 1.0, None]
    assert worst(answers, 0) == []


def test_the_worst_are_printed_to_be_read() -> None:
    text = io.StringIO()
    console = Console(file=text, width=60)
    print_worst([answer(3, 0.0, answer="It\nis \x1b[31m 13"), answer(4, None, expected=None)], console)
    lines = text.getvalue().splitlines()
    assert lines[1:4] == [
        "test/3 (test): score 0.00, eos after 3 tokens, expected '12'",
        "  user: 7 + 3",
        "  -> It is ?[31m 13",
    ]
    assert lines[5] == "test/4 (test): no score: timeout, eos after 3 tokens"


def test_figures_by_file_and_by_data_source() -> None:
    def of(source: str, data_source: str | None, *scores: float | None) -> list[Answer]:
        start = {"a": 0, "b": 10, None: 20}[data_source]
        return [answer(start + i, s, source=source, data_source=data_source) for i, s in enumerate(scores)]

    answers = [*of("test", "a", 1.0, 0.0), *of("test", "b", 1.0, None), *of("sums", None, 0.0)]
    summary = summarise_answers(answers, 1.0, [1])
    assert summary["mean"] == 0.5 and summary["missing"] == 1 and summary["tasks"] == 4
    means = {name: row["mean"] for name, row in parts_of(summary).items()}
    assert means == {
        "test": pytest.approx(2 / 3), "sums": 0.0,
        "data_source a": 0.5, "data_source b": 1.0, "data_source sums": 0.0,
    }  # fmt: skip


def test_each_part_counts_its_own_missing_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one without any reward, whose figures cannot be given."""
    answers = [
        *(answer(0, score, data_source="a") for score in (1.0, None, 0.0)),
        *(answer(1, score, source="sums", data_source="b") for score in (None, None, None)),
    ]
    summary = summarise_answers(answers, 1.0, [1, 2])
    assert summary["missing"] == 4 and summary["mean"] == 0.5 and summary["pass@2"] == 1.0
    missing = {name: row["missing"] for name, row in parts_of(summary).items()}
    assert missing == {"test": 1, "sums": 3, "data_source a": 1, "data_source b": 3}
    assert summary["sources"]["sums"]["mean"] is None and summary["sources"]["sums"]["tasks"] == 0
    print_eval(summary)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if " sums " in line]
    assert "0" in row and "nan" not in row.lower()


def test_what_is_held_out_has_the_name_of_its_file() -> None:
    def file(path: str, **options: Any) -> TaskSourceConfig:
        return TaskSourceConfig(kind="dataset", path=path, **options)

    sources = [
        file("data/train.jsonl", eval_path="data/test.jsonl"),
        file("other/train.jsonl", eval_path="other/test.jsonl"),
        file("rows.csv"),
        file("train.jsonl", eval_path="test.jsonl", name="mine"),
        TaskSourceConfig(kind="reasoning_gym", name="chain_sum"),
    ]
    assert held_out_names(sources) == {
        "train": "test", "train#2": "test#2", "rows": "rows", "mine": "mine", "chain_sum": "chain_sum",
    }  # fmt: skip

"""Answers of evaluations: pages of those that are wanted, and one whole with what the same task got before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recorded_run import write_run, written
from rollover.plugins.dashboard.eval_answers import MOST_EVALUATIONS, answer, answers, lowest
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.answers import Answer, write_answers


def of_task(task: int, sibling: int, score: float | None, text: str = "seven", setting: str = "") -> Answer:
    return Answer(
        f"task-{task}", sibling, "sums", None, "7", "eos", 3 + task, score, None if score is not None else "it raised",
        f"What is {task}?", text, setting=setting,
    )  # fmt: skip


def evaluated(run: Path, step: int, *of: Answer) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    write_answers(run / "evaluations" / f"step-{step:06d}.jsonl", of)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Evaluated after steps 0 and 2, the second time in two settings."""
    write_run(tmp_path)
    evaluated(tmp_path, 0, of_task(0, 0, 0.0), of_task(0, 1, 1.0), of_task(1, 0, 0.0))
    evaluated(
        tmp_path, 2, of_task(0, 0, 1.0), of_task(0, 1, 1.0, "EIGHT or so"), of_task(1, 0, None),
        of_task(1, 0, 0.25, setting="sampled"),
    )  # fmt: skip
    return tmp_path


def places(run: Path, **query: Any) -> list[int]:
    return [row["place"] for row in answers(run, {key: str(value) for key, value in query.items()})["rows"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"text": "eight"}, [1]),
        ({"text": "WHAT IS 1"}, [2, 3]),
        ({"text": "no such"}, []),
        ({"score_from": 0.5}, [0, 1]),
        ({"score_to": 0.5}, [3]),
        ({"scored": "no"}, [2]),
        ({"setting": "sampled"}, [3]),
        ({"setting": "[eval]"}, [0, 1, 2]),
        ({"sort": "score"}, [3, 0, 1, 2]),
        ({"sort": "score", "order": "down"}, [0, 1, 3, 2]),
        ({"sort": "tokens", "order": "down"}, [2, 3, 0, 1]),
        ({"order": "down"}, [3, 2, 1, 0]),
        ({"step": 0}, [0, 1, 2]),
        ({"offset": 1, "limit": 2}, [1, 2]),
        ({"score_from": ""}, [0, 1, 2, 3]),
    ],
)
def test_filters_and_order(run: Path, query: dict[str, Any], expected: list[int]) -> None:
    assert places(run, **query) == expected


def test_a_page_says_what_there_is(run: Path) -> None:
    told = answers(run, {"limit": "2", "scored": "yes"})
    assert (told["steps"], told["step"], told["settings"]) == ([0, 2], 2, ["", "sampled"])
    assert (told["of"], told["passed"], told["next"]) == (4, 3, 2)
    assert told["rows"][1] == {
        "place": 1, "task": "task-0", "sibling": 1, "source": "sums", "setting": "", "score": 1, "tokens": 3,
        "stop": "eos", "asked": "What is 0?", "answered": "EIGHT or so", "expected": "7", "error": None,
    }  # fmt: skip
    assert answers(run, {"offset": "2", "limit": "2"})["next"] is None


def test_an_answer_with_what_its_task_got_in_other_evaluations(run: Path) -> None:
    told = answer(run, {"step": "2", "place": "1"})
    assert told["answer"] == "EIGHT or so" and told["prompt"] == "What is 0?" and told["same_task"] == [0, 1]
    assert told["over"] == [{"step": 0, "mean": 0.5, "count": 2}, {"step": 2, "mean": 1, "count": 2}]
    assert answer(run, {"place": "3"})["over"] == [{"step": 2, "mean": 0.25, "count": 1}], "of its setting alone"


def test_of_many_evaluations_the_first_and_the_newest_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3, 40):
        evaluated(run, step, of_task(0, 0, 1.0))
    told = answer(run, {"step": "20", "place": "0"})
    assert [of["step"] for of in told["over"]] == [0, 20, *range(40 - MOST_EVALUATIONS, 40)]


@pytest.mark.parametrize(
    ("query", "error", "says"),
    [
        ({"step": "1"}, KeyError, "no answers were recorded of an evaluation after step 1"),
        ({"colour": "red"}, ValueError, "colour: there is no such filter"),
        ({"score_from": "low"}, ValueError, "score_from: 'low' is not a number"),
        ({"offset": "-1"}, ValueError, "offset: '-1' is not a number from 0"),
        ({"limit": "100000"}, ValueError, "limit: 100000 is more than 500"),
        ({"sort": "colour"}, ValueError, "sort: 'colour' is not one of"),
        ({"order": "sideways"}, ValueError, "order: 'sideways' is neither"),
    ],
)
def test_what_cannot_be_meant_is_said(run: Path, query: dict[str, str], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        answers(run, query)


def test_a_run_without_evaluations_has_no_answers(tmp_path: Path) -> None:
    assert answers(tmp_path, {})["steps"] == [] and list(lowest(tmp_path)) == []
    with pytest.raises(KeyError):
        answer(tmp_path, {"place": "0"})


def test_report_of_a_run_with_a_damaged_file(run: Path) -> None:
    (run / "evaluations" / "step-000002.jsonl").write_text("no answer\n")
    with pytest.raises(ValueError, match="no JSON"):
        RunData(run).answer("answers", {})
    assert written(make_report([RunData(run)]))["runs"][0]["evaluated"]["steps"] == []


def test_a_report_has_the_lowest_of_the_newest_evaluation(run: Path) -> None:
    told = written(make_report([RunData(run)]))["runs"][0]["evaluated"]
    assert [row["place"] for row in told["rows"]] == [3, 0, 1, 2] and told["of"] == 4 and told["steps"] == [0, 2]
    assert told["whole"]["1"]["answer"] == "EIGHT or so" and told["whole"]["1"]["same_task"] == [0, 1]

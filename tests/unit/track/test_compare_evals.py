"""An evaluation against a recorded one: which tasks are the same, what is said of them, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rollover.track.answers import Answer, write_answers
from rollover.track.compare_evals import compare_answers, read_recorded


def answer(task: int, score: float | None, sibling: int = 0, setting: str = "", prompt: str = "") -> Answer:
    return Answer(f"t/{task}", sibling, "t", None, None, "eos", 3, score, None, prompt or f"q{task}", "12", (), setting)


def test_tasks_are_paired_by_the_means_of_their_scores(tmp_path: Path) -> None:
    then = [answer(i, score, sibling) for i in range(4) for sibling, score in enumerate((0.0, float(i % 2)))]
    then += [answer(7, 1.0), answer(8, None), answer(9, 1.0, prompt="an older one")]
    write_answers(tmp_path / "then.jsonl", then)
    now = [answer(i, 1.0) for i in range(4)] + [answer(8, 1.0), answer(9, 0.0)]
    [found] = compare_answers(now, read_recorded(tmp_path / "then.jsonl"))
    assert (found.tasks, found.recorded, found.mean, found.better, found.worse) == (4, 0.25, 1.0, 4, 0)
    assert found.difference == 0.75 and found.p_value == 2 / 16, "four of four signs: 2 of 16 assignments"
    assert found.unpaired == 4, "7 and the two prompts of 9 are in one, 8 had no score"
    assert "4 tasks: mean reward 0.250 -> 1.000, +0.750 [+" in str(found) and "p = 0.12; 4 tasks are not" in str(found)


def test_settings_are_compared_separately() -> None:
    now = [answer(i, i / 4, setting=setting) for setting in ("", "sampled") for i in range(3)]
    then = [a.as_json() for a in now[3:]] + [answer(0, 0.0, setting="other").as_json()]
    [found] = compare_answers(now, then)
    assert found.setting == "sampled" and found.p_value == 1 and found.difference == 0 == found.better
    with pytest.raises(ValueError, match="no task has a score in both"):
        compare_answers(now, [answer(5, 1.0).as_json()])


def test_read_recorded_takes_the_newest_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    with pytest.raises(ValueError, match="has no evaluations/step-"):
        read_recorded(tmp_path)
    folder.mkdir()
    for step, score in ((0, 0.0), (20, 1.0), (100, 0.5)):
        write_answers(folder / f"step-{step:06d}.jsonl", [answer(0, score)])
    assert [row["score"] for row in read_recorded(tmp_path)] == [0.5]
    for text, why in (("{", "no JSON"), (json.dumps({"task_id": 1}), "line 1 is no answer"), ("", "has no answers")):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(ValueError, match=why):
            read_recorded(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="cannot be read"):
        read_recorded(tmp_path / "none.jsonl")


def test_what_was_written_is_read_again_whatever_an_answer_holds(tmp_path: Path) -> None:
    texts = ["a\u2028b\x85c", "\x0b\x0c\x1c", "\ud800", "\r\n", "\0"]
    now = [answer(i, 1.0, prompt=text) for i, text in enumerate(texts)]
    write_answers(tmp_path / "x.jsonl", now)
    [found] = compare_answers(now, read_recorded(tmp_path / "x.jsonl"))
    assert found.tasks == len(texts) - 1, "all but the one that is no Unicode, which was written with a question mark"


@pytest.mark.parametrize(
    "change",
    [{"score": "1"}, {"score": math.nan}, {"score": math.inf}, {"score": 10**400}, {"score": [1]}, {"task_id": [1]},
     {"prompt": {}}, {"setting": None}, {"setting": [1]}],
)  # fmt: skip
def test_invalid_recorded_values_are_rejected(change: dict[str, Any], tmp_path: Path) -> None:
    rows = [answer(0, 1.0).as_json(), answer(1, None).as_json() | change]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="line 2 is no answer: task_id, prompt and setting are texts"):
        read_recorded(tmp_path / "x.jsonl")


def test_a_text_to_read_has_every_answer(tmp_path: Path) -> None:
    write_answers(tmp_path / "out.md", [answer(0, 0.5, setting="greedy"), answer(1, None)])
    text = (tmp_path / "out.md").read_text()
    assert text.startswith("## t/0, answer 0 (greedy): score 0.50\n\nprompt:\n\n    q0\n") and "no score: None" in text
    assert "answer (eos after 3 tokens):\n\n    12\n" in text

"""Shaping in whole runs: it is trained, and in no figure of the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
from endings import train

REWARDS: dict[str, Any] = {"overlong_buffer_tokens": 40, "overlong_penalty": 0.5, "running_norm": "scale"}
DR_GRPO = {"advantage": "dr_grpo"}  # to which the scale of rewards matters


def test_it_is_trained_and_in_no_figure_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"every_steps": 1, "num_tasks": 2}
    recipe = runs.write(
        tmp_path, steps=2, rollout={"max_new_tokens": 48}, rewards=REWARDS, algorithm=DR_GRPO, eval=evaluation
    )
    code, text = train(capsys, recipe)
    assert code == 0, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    records = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    for row in rows:
        scores = [r["score"] for r in records if r["step"] == row["step"]]
        terms = [-0.5 * min(max(r["num_tokens"] - 8, 0) / 40, 1) for r in records if r["step"] == row["step"]]
        assert row["reward/mean"] == pytest.approx(sum(scores) / len(scores)) and min(scores) >= 0
        assert row["shaping/overlong/mean"] == pytest.approx(sum(terms) / len(terms)) != 0
        total = row["reward/mean"] + row["shaping/overlong/mean"]
        assert row["shaping/reward_mean"] * row["shaping/running_std"] == pytest.approx(total)
    evaluated = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    assert evaluated and all(line["mean"] >= 0 for line in evaluated), "answers without a digit would be below 0"


def test_eval_shaped_adds_the_penalty_and_passes_by_task_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = {"num_tasks": 4, "samples_per_task": 2, "shaped": True, "pass_threshold": 0.0}
    recipe = runs.write(
        tmp_path, steps=1, rollout={"max_new_tokens": 48}, rewards=REWARDS, algorithm=DR_GRPO, eval=evaluation
    )
    code, text = train(capsys, recipe)
    assert code == 0, text
    answers = runs.json_lines(tmp_path / "run" / "evaluations" / "step-000001.jsonl")
    penalties = [-0.5 * min(max(answer["num_tokens"] - 8, 0) / 40, 1) for answer in answers]
    assert len(answers) == 8 and min(penalties) < 0
    for answer, penalty in zip(answers, penalties, strict=True):
        assert answer["task_score"] == pytest.approx(sum(map(str.isdigit, answer["answer"])) / 48)
        assert answer["score"] == pytest.approx(answer["task_score"] + penalty)
    row = runs.json_lines(tmp_path / "run" / "eval.jsonl")[-1]
    assert row["mean"] == pytest.approx(sum(answer["score"] for answer in answers) / 8) and row["mean"] < 0
    assert row["pass@1"] == 1.0


def test_eval_function_scores_held_out_tasks_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"num_tasks": 4}
    recipe = runs.write(tmp_path, steps=1, eval=evaluation)
    (tmp_path / "held_out.py").write_text(
        "def score(completions, **columns):\n    return [-2.0 for _ in completions]\n"
    )
    code, text = train(capsys, recipe, "--rewards.eval_function", f"{tmp_path / 'held_out.py'}:score")
    assert code == 0, text
    assert [row["mean"] for row in runs.json_lines(tmp_path / "run" / "eval.jsonl")] == [-2.0, -2.0]
    assert runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["reward/mean"] > 0
    where = ["--run.dir", str(tmp_path / "other")]
    code, text = train(capsys, recipe, *where, "--rewards.eval_function", "no_such_reward")
    assert code == 2 and "rewards.eval_function: 'no_such_reward' is neither built in" in text

"""Shaping in whole runs: it is trained, resumed bit by bit, and in no figure of the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import safetensors.torch
import torch
from endings import CHECKPOINT, train, train_until

REWARDS: dict[str, Any] = {"overlong_buffer_tokens": 40, "overlong_penalty": 0.5, "running_norm": "scale"}
DR_GRPO = {"advantage": "dr_grpo"}  # to which the scale of rewards matters


def test_it_is_trained_and_in_no_figure_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"every_steps": 1, "num_tasks": 2}
    recipe = runs.write(tmp_path, steps=2, rewards=REWARDS, algorithm=DR_GRPO, eval=evaluation)
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
    recipe = runs.write(tmp_path, steps=1, rewards=REWARDS, algorithm=DR_GRPO, eval=evaluation)
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


def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_order = {"in_flight_groups": 3, "interrupt": "never", "max_staleness": 0}
    recipe = runs.write(tmp_path, rewards=REWARDS, algorithm=DR_GRPO, rollout=in_order)
    for name, words in {"whole": [("4", "")], "stopped": [("2", ""), ("4", "--resume")]}.items():
        for steps, *resume in words:
            where = ["--run.dir", str(tmp_path / name), "--train.num_steps", steps, *filter(None, resume)]
            code, text = train(capsys, recipe, *where)
            assert code == 0, text
    whole, stopped = (
        safetensors.torch.load_file(tmp_path / name / "checkpoints/step-000004/trainer-master.safetensors")
        for name in ("whole", "stopped")
    )
    assert whole.keys() == stopped.keys() and all(torch.equal(whole[n], stopped[n]) for n in whole)
    rows = [runs.json_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped")]
    told = [[{k: v for k, v in row.items() if k.startswith("shaping/")} for row in of] for of in rows]
    assert told[0] == told[1] and len({row["shaping/running_std"] for row in told[0]}) == 4


def test_steps_that_are_trained_again_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=4, checkpoint=CHECKPOINT, rewards=REWARDS, algorithm=DR_GRPO)
    train_until(capsys, 2, recipe)
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "(2 steps)" in text, text
    records = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    rewards = [r["score"] - 0.5 * min(max(r["num_tokens"] - 8, 0) / 40, 1) for r in records]
    last = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["shaping/running_mean"] == pytest.approx(sum(rewards) / len(rewards))

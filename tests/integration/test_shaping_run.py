"""Shaping in whole runs: it is trained, resumed bit by bit, and in no figure of the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from endings import CHECKPOINT, look_at_start, train, train_until

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


def test_it_goes_on_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT, rewards=REWARDS, algorithm=DR_GRPO)
    assert train(capsys, recipe, "--train.num_steps", "2")[0] == 0
    end = train_until(capsys, 4, recipe, "--resume")
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = look_at_start(monkeypatch)
        code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "(2 steps)" in text, text
    assert begun.keys() == end.weights.keys() and all(torch.equal(begun[n], end.weights[n]) for n in begun)
    after = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert after[: len(rows)] == rows and len(after) == 6
    counted = [r["score"] for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    terms = [
        -0.5 * min(max(r["num_tokens"] - 8, 0) / 40, 1)
        for r in runs.records(tmp_path / "run")
        if r["outcome"] == "trained"
    ]
    mean = sum(s + t for s, t in zip(counted, terms, strict=True)) / len(counted)
    assert after[-1]["shaping/running_mean"] == pytest.approx(mean), "of all six steps, each counted once"

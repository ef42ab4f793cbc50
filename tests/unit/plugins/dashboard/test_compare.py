"""Runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recorded_run import write_run
from rollover.plugins.dashboard.compare import differences, evaluations
from rollover.plugins.dashboard.indexed_run import IndexedRun


def run_at(path: Path, config: dict, scores: dict[str, float | None] | None = None) -> IndexedRun:
    path.mkdir()
    write_run(path)
    (path / "config.resolved.json").write_text(json.dumps(config))
    if scores is not None:
        (path / "evaluations").mkdir()
        rows = [{"task_id": task, "prompt": "?", "score": score} for task, score in scores.items()]
        (path / "evaluations" / "step-000003.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return IndexedRun(path)


def config(rate: float, **more: object) -> dict:
    return {"run": {"dir": str(rate), "name": "x"}, "train": {"learning_rate": rate, "lora": {"rank": 8}}, **more}


def test_only_keys_that_differ() -> None:
    assert differences([config(1e-5), config(1e-5)]) == []
    assert differences([config(1e-5), config(2e-5), config(1e-5, tasks={"sources": [{"name": "<b>"}]})]) == [
        {"key": "train.learning_rate", "values": ["1e-05", "2e-05", "1e-05"]},
        {"key": "tasks.sources", "values": [None, None, '[{"name": "<b>"}]']},
    ]
    nested = config(1e-5) | {"train": {"learning_rate": 1e-5, "lora": {"rank": 16}}}
    assert differences([config(1e-5), nested]) == [{"key": "train.lora.rank", "values": ["8", "16"]}]


def test_evaluations_are_paired_by_task(tmp_path: Path) -> None:
    tasks = [str(number) for number in range(10)]
    first = run_at(tmp_path / "a", config(1.0), {task: 0.0 for task in tasks} | {"only": 1.0})
    better = run_at(tmp_path / "b", config(2.0), {task: 1.0 for task in tasks})
    other = run_at(tmp_path / "c", config(3.0), {"elsewhere": 1.0})
    without = run_at(tmp_path / "d", config(4.0))
    (of_better,), of_other, of_without = (
        found["comparisons"] or found["why"] for found in evaluations([first, better, other, without])
    )
    assert (of_better["tasks"], of_better["difference"], of_better["better"], of_better["unpaired"]) == (10, 1.0, 10, 1)
    assert of_better["p_value"] == pytest.approx(2 / 1024) and "better in 10" in of_better["text"]
    assert "no task has a score in both" in of_other and "has no recorded evaluation" in of_without
    assert evaluations([without, first])[0]["comparisons"] == []

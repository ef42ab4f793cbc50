"""User code that changes the working directory: relative paths of the run begin where the run began."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import runs

import rollover
from rollover.cli import main

HOOK = """
import os, shutil, tempfile

def leave():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)  # nothing can be written there, and the system has no name for it

class Leaves:
    def on_train_start(self, run):
        leave()

    def on_step_start(self, step):
        leave()
"""
# All relative: the prompts of the evaluation are read after the first change of directory, workers are started later.
RELATIVE = {
    "run": {"dir": "out", "hooks": "hook.py:Leaves"},
    "model": {"path": "model"},
    "rewards": {"function": "reward.py:reward"},
    "checkpoint": {"every_steps": 1, "save_best_model": True},
    "engine": {"kind": "process"},
    "eval": {"num_tasks": 4, "at_start": False},
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hook.py").write_text(HOOK)
    file = runs.write(tmp_path, steps=2, **RELATIVE)
    file.write_text(file.read_text().replace(str(tmp_path / "tasks.jsonl"), "tasks.jsonl"))
    assert str(tmp_path) not in file.read_text()
    return file


def test_run_survives_a_changed_working_directory(recipe: Path, tmp_path: Path) -> None:
    assert main(["train", str(recipe), "--eval.every_steps", "1"]) == 0
    out = tmp_path / "out"
    assert len(runs.json_lines(out / "metrics.jsonl")) == 2 and len(runs.json_lines(out / "eval.jsonl")) == 2
    for path in ("model/config.json", "best_model/config.json", "checkpoints", "journal", "rollouts", "resume.json"):
        assert (out / path).exists(), path
    assert '"dir": "out"' in (out / "config.resolved.json").read_text()
    os.chdir(tmp_path)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    out.rename(moved)
    words = ["--run.dir", "elsewhere/moved", "--resume", "--train.num_steps", "3"]
    assert main(["train", str(recipe), *words]) == 0
    assert len(runs.json_lines(moved / "metrics.jsonl")) == 3


def test_python_run_survives_a_changed_directory(recipe: Path, tmp_path: Path) -> None:
    run = rollover.train(config=str(recipe), engine={"kind": "embedded"})
    assert run.directory == tmp_path / "out" and run.finished
    assert run.model_path == tmp_path / "out" / "model" and len(list(run.rollouts())) == 6

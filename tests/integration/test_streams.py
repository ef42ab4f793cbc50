"""A run from anywhere: its standard streams, and where its relative paths begin."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

import rollover
from rollover.cli import main

# A run whose stdout or stderr cannot be written trains, saves, and exits as any other


PRINTS = """
import sys

def reward(completions, **columns):
    print("scored", flush=True)
    print("scored", file=sys.stderr, flush=True)
    return [sum(c.isdigit() for c in text) / 48 for text in completions]
"""


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def without_reader() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def recipe(folder: Path) -> Path:
    file = runs.write(folder, steps=2)
    (folder / "reward.py").write_text(PRINTS)
    return file


def trained(folder: Path, **streams: int) -> runs.Run:
    run = runs.Run(["train", str(recipe(folder))], **streams)
    assert run.wait(600) == 0, run.err
    check(folder)
    return run


def check(folder: Path) -> None:
    assert len(runs.rows(folder)) == 2
    assert (folder / "run" / "model" / "config.json").exists() and (folder / "run" / "finished").exists()
    assert all(row["reward/missing"] == 0 for row in runs.rows(folder))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize(("broken", "why"), [(full, "No space left on device"), (without_reader, "Broken pipe")])
def test_run_with_a_broken_stdout_is_reported(tmp_path: Path, broken: Callable[[], int], why: str) -> None:
    said = trained(tmp_path, stdout=broken()).err
    assert "notice: standard output could not be written: " + why in said
    assert "Loading weights" not in said and "Writing model" not in said  # bars of transformers


def test_run_with_a_broken_stderr_is_reported(tmp_path: Path) -> None:
    assert "step 2/2" in trained(tmp_path, stderr=without_reader()).out


def test_run_with_closed_streams_trains(tmp_path: Path) -> None:
    """Closed before the interpreter starts, which a fork cannot be."""
    done = subprocess.run(
        runs.command("train", recipe(tmp_path)),
        env=runs.environment(),
        preexec_fn=lambda: [os.close(number) for number in (0, 1, 2)],
    )
    assert done.returncode == 0
    check(tmp_path)


# User code that changes the working directory: relative paths of the run begin where the run began


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
def relative_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hook.py").write_text(HOOK)
    file = runs.write(tmp_path, steps=2, **RELATIVE)
    file.write_text(file.read_text().replace(str(tmp_path / "tasks.jsonl"), "tasks.jsonl"))
    assert str(tmp_path) not in file.read_text()
    return file


def test_run_survives_a_changed_working_directory(relative_recipe: Path, tmp_path: Path) -> None:
    assert main(["train", str(relative_recipe), "--eval.every_steps", "1"]) == 0
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
    assert main(["train", str(relative_recipe), *words]) == 0
    assert len(runs.json_lines(moved / "metrics.jsonl")) == 3


def test_python_run_survives_a_changed_directory(relative_recipe: Path, tmp_path: Path) -> None:
    run = rollover.train(config=str(relative_recipe), engine={"kind": "embedded"})
    assert run.directory == tmp_path / "out" and run.finished
    assert run.model_path == tmp_path / "out" / "model" and len(list(run.rollouts())) == 6

"""The mistakes of a newcomer's first hour: each ends at once, with one message that says what to change."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest
import runs
from transformers import AutoModelForCausalLM

from rollover import cli
from rollover.run.run_files import DirectoryLock

_loaded: list[bool] = []


@pytest.fixture(autouse=True)
def notes_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: _loaded.append(True) or load(*a, **k))


def error_of(capsys: pytest.CaptureFixture[str], *words: str | Path, loads: bool = False) -> str:
    """The message of a command that must end with exit code 2, without its head; `loads`: after loading the model."""
    capsys.readouterr()
    _loaded.clear()
    try:
        code = cli.main([str(w) for w in words])
    except SystemExit as stop:  # argparse
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2, error
    assert "Traceback" not in error and bool(_loaded) == loads, error
    return (
        error.rpartition("rollover: error: ")[2].removesuffix("\n")
        if loads
        else error.removeprefix("rollover: error: ").removesuffix("\n")
    )


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return runs.write(tmp_path, steps=1, checkpoint={"every_steps": 1})


@pytest.mark.parametrize(
    ("key", "place", "reason"),
    [
        ("run.dir", "/proc/nope", "No such file or directory (/proc)"),
        ("checkpoint.dir", "/proc/nope/deeper", "No such file or directory (/proc)"),
        ("checkpoint.dir", "tasks.jsonl", "Not a directory ({folder}/tasks.jsonl)"),
    ],
)
def test_unwritable_output_is_found_before_the_model(recipe: Path, capsys, key: str, place: str, reason: str) -> None:
    error = error_of(capsys, "train", recipe, "--model.path", "/no/such/model", f"--{key}", place)
    reason = reason.format(folder=recipe.parent)
    assert error == f"{key} = {place!r} cannot be written to: {reason}. Give another place"


@pytest.mark.parametrize("part", ["model", "rollouts", "profile"])
def test_so_is_a_part_of_the_run_directory(recipe: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    (recipe.parent / "run").mkdir()
    (recipe.parent / "run" / part).write_text("")
    error = error_of(capsys, "train", recipe, "--model.path", "/no/such/model")
    assert error.startswith(f"run.dir = '{recipe.parent}/run/{part}' cannot be written to: Not a directory")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.toml"], "mine.toml: unknown key rollout.group_sise. Did you mean rollout.group_size?"),
        (["--resme"], "unknown option --resme. Did you mean --resume?"),
        (["--train.num_steps", "many"], 'train.num_steps = "many": expected'),
        (["--run.train_on_recorded", "/nowhere"], "'/nowhere': there is no such folder. Check the path"),
        (["--rewards.function", "no_such_module:f"], "no_such_module"),
        (["--engine.kv_memory_gb", "0.00001"], "engine.kv_memory_gb"),
        (["--model.device", "cuda:7"], "model.device"),
        (["--model.path", "empty"], "config.json"),
        (["--model.path", "smolm2-135m"], "there is no such folder. Did you mean 'smollm2-135m'?"),
        (["--tasks.sources.0.path", "taks.jsonl"], "there is no such file. Did you mean tasks.jsonl?"),
        (
            ["--tasks.sources.0.answer_column", "gold"],
            "has no answer column 'gold'; its columns are prompt, answer: set",
        ),
        (
            ["--rewards.function", "mine.py:always"],
            "failed its start-up call: ZeroDivisionError: float division by zero",
        ),
    ],
)
def test_a_mistake_ends_with_one_line(own: Path, capsys, words: list[str], message: str) -> None:
    """Those whose place is the model, its engine or the reward after it was loaded, the others before."""
    (own.parent / "mine.toml").write_text("[rollout]\ngroup_sise = 4")
    (own.parent / "empty").mkdir()
    loads = words[0] in ("--rewards.function", "--engine.kv_memory_gb", "--run.train_on_recorded")
    assert message in error_of(capsys, "train", own, *words, loads=loads)


OWN = """import os, signal

def always(prompts, completions, answer, **columns):
    return [1.0 / float(a == "x") for a in answer]

def stop(rollouts, advantages):
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
"""


@pytest.fixture
def own(recipe: Path) -> Path:
    (recipe.parent / "mine.py").write_text(OWN)
    rows = [{"prompt": f"count to {i}", "answer": str(i)} for i in (7, *range(300, 360), *range(20, 80))]
    (recipe.parent / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr()
    assert "Traceback" not in said.err, said.err
    return said.out.splitlines()


def test_ctrl_c(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algorithm.after_scoring", "mine.py:stop", "--train.num_steps", "9"]
    assert cli.main(["train", str(own), *words]) == 130
    said = lines_of(capsys)
    assert said.count("stopping: parking rollouts and writing a checkpoint (again: stop at once)") == 1
    where = said.index("stopped after step 1; continue with:")
    (command,) = said[where + 1 :]
    assert command.endswith(f"train {own} {words[0]}={words[1]} {words[2]}=9 --run.dir={own.parent}/run --resume")


def test_two_runs_at_once_in_one_directory(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recipe.parent / "run"
    run.mkdir()
    holder = DirectoryLock(run, "run.dir")
    try:
        error = error_of(capsys, "train", recipe)
    finally:
        holder.release()
    assert re.fullmatch(
        rf"run\.dir = '{run}' is in use by process {os.getpid()} on \S+ \(since [-\d]+ [:\d]+\): wait until that run"
        r" has ended, stop it \(Ctrl-C\), or give another run\.dir",
        error,
    )


def test_what_a_finished_run_allows(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(recipe)]) == 0
    modes = {p.suffix: stat.S_IMODE(p.stat().st_mode) for p in (recipe.parent / "run").rglob("*") if p.is_file()}
    assert modes[".safetensors"] == modes[".json"] == modes[".jsonl"], "who may read its text may read its weights"
    assert error_of(capsys, "train", recipe) == (
        f"run.dir = '{recipe.parent}/run' holds a run already: add --resume, or give another run.dir"
    )
    assert error_of(capsys, "train", recipe, "--resume", "--train.num_steps", "2", "--run.seed", "1") == (
        "--resume with run.seed = 1: it was 0, and tasks, and the tokens of a rollout, are drawn by it. Set run.seed ="
        " 0, or start a new run in another run.dir"
    )
    before = json.loads((recipe.parent / "run" / "config.resolved.json").read_text())
    assert cli.main(["train", str(recipe), "--resume", "--train.num_steps", "2", "--train.learning_rate", "5e-4"]) == 0
    said = lines_of(capsys)
    at = said.index("settings that changed since:")
    assert said[at + 1 : at + 3] == ["  train.num_steps: 1 -> 2", "  train.learning_rate: 0.001 -> 0.0005"]
    assert json.loads((recipe.parent / "run" / "config.resolved.1.json").read_text()) == before

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
def test_an_output_that_cannot_be_written_is_found_before_the_model_is_loaded(
    recipe: Path, capsys: pytest.CaptureFixture[str], key: str, place: str, reason: str
) -> None:
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
    ("text", "message"),
    [
        ("[rollout]\ngroup_sise = 4", "mine.toml: unknown key rollout.group_sise. Did you mean rollout.group_size?"),
        ("[rollouts]\ngroup_size = 4", "mine.toml: unknown table [rollouts]. Did you mean [rollout]?"),
        (
            '[rollout]\ngroup_size = "4"',
            'mine.toml: rollout.group_size = "4": expected an integer, at least 1',
        ),
        (
            "[rollout]\n[train]\n[rollout]",
            "mine.toml, line 3: not valid TOML: the table [rollout] is there twice. Write all its keys under one"
            " [rollout]",
        ),
    ],
    ids=["typo in a key", "typo in a table", "wrong type", "a table twice"],
)
def test_a_slip_in_the_file(recipe: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    (recipe.parent / "mine.toml").write_text(text)
    assert error_of(capsys, "train", recipe, "mine.toml") == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_steps", "3"], "unknown option --num_steps. Did you mean --train.num_steps?"),
        (["--resme"], "unknown option --resme. Did you mean --resume?"),
    ],
)
def test_a_typo_in_a_flag(recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert error_of(capsys, "train", recipe, *words).endswith(f"\nrollover train: error: {message}")


def test_a_typo_in_a_flag_that_names_a_key(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "train", recipe, "--train.num_step", "3") == (
        "command line: unknown key train.num_step. Did you mean train.num_steps?"
    )


def test_a_mistyped_alias_is_not_asked_of_the_hub(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "train", recipe, "--model.path", "smolm2-135m") == (
        "model.path = 'smolm2-135m': there is no such folder. Did you mean 'smollm2-135m'?"
    )


def test_a_folder_without_a_tokenizer(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe.parent / "model"
    for path in folder.glob("*token*"):
        path.unlink()
    assert error_of(capsys, "train", recipe) == (
        f"model.path = '{folder}' cannot be loaded: it has no tokenizer.json. Copy the tokenizer's files from the model"
        " that this one was made of, or write them with tokenizer.save_pretrained"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--tasks.sources.0.path", "taks.jsonl"],
            "tasks.sources.path = 'taks.jsonl': there is no such file. Did you mean tasks.jsonl?",
        ),
        (
            ["--tasks.sources.0.prompt_column", "quest"],
            "dataset '{folder}/tasks.jsonl' has no prompt column 'quest'; its columns are prompt, answer: set"
            " tasks.sources.prompt_column",
        ),
        (
            ["--tasks.sources.0.answer_column", "gold"],
            "dataset '{folder}/tasks.jsonl' has no answer column 'gold'; its columns are prompt, answer: set"
            " tasks.sources.answer_column",
        ),
    ],
    ids=["a path", "a prompt column", "an answer column"],
)
def test_data_that_is_not_there(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert error_of(capsys, "train", recipe, *words) == message.format(folder=recipe.parent)


def test_a_line_of_the_data_is_counted_as_editors_do(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['{"prompt": "1", "answer": "1"}', '{"prompt": "", "answer": "2"}']
    (recipe.parent / "tasks.jsonl").write_text("\n".join(lines))
    assert "tasks.jsonl', line 2: column 'prompt' holds ''; expected a text" in error_of(
        capsys, "train", recipe, "--tasks.shuffle", "false", "--tasks.eval_fraction", "0.000001", loads=True
    )


def test_a_column_that_the_reward_needs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe.parent / "mine.py").write_text("def reward(prompts, completions, anwser, **columns):\n    return [1.0]\n")
    assert (
        "the function takes anwser, but the data has no such column: it is given completion_ids, answer, prompts,"
        " completions, trainer_state, log_metric, log_extra. Did you mean answer?"
    ) in error_of(capsys, "train", recipe, "--rewards.function", "mine.py:reward", loads=True)


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


def test_a_reward_that_raises(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks.shuffle", "false", "--rewards.function", "mine.py:always"]
    assert error_of(capsys, "train", own, *words, loads=True) == (
        "reward 'mine.py:always' of task 'tasks/0' failed its start-up call: ZeroDivisionError: float division by zero"
        " (mine.py:4). Fix the function, or name another in rewards.function or tasks.sources.reward"
    )


def test_ctrl_c(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algorithm.after_scoring", "mine.py:stop", "--train.num_steps", "9"]
    assert cli.main(["train", str(own), *words]) == 130
    said = lines_of(capsys)
    assert said.count("stopping: parking rollouts and writing a checkpoint (again: stop at once)") == 1
    where = said.index("stopped after step 1; continue with:")
    (command,) = said[where + 1 :]
    assert command.endswith(f"train {own} {words[0]}={words[1]} {words[2]}=9 --run.dir={own.parent}/run --resume")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trace", "rnu"], "'rnu' is not the directory of a run: it is not there. Did you mean run?"),
        (
            ["plan", "recipe.toml", "--from-run", "rnu"],
            "--from-run: 'rnu' is not the directory of a run: it is not there. Did you mean run?",
        ),
        (
            ["plan", "recipe.toml", "--svg", "/proc/plan.svg"],
            "--svg /proc/plan.svg cannot be written: No such file or directory (/proc). Give another place",
        ),
        (
            ["train", "recipe.toml", "--rewards.function", "rewrad.py:reward"],
            "reward 'rewrad.py:reward' of task '{task}' failed its start-up call: there is no file {folder}/rewrad.py;"
            " did you mean reward.py? Fix the function, or name another in rewards.function or tasks.sources.reward",
        ),
    ],
    ids=["trace", "plan", "picture", "reward"],
)
def test_other_paths(recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    (recipe.parent / "run").mkdir()
    error = error_of(capsys, *words, loads=words[0] == "train")
    task = re.search(r"of task '(.*?)'", error)
    assert error == message.format(folder=recipe.parent, task=task and task[1])


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

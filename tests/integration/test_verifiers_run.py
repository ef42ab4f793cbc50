"""workflow.verifiers in runs of the real program: trained, killed and resumed, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from test_workflow_run import check_whole_of_agents, of_environment

from rollover.cli import main

TASKSETS = Path(__file__).parents[1] / "tasksets"
needs_verifiers = pytest.mark.verifiers


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS), prepend=":")


def recipe(folder: Path, name: str, *, steps: int = 2, **tables) -> Path:
    """Without a source of tasks: they are those of the taskset."""
    workflow = {"environment": None, "verifiers": name, **tables.pop("workflow", {})}
    path = of_environment(folder, "Game", steps=steps, workflow=workflow, rewards={"function": None}, **tables)
    path.write_text(path.read_text().partition("[[tasks.sources]]")[0])
    return path


@needs_verifiers
def test_a_taskset_is_trained(tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, "digits-taskset"))]) == 0
    check_whole_of_agents(tmp_path / "run", 2)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/done"] >= 18 and row["episodes/error"] == 0
    records = runs.records(tmp_path / "run")
    assert {r["role"] for r in records} == {"policy"}
    assert all("count to" in r["messages"][0]["content"] for r in records if r["messages"])
    assert records[0]["extras"].keys() == {"digits", "short", "length"}


@needs_verifiers
def test_held_out_tasks_are_played_by_the_same_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(tmp_path, "digits-taskset", steps=1, eval={"num_tasks": 4})
    other = "[workflow.verifiers_eval]\nopening = 'start at'\n"
    file.write_text(file.read_text() + other)
    assert main(["train", str(file)]) == 0
    check_whole_of_agents(tmp_path / "run", 1)
    rows = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    assert [row["episodes"]["done"] for row in rows] == [4, 4]
    capsys.readouterr()
    out = tmp_path / "out.jsonl"
    assert main(["eval", str(file), "--json", "--answers", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(rows[0]["mean"])
    assert len(answers := runs.json_lines(out)) == 4 and all("start at" in json.dumps(a) for a in answers)


@needs_verifiers
def test_the_roles_of_an_environment_are_trained(tmp_path: Path) -> None:
    roles = "[workflow.roles.solver]\n[workflow.roles.judge]\nweight = 0.5\n"
    path = recipe(tmp_path, "debate-taskset")
    path.write_text(path.read_text() + roles)
    assert main(["train", str(path)]) == 0
    check_whole_of_agents(tmp_path / "run", 2)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/done"] >= 18 and row["turns/continued"] >= 9 and row["tokens/environment"] > 0
    assert {r["role"] for r in runs.records(tmp_path / "run")} == {"solver", "judge"}


@needs_verifiers
def test_a_run_goes_on_and_ends_beside_rewards_that_raise_or_hang(tmp_path: Path) -> None:
    file = recipe(tmp_path, "broken-taskset", workflow={"retries": 0})
    assert main(["train", str(file)]) == 0
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/error"] > 0 and row["episodes/done"] >= 12, row


@needs_verifiers
def test_a_run_goes_on_where_it_was_and_not_with_another_taskset(tmp_path: Path, capsys) -> None:
    file = recipe(tmp_path, "digits-taskset", steps=1)
    assert main(["train", str(file)]) == 0
    assert main(["train", str(file), "--resume", "--train.num_steps=2"]) == 0
    check_whole_of_agents(tmp_path / "run", 2)
    assert main(["train", str(recipe(tmp_path, "debate-taskset", steps=3)), "--resume"]) == 2
    assert "tasks.sources.0.name" in capsys.readouterr().err


@needs_verifiers
def test_a_run_that_was_killed_plays_what_was_unfinished_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = recipe(tmp_path, "digits-taskset", checkpoint={"every_steps": 0, "journal_s": 0.05})
    (tmp_path / "kill").touch()
    assert subprocess.run(runs.command("train", file), timeout=300).returncode == -9
    (tmp_path / "kill").unlink()
    assert main(["train", str(file), "--resume"]) == 0
    check_whole_of_agents(tmp_path / "run", 2)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/replayed"] > 0 and row["dropped/restarted/tokens"] == 0, "nothing is sampled again"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--workflow.function=agents.py:play"], "Remove one"),
        (["--workflow.environment=agents.py:Game"], "Remove one"),
        (['--tasks.sources=[{kind = "dataset", path = "tasks.jsonl"}]'], "those of its taskset"),
        (["--tasks.system_prompt=Count."], "tasks.system_prompt has no effect"),
        (["--workflow.verifiers=other", '--tasks.sources=[{kind = "verifiers", name = "mine"}]'], "makes by itself"),
    ],
)
def test_what_does_not_go_with_verifiers_exits_2(tmp_path: Path, capsys, words: list[str], why: str) -> None:
    assert main(["train", str(recipe(tmp_path, "digits-taskset")), *words]) == 2
    error = capsys.readouterr().err
    assert why in error and "workflow.verifiers" in error, error


def test_without_the_package_the_run_exits_2_and_says_how_to_get_it(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    assert main(["train", str(recipe(tmp_path, "digits-taskset"))]) == 2
    assert "pip install 'rollover[verifiers]'" in capsys.readouterr().err


def test_the_taskset_is_the_source_of_tasks_in_place_of_a_recipe_s(tmp_path: Path) -> None:
    """So a recipe can be laid over: `rollover config` says what its tasks become."""
    from rollover.config.load import load_config

    args = {"taskset": {"num_tasks": 8}}
    resolved = load_config(["quickstart", {"workflow": {"verifiers": "digits", "verifiers_args": args}}])
    [source] = resolved.config.tasks.sources
    assert (source.kind, source.name, source.params) == ("verifiers", "digits", {"num_tasks": 8})
    assert any("tasks.sources" in notice for notice in resolved.notices)
    again = load_config([json.loads(resolved.config.model_dump_json(exclude_unset=True))]).config
    assert again.tasks.sources == [source]

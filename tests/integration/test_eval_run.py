"""`rollover eval`: the table by file and data_source, every answer in a file, the worst on the console."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import runs

import tiny
from rollover.cli import main


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = runs.write(tmp_path, rollout={"max_new_tokens": 12}, eval={"num_tasks": 6, "samples_per_task": 2})
    rows = [{"prompt": f"say {i}", "answer": f"#### {i}", "data_source": "ab"[i % 2]} for i in range(6)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_answers_and_the_worst_of_them(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(recipe), "--tasks.sources.0.eval_path", "test.jsonl", "--rewards.function", "reward.py:reward"]
    assert main([*words, "--answers", "out.jsonl", "--worst", "3"]) == 0
    said, told = capsys.readouterr()
    line = (
        "tasks: tasks has 400 rows: 400 are trained, 0 left out, as test.jsonl has their problems; 0 repeat another's"
    )
    assert line in told and "6 held-out tasks (tasks 6), of which 0 have the words and the answer" in told
    rows = runs.json_lines(tmp_path / "out.jsonl")
    assert len(rows) == 12 and {(r["source"], r["data_source"]) for r in rows} == {("test", "a"), ("test", "b")}
    for row in rows:
        number = row["prompt"].removeprefix("user: say ")
        assert row["expected"] == number and row["task_id"] == f"tasks/eval/{number}"
        assert row["score"] == pytest.approx(sum(c.isdigit() for c in row["answer"]) / 48) and row["error"] is None
        assert row["stop_reason"] in ("eos", "length") and 0 < row["num_tokens"] <= 12
    for label in ("test", "data_source a", "data_source b", "all"):
        assert f" {label} " in said
    lowest = sorted(rows, key=lambda r: r["score"])[:3]
    for row in lowest:
        assert f"{row['task_id']} (test): score {row['score']:.2f}, {row['stop_reason']}" in said
    assert said.count("\n  -> ") == 3
    assert main([*words, "--json", "--worst", "2", "--against", "out.jsonl"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["worst"] == lowest[:2] and set(result["data_sources"]) == {"a", "b"}
    [against] = result["against"]
    assert (against["tasks"], against["difference"], against["p_value"], against["unpaired"]) == (6, 0, 1, 0)


def test_several_settings_against_what_was_recorded_of_another_model(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(
        recipe.read_text()
        + '[[eval.settings]]\nname = "greedy"\ntemperature = 0.0\nmax_new_tokens = 5\n'
        + '[[eval.settings]]\nname = "many"\nsamples_per_task = 4\n'
    )
    words = ["eval", str(recipe), "--eval.majority", "true", "--eval.num_tasks", "4"]
    assert main([*words, "--answers", "a.jsonl", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "maj@4" not in result and result["settings"]["greedy"]["tokens"] <= 5
    assert {"maj@4", "maj@4_ci", "pass@4", "sources", "truncated"} <= result["settings"]["many"].keys()
    rows = runs.json_lines(tmp_path / "a.jsonl")
    assert [sum(r.get("setting", "") == name for r in rows) for name in ("", "greedy", "many")] == [8, 4, 16]
    assert all(r["num_tokens"] <= 5 for r in rows if r.get("setting") == "greedy")
    for row in rows:
        digits = re.findall(r"\d+", row["answer"])
        assert ("vote" in row) == bool(digits), row
    tiny.save(tmp_path / "other", seed=1)
    assert main([*words, "--model", "other", "--against", "a.jsonl", "--answers", "b.md"]) == 0
    said = capsys.readouterr().out
    assert " greedy " in said and " many " in said
    for start in ("against a.jsonl: 4 tasks: mean reward ", "setting greedy: 4 tasks: ", "setting many: 4 tasks: "):
        assert start in said
    assert (tmp_path / "b.md").read_text().count("\n\nanswer (") == 28
    assert main([*words, "--against", "nowhere.jsonl", "--model.path", "/no/such/model"]) == 2
    assert "--against nowhere.jsonl: it cannot be read" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error_before_the_model_is_loaded(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(recipe), "--answers", "nowhere/out.jsonl", "--model.path", "/no/such/model"]) == 2
    assert "--answers nowhere/out.jsonl: there is no folder nowhere" in capsys.readouterr().err


def test_answers_are_kept_where_every_reward_failed(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text("def reward(completions, **columns):\n    raise KeyError('x')\n")
    assert main(["eval", str(recipe), "--answers", "out.jsonl"]) == 2
    assert "the last error is: KeyError: 'x'" in capsys.readouterr().err
    rows = runs.json_lines(tmp_path / "out.jsonl")
    assert len(rows) == 12 and all(r["score"] is None and "reward.py:2" in r["error"] for r in rows)


def test_training_tasks_that_cannot_be_used_do_not_keep_the_others_from_being_evaluated(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(recipe), "--tasks.eval_fraction", "0.9999", "--eval.num_tasks", "2"]) == 0
    told = capsys.readouterr().err
    assert "tasks: those for training cannot be looked at, so nothing is said of them here: tasks.eval_fraction" in told


def test_held_out_tasks_with_long_prompts_are_counted(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "x" * size, "answer": "1"} for size in (1, 2, 60, 70, 80)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(recipe), "--tasks.sources.0.eval_path", "test.jsonl", "--tasks.max_prompt_tokens", "30"]
    line = "3 of 5 held-out tasks are not evaluated: their prompts exceed 30 tokens"
    assert main(["eval", *words]) == 0
    said, told = capsys.readouterr()
    assert "3 more tasks are left out" in said and line in told
    assert main(["train", *words, "--train.num_steps", "1", "--run.dir", "out"]) == 0
    said, _ = capsys.readouterr()
    assert "left out (prompts too long)" in said and said.count(line) == 1
    late = ["--eval.at_start", "false", "--train.num_steps", "1", "--run.dir", "late"]
    assert main(["train", *words, *late]) == 0
    said, _ = capsys.readouterr()
    assert said.index(line) < said.index("step 1/1") and said.count(line) == 1
    assert [(row["tasks"], row["left_out"]) for row in runs.json_lines(tmp_path / "out" / "eval.jsonl")] == [(2, 3)] * 2

"""Held-out tasks of a workflow in runs of the real program: before, between and after steps, after a kill in the middle
of an evaluation, by `rollover eval`, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
from test_workflow_function_run import check_whole, recipe

from rollover.cli import main

KILLED = """
import os, signal
from pathlib import Path

HERE = Path(__file__).parent

async def killed_in_evaluation(task, episode):
    with (HERE / "asked").open("a") as file:
        print(os.getpid(), episode.episode_id, file=file)
    reply = await episode.trajectory("solver").chat(task.messages)
    killed_in_evaluation.num = getattr(killed_in_evaluation, "num", 0) + episode.episode_id.startswith("eval-")
    if killed_in_evaluation.num == 12 and (HERE / "kill").exists():  # the second evaluation's fourth episode
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(c.isdigit() for c in reply.text) / 20
"""
EVAL = {"num_tasks": 4, "samples_per_task": 2, "every_steps": 1}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return runs.json_lines(folder / "run" / "eval.jsonl")


def check_apart(folder: Path, steps: int) -> None:
    """The rows, records and the trace of the run know nothing of its evaluations."""
    check_whole(folder / "run", steps)
    assert all(r["group_id"] >= 0 for r in runs.records(folder / "run"))
    assert all(e.group is None or e.group >= 0 for e in runs.trace(folder / "run"))


def test_evaluations_of_roles_before_between_and_after_steps(tmp_path: Path) -> None:
    file = recipe(tmp_path, "talk", eval=EVAL)
    assert main(["train", str(file)]) == 0
    check_apart(tmp_path, 2)
    rows = evaluations(tmp_path)
    assert [row["policy_version"] for row in rows] == [0, 1, 2]
    for row in rows:
        roles = row["roles"]
        assert row["samples"] and roles["solver"]["samples"] == roles["judge"]["samples"] == 8
        assert row["mean"] == pytest.approx((roles["solver"]["mean"] + roles["judge"]["mean"]) / 2)
        assert row["episodes"] == {"done": 8, "length": 0, "timeout": 0, "error": 0, "restarted": 0}
    model, out = tmp_path / "run" / "model", tmp_path / "out.jsonl"
    assert main(["eval", str(file), "--model", str(model), "--answers", str(out)]) == 0
    answers = runs.json_lines(out)
    again = sum(a["score"] for a in answers) / len(answers)
    assert again == pytest.approx(rows[-1]["mean"]), "the saved model says what the last evaluation heard"
    assert [of["role"] for of in answers[0]["roles"]] == ["solver", "judge"] and "[judge]" in answers[0]["answer"]


def test_an_evaluation_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    file = recipe(tmp_path, "over_http", steps=1, eval={"num_tasks": 3})
    assert main(["train", str(file)]) == 0
    check_apart(tmp_path, 1)
    assert [row["episodes"]["done"] for row in evaluations(tmp_path)] == [3, 3]
    assert "roles" not in evaluations(tmp_path)[0]
    assert runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["episodes/error"] == 0
    capsys.readouterr()
    assert main(["eval", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(evaluations(tmp_path)[0]["mean"])


def test_a_run_that_was_killed_in_an_evaluation_makes_it_again(tmp_path: Path) -> None:
    file = recipe(tmp_path, "killed_in_evaluation", eval=EVAL, checkpoint={"every_steps": 1, "journal_s": 0.05})
    with (tmp_path / "agents.py").open("a") as agents:
        agents.write(KILLED)
    (tmp_path / "kill").touch()
    assert runs.rollover("train", file).returncode == -9
    assert [row["step"] for row in evaluations(tmp_path)] == [0]
    (tmp_path / "kill").unlink()
    assert main(["train", str(file), "--resume"]) == 0
    check_apart(tmp_path, 2)
    assert [row["step"] for row in evaluations(tmp_path)] == [0, 1, 2]
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    again = [episode for pid, episode in asked if pid != asked[0][0] and episode.startswith("eval-")]
    assert len(again) == 16, "two evaluations, the one that was cut off among them"

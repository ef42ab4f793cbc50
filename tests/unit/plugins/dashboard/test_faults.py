"""Files that are damaged, gone or another run's under a running server: it says which, and shows all else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from recorded_run import write_run
from rollover.cli import main
from rollover.plugins.dashboard.app import make_app
from rollover.plugins.dashboard.run_data import RunData

DEEP = "[" * 100_000 + "\n"


def client(*directories: Path) -> TestClient:
    app = make_app([RunData(of) for of in directories])
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return write_run(tmp_path / "run")


def change(path: Path, key: str, value: Any) -> None:
    """In the first line of a file."""
    first, *others = path.read_text().splitlines(keepends=True)
    record = json.loads(first)
    del record[key]
    if value is not None:
        record[key] = value
    path.write_text("".join([json.dumps(record) + "\n", *others]))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


ROLLOUTS = "rollouts/step-000001.jsonl"


@pytest.mark.parametrize(
    ("question", "file", "damage"),
    [
        ("keys", "metrics.jsonl", lambda path: path.write_text(DEEP)),
        ("metrics?keys=reward/mean", "metrics.jsonl", lambda path: change(path, "reward/mean", 10**400)),
        ("keys", "metrics.jsonl", replace_by_folder),
        ("state", "config.resolved.json", lambda path: path.write_text(DEEP)),
        ("lanes", "trace.jsonl", lambda path: path.write_text(DEEP)),
        ("lanes", "trace.jsonl", lambda path: path.write_text("[null,9,1]\n")),
        ("lanes", "trace.jsonl", lambda path: path.write_text('["start",9,1,' + "1" * 30 + ",0,0,0]\n")),
        ("lanes", "trace.jsonl", replace_by_folder),
        ("choices", ROLLOUTS, lambda path: path.write_text(DEEP)),
        ("choices", ROLLOUTS, lambda path: change(path, "score", "high")),
        ("choices", ROLLOUTS, lambda path: change(path, "source", ["a"])),
        ("choices", ROLLOUTS, lambda path: change(path, "segments", [{}])),
        ("rollouts", ROLLOUTS, lambda path: change(path, "completion", 5)),
        ("rollouts", ROLLOUTS, lambda path: change(path, "columns", "{")),
        ("rollout?step=1&id=3-0", ROLLOUTS, lambda path: change(path, "token_ids", 5)),
        ("rollout?step=1&id=3-0", ROLLOUTS, lambda path: change(path, "prompt_ids", None)),
    ],
)
def test_what_is_damaged_is_named(run: Path, question: str, file: str, damage: Callable[[Path], object]) -> None:
    damage(run / file)
    answer = client(run).get(f"/api/runs/0/{question}")
    assert answer.status_code == 400, answer.text
    assert str(run) in answer.json()["error"]["message"]


def test_what_says_how_it_ended_may_be_damaged(run: Path) -> None:
    for name in ("finished", "resume.json"):
        (run / name).write_text(DEEP)
    state = client(run).get("/api/runs/0/state").json()
    assert state["state"] == "finished" and state["ended_early"] == ""


def test_a_damaged_run_hides_no_other(run: Path, tmp_path: Path) -> None:
    asked = client(run, write_run(Path(shutil.copytree(run, tmp_path / "other")), steps=1))
    (run / "metrics.jsonl").write_text("no row\n")
    damaged, other = asked.get("/api/runs").json()
    assert damaged.keys() == other.keys()
    assert damaged["state"] == "unreadable" and "metrics.jsonl has a line that is not" in damaged["ended_early"]
    assert damaged["directory"] == str(run) and other["state"] == "stopped"


def test_a_run_that_is_gone_is_no_stopped_one_and_comes_back(run: Path, tmp_path: Path) -> None:
    asked = client(run)
    before = asked.get("/api/runs/0/state").json()
    moved = run.rename(tmp_path / "moved")
    for stands_there in (lambda: None, run.mkdir, lambda: (run.rmdir(), run.write_text("a file"))):
        stands_there()
        answer = asked.get("/api/runs/0/state")
        assert answer.status_code == 400 and "is not the directory of a run" in answer.json()["error"]["message"]
        assert asked.get("/api/runs").json()[0]["state"] == "unreadable"
    run.unlink()
    moved.rename(run)
    assert asked.get("/api/runs/0/state").json() == before


def test_a_report_of_a_damaged_run_says_which_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run / ROLLOUTS, "completion", 5)
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 2
    assert ROLLOUTS in capsys.readouterr().err and not (run / "report.html").exists()

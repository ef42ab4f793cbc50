"""docs/running.md: its tables are those of a real run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import runs

from documents import ROOT
from rollover import cli
from rollover.types import StopReason

PAGE = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")


def first_column(section: str) -> list[str]:
    """The names in the first column of the table under a heading."""
    text = re.split(r"\n#{2,} ", PAGE.partition(f"\n## {section}\n")[2])[0]
    assert text, section
    return [name for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]


def test_the_page_lists_the_files_of_a_run_and_the_keys_in_them(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=1, eval={"num_tasks": 4, "samples_per_task": 2}, train={"profile_steps": [1]})
    assert cli.main(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    listed = first_column("The run directory")
    listed.remove("logs/")  # of runs with servers or ranks alone (test_remote_run.py)
    listed.remove("best_model/")  # of runs with checkpoint.save_best_model (test_best_run.py)
    listed.remove("metrics.parquet")  # of runs with track.format = ["parquet"] (test_parquet_run.py)
    listed.remove("tracked_as")  # of runs with track.trackers (tests/contract/test_tracker_stores.py)
    assert sorted(listed) == sorted(p.name + "/" * p.is_dir() for p in run.iterdir())
    assert json.loads((run / "profile" / "step-000001.json").read_text())["traceEvents"]
    (line, *_) = runs.json_lines(run / "rollouts" / "step-000001.jsonl")
    assert first_column("`rollouts/step-000012.jsonl`") == list(line)
    assert list(json.loads(line["columns"])) == ["answer"]
    (before, after) = runs.json_lines(run / "eval.jsonl")
    evaluation = PAGE.partition("## Evaluation")[2].partition("```")[0]
    assert [key for key in after if f"`{key}`" not in evaluation and not re.match(r"pass@2", key)] == []


def test_stop_reasons_are_listed() -> None:
    (row,) = re.findall(r"^\| `stop_reason` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {reason.value for reason in StopReason} - {"paused"}

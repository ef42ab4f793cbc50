"""A tracker of the user's own (track.trackers) in a run: told of all of it once, over a kill too, and never its end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main

KILLED_AT = Path(__file__).with_name("killed_at.py")
TRACKERS = """
import json
from rollover.track.tracker import Tracker

class Kept(Tracker):
    '''Everything by step, in a file beside the run's own.'''

    def on_start(self, run):
        self.path = run.directory / "kept.json"
        self.told = json.loads(self.path.read_text()) if run.resumed else {"rows": {}, "groups": {}, "evals": {}}
        self.told["starts"] = self.told.get("starts", 0) + 1
        self.told["name"] = run.config["run"]["name"]

    def truncate(self, cut):
        for kind in ("rows", "groups", "evals"):
            of = self.told[kind]
            self.told[kind] = {step: what for step, what in of.items() if int(step) <= cut.step}
        groups = self.told["groups"]
        for step in groups:
            if int(step) == cut.step:
                groups[step] = [group for group in groups[step] if not cut.is_repeated(group[0])]

    def on_step(self, row):
        self.told["rows"][str(row["step"])] = row["reward/mean"]
        row.clear()  # a copy
        self.path.write_text(json.dumps(self.told))

    def on_eval(self, row):
        self.told["evals"][str(row["step"])] = row["mean"]

    def on_groups(self, step, groups):
        told = [[g.group.group_id, g.dropped and g.dropped.value, len(g.completions)] for g in groups]
        self.told["groups"].setdefault(str(step), []).extend(told)

    def close(self):
        self.path.write_text(json.dumps(self.told))

class Broken(Tracker):
    def on_step(self, row):
        raise KeyError("no project")
"""


def recipe(folder: Path, *names: str, **tables: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(TRACKERS)
    trackers = [f"{folder}/mine.py:{name}" for name in names]
    return runs.write(folder, **{"track": {"live": "plain", "trackers": trackers}} | tables)


def kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "kept.json").read_text())


def check(folder: Path) -> None:
    """It was told what the run's own files hold."""
    told, rows = kept(folder), runs.json_lines(folder / "run" / "metrics.jsonl")
    assert told["rows"] == {str(row["step"]): row["reward/mean"] for row in rows}
    assert told["evals"] == {str(row["step"]): row["mean"] for row in runs.json_lines(folder / "run" / "eval.jsonl")}
    recorded: dict[str, list[list[Any]]] = {}
    for record in runs.records(folder / "run"):
        if record["sibling"] == 0:
            dropped = record["outcome"].removeprefix("dropped:") if record["outcome"] != "trained" else None
            recorded.setdefault(str(record["step"]), []).append([record["group_id"], dropped, record["group_size"]])
    assert told["groups"] == recorded and told["name"] == "tiny"


def test_it_is_told_what_the_files_of_the_run_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(tmp_path, "Broken", "Kept", eval={"num_tasks": 2, "every_steps": 2})
    assert main(["train", str(file)]) == 0
    check(tmp_path)
    out = capsys.readouterr().out
    assert out.count("failed: KeyError: 'no project' (") == 1 and out.count("step 4/4") == 1
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["trackers/failed"] for row in rows] == [0, 1, 2, 3], "counted in the row after"


def test_one_that_goes_on_with_a_killed_run_has_each_step_once(tmp_path: Path) -> None:
    """The kill comes before the fourth row, which it has been told, and is told again."""
    journal = ["--checkpoint.journal_s", "0"]
    file = recipe(tmp_path, "Kept", steps=6)
    killed = runs.rollover("rollover.track.jsonl:JsonlSink.write", 4, "train", file, *journal, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL and list(kept(tmp_path)["rows"]) == ["1", "2", "3", "4"]
    assert main(["train", str(file), "--resume", *journal]) == 0
    assert list(kept(tmp_path)["rows"]) == ["1", "2", "3", "4", "5", "6"] and kept(tmp_path)["starts"] == 2
    check(tmp_path)


def test_a_step_whose_row_is_written_has_been_told(tmp_path: Path) -> None:
    """The kill comes right behind the third row: that step is not told again."""
    journal = ["--checkpoint.journal_s", "0.2"]
    file = recipe(tmp_path, "Kept")
    killed = runs.rollover("rollover.track.live:LiveView.on_step", 3, "train", file, *journal, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL and len(runs.json_lines(tmp_path / "run" / "metrics.jsonl")) == 3
    assert main(["train", str(file), "--resume", *journal]) == 0
    assert list(kept(tmp_path)["rows"]) == ["1", "2", "3", "4"]
    check(tmp_path)


def test_the_row_of_a_step_that_is_trained_again_has_the_users_own_metrics(tmp_path: Path) -> None:
    (tmp_path / "metric.py").write_text("def sizes(groups):\n    return {'groups': len(groups)}\n")
    file = recipe(tmp_path, track={"live": "plain", "metrics": f"{tmp_path}/metric.py:sizes"})
    killed = runs.rollover("rollover.track.jsonl:JsonlSink.write", 3, "train", file, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL
    assert main(["train", str(file), "--resume"]) == 0
    assert [row["own/groups"] for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")] == [3, 3, 3, 3]


def test_groups_are_told_where_none_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "off"
    file = recipe(folder, "Kept", steps=1, track={"rollouts": False, "trackers": [f"{folder}/mine.py:Kept"]})
    assert main(["train", str(file)]) == 0
    assert len([g for g in kept(folder)["groups"]["1"] if g[1] is None]) == 3
    assert not list((folder / "run" / "rollouts").iterdir())


def test_a_name_that_is_none_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe(tmp_path, "Kept", "Keptt"))]) == 2
    error = capsys.readouterr().err
    assert "track.trackers" in error and "did you mean Kept" in error

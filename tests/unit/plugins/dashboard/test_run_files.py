"""IndexedRun: what the directory of a run says, live, finished, killed or of an older version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recorded_run import row, write_run
from rollover.config import Config
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.metrics import Amount
from rollover.run.run_files import DirectoryLock
from rollover.track.build import build_trackers


def test_all_that_a_run_says(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    assert [of["step"] for of in files.metrics()] == [1, 2, 3]
    assert [of["mean"] for of in files.evaluations()] == [0.1]
    assert [event.group for event in files.events()] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert (files.name, files.value("train.num_steps"), files.value("no.such", 7)) == ("told", 5, 7)
    accounts = files.accounts()
    assert accounts is not None and accounts.missing == Amount(0, 0)
    assert accounts.dropped == {"stale": Amount(3, 21)}
    assert (accounts.generated, accounts.trained, accounts.held) == (Amount(10, 61), Amount(6, 36), Amount(1, 4))


@pytest.mark.parametrize("what", ["nowhere", "file", "empty"])
def test_what_is_no_run_is_said(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not the directory of a run"):
        IndexedRun(tmp_path / what)


def test_a_killed_run_with_half_lines(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    for name in ("metrics.jsonl", "eval.jsonl", "trace.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b'{"step": 4, "rew')
    assert len(files.metrics()) == 3 and len(files.evaluations()) == 1 and len(list(files.events())) == 9


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    with build_trackers(Config.model_validate({}), tmp_path):
        files = IndexedRun(tmp_path)
        assert (files.config, files.metrics(), files.evaluations(), list(files.events())) == ({}, [], [], [])
        assert files.accounts() is None and files.warnings() == [] and len(files.rollouts.entries()) == 0


def test_who_makes_it_is_known_and_looking_hinders_nobody(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    assert (files.state, files.holder) == ("stopped", "")
    lock = DirectoryLock(tmp_path, "run.dir")
    assert files.state == "running" and files.holder.startswith("process ")
    with pytest.raises(ValueError, match="is in use by process"):
        DirectoryLock(tmp_path, "run.dir")
    lock.release()
    assert files.state == "stopped"
    (tmp_path / "finished").write_text(json.dumps({"step": 3, "used_up": "tasks"}))
    assert (files.state, files.ended_early) == ("finished", "the tasks are used up")
    (tmp_path / "finished").write_text("")
    assert (files.state, files.ended_early) == ("finished", "")


def test_how_to_go_on_is_what_the_run_said_itself(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path / "a run"))
    unknown = (f"rollover train FILE.toml --run.dir '{tmp_path}/a run' --resume", "")
    assert files.resume == unknown
    file = files.directory / "resume.json"
    file.write_text(json.dumps({"command": "rollover train my.toml --resume", "folder": "/home"}))
    assert files.resume == ("rollover train my.toml --resume", "/home")
    for damaged in ("[]", "{", '{"command": "x"}', "null"):
        file.write_text(damaged)
        assert files.resume == unknown


def test_warnings_are_those_that_the_run_was_told(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    rows = [row(step, entropy=0.01) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    (warning,) = files.warnings()
    assert (warning.step, warning.key) == (5, "entropy") and "below 0.05 for 5 steps" in warning.text


def test_a_figure_that_does_not_matter_in_this_run_is_no_warning(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    rows = [row(step, **{"groups/zero_variance": 1.0}) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    assert [warning.key for warning in files.warnings()] == ["groups/zero_variance"]
    one = {"rollout": {"group_size": 1}, "algorithm": {"advantage": "reinforce_plus_plus"}, "rewards": {"min_valid": 1}}
    (tmp_path / "config.resolved.json").write_text(json.dumps(one))
    assert files.warnings() == []

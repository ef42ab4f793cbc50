"""A run's directory: one run at a time, nothing lost to a resumed one, and the order in which things are cut off."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from rollover.checkpoint.journal import Journal
from rollover.checkpoint.storage import checkpoint_name
from rollover.config import Config
from rollover.config.table import UNSETTLED
from rollover.run import directory as directory_module
from rollover.run.directory import RunDirectory
from rollover.track.tracker import Cut

HOLD = """
import sys, time
from pathlib import Path
from rollover.run.run_files import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), "run.dir")
print("held", flush=True)
time.sleep(600)
"""


def config(folder: Path, **tables: dict) -> Config:
    return Config.model_validate({"run": {"dir": str(folder / "run")}} | tables)


def opened(folder: Path, resume: bool = False, **tables: dict) -> RunDirectory:
    return RunDirectory(config(folder, **tables), resume)


def row(step: int) -> dict[str, float]:
    return {"step": step, "policy_version": step}


def with_steps(folder: Path, *checkpoints: int, steps: int = 3) -> RunDirectory:
    directory = opened(folder)
    directory.write_config()
    for step in range(1, steps + 1):
        directory.metrics.write(row(step))
    for step in checkpoints:
        directory.store.write(checkpoint_name(step), {"a": b"x"})
    directory.close()
    return directory


def steps_of(directory: RunDirectory) -> list[int]:
    return [row["step"] for row in directory.metrics.rows()]


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_told_who_has_the_directory(tmp_path: Path, resume: bool) -> None:
    if resume:
        with_steps(tmp_path, 2)
    else:
        (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(ValueError) as refused:
            opened(tmp_path, resume)
        said = (
            f"run.dir = {str(tmp_path / 'run')!r} is in use by process {holder.pid} on {socket.gethostname()} (since "
        )
        assert str(refused.value).startswith(said)
    finally:
        holder.kill()
        holder.communicate()
    assert opened(tmp_path, resume).path == tmp_path / "run", "the lock dies with its process"


def test_a_shared_checkpoint_directory_is_locked_too(tmp_path: Path) -> None:
    shared = {"dir": str(tmp_path / "shared")}
    first = opened(tmp_path / "a", checkpoint=shared)
    with pytest.raises(ValueError, match="checkpoint.dir = .* is in use by process"):
        opened(tmp_path / "b", checkpoint=shared)
    first.close()
    opened(tmp_path / "b", checkpoint=shared).close()


def test_checkpoints_may_lie_in_the_run_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    opened(tmp_path, checkpoint={"dir": str(tmp_path / "link")}).close()


def test_starts_in_the_same_second_have_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *args: "20260101-000000")
    paths = [RunDirectory(Config(), resume=False)]
    paths[0].metrics.write(row(1))  # a run that has begun, and one that has not yet
    paths += [RunDirectory(Config(), resume=False) for _ in range(2)]
    name = str(tmp_path / "runs" / "run-20260101-000000")
    assert [str(d.path) for d in paths] == [name, f"{name}-2", f"{name}-3"]
    assert [d.store.local_folder for d in paths] == [d.path / "checkpoints" for d in paths]


def test_later_checkpoints_are_deleted_before_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in between, the run can still be resumed."""
    with_steps(tmp_path, 1, 3)
    directory = opened(tmp_path, resume=True)

    def killed(step: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory.metrics, "truncate", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.truncate(Cut(1))
    directory.close()
    again = opened(tmp_path, resume=True)
    assert again.checkpoint_to_resume() == "step-000001"
    again.truncate(Cut(1))
    assert steps_of(again) == [1]


def write_journal(folder: Path) -> None:
    journal = Journal(folder)
    journal.begin(None)
    journal.append({"kind": "tokens"}, b"generated")
    journal.close()


@pytest.mark.parametrize("left", ["checkpoints", "journal"])
def test_resume_without_metrics_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str) -> None:
    metrics = with_steps(tmp_path, 2).metrics
    metrics.path.unlink()
    if left == "journal":
        shutil.rmtree(tmp_path / "run/checkpoints")
        write_journal(tmp_path / "run/journal")
    directory = opened(tmp_path, resume=True)
    for _ in range(2):  # the second time, the file is there and empty
        directory.truncate(Cut(2))
        assert f"{metrics.path} is missing or empty: the rows of steps 1 to 2 are lost" in "".join(capsys.readouterr())
    directory.metrics.write(row(3))
    assert directory.metrics.reaches(3) and directory.metrics.last_row["step"] == 3


def test_resume_without_metrics_and_checkpoints_names_their_place(tmp_path: Path) -> None:
    with_steps(tmp_path).metrics.path.unlink()
    (tmp_path / "run/checkpointed").write_text("s3://elsewhere")
    with pytest.raises(ValueError, match="wrote checkpoints to s3://elsewhere"):
        opened(tmp_path, resume=True)


def test_resume_of_an_empty_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no run: correct it"):
        opened(tmp_path, resume=True)


@pytest.mark.parametrize("torn", [b'{"step": 3, "poli\n', b"\x00\x00\x00\n", b"3\n", b'{"step": 3'])
def test_a_torn_line_after_the_checkpoint_is_cut_off_unread(tmp_path: Path, torn: bytes) -> None:
    metrics = with_steps(tmp_path, 2, steps=2).metrics
    with open(metrics.path, "ab") as file:
        file.write(torn)
    directory = opened(tmp_path, resume=True)
    directory.truncate(Cut(2))
    assert steps_of(directory) == [1, 2]


def test_torn_line_before_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    metrics = with_steps(tmp_path, 2, steps=1).metrics
    with open(metrics.path, "ab") as file:
        file.write(b'{"st\n' + json.dumps(row(2)).encode() + b"\n")
    directory = opened(tmp_path, resume=True)
    with pytest.raises(ValueError, match="has no row of step 2, from which this run continues"):
        directory.truncate(Cut(2))
    assert b'"step": 2' in metrics.path.read_bytes()


def test_the_configuration_of_every_start_is_kept(tmp_path: Path) -> None:
    with_steps(tmp_path, 2)
    for rate, files in ((1e-6, 1), (2e-6, 2), (2e-6, 2), (3e-6, 3)):
        directory = opened(tmp_path, resume=True, train={"learning_rate": rate})
        assert [change.key for change in directory.changes] in ([], ["train.learning_rate"])
        directory.write_config()
        directory.close()
        kept = sorted(p.name for p in directory.path.glob("config.resolved*.json"))
        assert len(kept) == files
    rates = {
        name: json.loads((tmp_path / "run" / name).read_text())["train"]["learning_rate"]
        for name in ("config.resolved.1.json", "config.resolved.2.json", "config.resolved.json")
    }
    assert list(rates.values()) == [1e-6, 2e-6, 3e-6]


@pytest.mark.parametrize("tables", [{}, {"train": {"num_steps": 9}}])
def test_settings_that_are_gone_are_compared_with_nothing(tmp_path: Path, tables: dict) -> None:
    source = {"tasks": {"sources": [{"kind": "dataset", "path": "tasks.jsonl"}]}}
    first = opened(tmp_path, **source)
    first.metrics.write(row(1))
    first.store.write(checkpoint_name(1), {"a": b"x"})
    first.close()  # killed before it wrote its settings
    again = opened(tmp_path, resume=True, **source, **tables)
    assert again.changes == []
    again.write_config()
    again.close()
    assert (tmp_path / "run" / "config.resolved.json").exists()


def test_kill_during_write_of_settings_keeps_former_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_steps(tmp_path, 3)
    again = opened(tmp_path, resume=True, train={"num_steps": 9})
    plain = directory_module.atomic_write_text

    def killed(path: Path, text: str) -> None:
        if path.name == "config.resolved.json":
            raise KeyboardInterrupt
        plain(path, text)

    monkeypatch.setattr(directory_module, "atomic_write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        again.write_config()
    again.close()
    third = opened(tmp_path, resume=True, train={"num_steps": 9})
    third.close()
    assert [change.key for change in third.changes] == ["train.num_steps"]


@pytest.mark.parametrize("name", ["config.resolved.json", "finished"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    with_steps(tmp_path, 3).end(3, "")
    for content in (b'{"step"', b"[]", b"\xff{}", b'{"step": "3"}', b'{"step": 3, "used_up": 1}'):
        (tmp_path / "run" / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"^--resume: .*run/{name} is damaged .*: restore the file, or delete it"):
            opened(tmp_path, resume=True).finished_notice()


def test_finished_run_resumes_only_for_more_steps(tmp_path: Path) -> None:
    def why(steps: int, **tables: dict) -> str | None:
        directory = opened(tmp_path, resume=True, train={"num_steps": steps}, **tables)
        directory.close()
        return directory.finished_notice()

    directory = with_steps(tmp_path, 2, 3)
    assert why(3) is None, "it may have ended before its last evaluation, or before its model was written"
    directory.end(3, "")
    assert why(3) == "this run is finished: 3 steps are trained, and train.num_steps = 3. Raise it to continue"
    assert why(4) is None
    assert why(3, checkpoint={"resume_from": "step-000002"}) is None
    directory.end(3, "tasks")
    assert "the tasks are used up" in (why(9) or "")
    assert why(9, tasks={"epochs": 2}) is None
    resumed = opened(tmp_path, resume=True, train={"num_steps": 4})
    resumed.truncate(Cut(3))
    resumed.close()
    assert why(3) is None


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "trace.jsonl", "config.resolved.json", "lock"])
def test_a_folder_where_a_file_of_the_run_belongs_is_named(tmp_path: Path, name: str, resume: bool) -> None:
    if resume:
        with_steps(tmp_path, 2)
        (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"cannot be used: {name} in it is a folder.* Remove it"):
        opened(tmp_path, resume)


def test_remote_checkpoints_are_staged_where_ranks_see_them(tmp_path: Path) -> None:
    """In the run's folder, from which what a killed process left is removed."""
    remote, seen = f"memory://directory-{uuid.uuid4().hex}", []

    def write(folder: str) -> None:
        seen.append(Path(folder))
        Path(folder, "a").write_bytes(b"x")

    tables = {"checkpoint": {"dir": remote}, "backend": {"type": "ranks"}}
    of = Config.model_validate({"run": {"dir": str(tmp_path / "run")}} | tables, context=UNSETTLED)
    directory = RunDirectory(of, resume=False)
    directory.write_config()
    directory.metrics.write(row(2))
    directory.store.write(checkpoint_name(2), {}, [("", write)])
    read = Path(directory.store.open(checkpoint_name(2))["a"])
    directory.close()
    way = seen[0].parent
    assert way.parent == tmp_path / "run" and way.is_absolute() and read.is_relative_to(way)
    (way / "left by a killed one").mkdir()
    again = RunDirectory(of, resume=True)
    assert not way.exists()
    again.close()
    alone = opened(tmp_path / "alone", checkpoint={"dir": remote + "-2"})
    alone.store.write(checkpoint_name(2), {}, [("", write)])
    assert not seen[1].is_relative_to(tmp_path)
    alone.close()

"""A run with remote checkpoints whose machine is lost: another goes on, with its steps, rows, tokens and journal."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import runs
import torch
from endings import before_step, look_at_start, train, train_until, weights
from runs import check_whole

from rollover.run.loop import Run

RARELY: dict[str, Any] = {"every_steps": 50, "journal_s": 0.05, "save_final_model": False}


@pytest.fixture
def remote() -> str:
    return f"memory://lost-{uuid.uuid4().hex}"


def refuse(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """From now on the store takes no object with `part` in its name."""
    store = fsspec.get_filesystem_class("memory")
    plain = store.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **options: Any) -> None:
        if part in path:
            raise ConnectionError("no route to host")
        plain(self, path, value, **options)

    monkeypatch.setattr(store, "pipe_file", pipe_file)


@pytest.mark.parametrize("first", [0, 2], ids=["without a checkpoint", "after one"])
def test_another_machine_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], remote: str, first: int) -> None:
    """Nothing more reaches the store once step 3 is told, though the run goes on for a step."""
    recipe = runs.write(tmp_path, steps=6, checkpoint=RARELY | {"dir": remote})
    if first:
        assert train(capsys, recipe, "--train.num_steps", str(first))[0] == 0
    reached: dict[str, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:

        def cut_off(run: Run, version: int) -> None:
            if version == 3:
                assert run.directory.mirror is not None
                run.directory.mirror.copy()
                reached.update(weights(run))
                refuse(monkeypatch, "/run/")

        before_step(monkeypatch, cut_off)
        text = train_until(capsys, 4, recipe, *(["--resume"] if first else [])).text
    assert text.count("cannot be copied to ") == 1 and "no route to host" in text, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    shutil.rmtree(tmp_path / "run")
    code, text = train(capsys, recipe, "--run.dir", str(tmp_path / "another"))
    assert code == 2 and "of another run" in text, "nothing of it is overwritten"
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = look_at_start(monkeypatch)
        code, text = train(capsys, recipe, "--run.dir", str(tmp_path / "other"), "--resume")
    assert code == 0 and "the files of this run come from " in text and f"({3 - first} steps)" in text, text
    assert all(torch.equal(begun[name], reached[name]) for name in reached)
    assert len(rows) == 4 and runs.json_lines(tmp_path / "other" / "metrics.jsonl")[:3] == rows[:3]
    check_whole(tmp_path / "other", 6, checkpoints=remote)


def test_a_run_whose_files_cannot_be_copied_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "/run/")
    code, text = train(capsys, runs.write(tmp_path, steps=3, checkpoint=RARELY | {"dir": remote, "every_steps": 1}))
    assert code == 0 and text.count("cannot be copied to ") == 1, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["mirror/failed"] >= 2, "at least at the two checkpoints before"


def test_a_run_with_local_checkpoints_copies_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(capsys, runs.write(tmp_path, steps=1, checkpoint=RARELY))[0] == 0
    assert not [key for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl") for key in row if "mirror/" in key]

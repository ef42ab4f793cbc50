"""A run that ended between two checkpoints: its steps are trained again bit by bit, or rolled back; damage is named."""

from __future__ import annotations

import errno
import os
import types
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from endings import CHECKPOINT, look_at_start, train, train_until
from runs import check_whole

from rollover.checkpoint import journal as journal_module


@pytest.mark.parametrize(
    ("first", "before_row"),
    [(0, True), (2, False)],
    ids=["without a checkpoint, before a row", "after one, between steps"],
)
def test_steps_are_trained_again_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int, before_row: bool
) -> None:
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT)
    if first:
        assert train(capsys, recipe, "--train.num_steps", str(first))[0] == 0
    end = train_until(capsys, 4, recipe, *(["--resume"] if first else []), before_row=before_row)
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 4 - before_row
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = look_at_start(monkeypatch)
        code, text = train(capsys, recipe, "--resume")
    assert code == 0 and f"({4 - first} steps)" in text, text
    assert begun.keys() == end.weights.keys() and all(torch.equal(begun[n], end.weights[n]) for n in begun)
    assert runs.json_lines(tmp_path / "run" / "metrics.jsonl")[: len(rows)] == rows, "told rows are kept as they were"
    check_whole(tmp_path / "run", 6)


def test_lost_steps_are_rolled_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT)
    assert train(capsys, recipe, "--train.num_steps", "2")[0] == 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = look_at_start(monkeypatch)
        train_until(capsys, 4, recipe, "--resume")
    trained = {r["rollout_id"]: r["token_ids"] for r in runs.records(tmp_path / "run") if r["step"] > 2}
    with pytest.MonkeyPatch.context() as monkeypatch:
        again = look_at_start(monkeypatch)
        code, text = train(capsys, recipe, "--resume", "--checkpoint.lost_steps", "roll_back")
    assert code == 0 and "2 steps after the checkpoint are rolled back: " in text, text
    assert all(torch.equal(begun[n], again[n]) for n in begun), "training goes on from the checkpoint's weights"
    check_whole(tmp_path / "run", 6)
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(row["staleness/max"] <= 2 for row in rows) and max(row["staleness/max"] for row in rows[2:]) > 0
    dropped = sum(r["outcome"] == "dropped:rolled_back" for r in runs.records(tmp_path / "run"))
    assert rows[-1]["dropped/rolled_back/groups"] * 3 == dropped
    final = {r["rollout_id"]: r["token_ids"] for r in runs.records(tmp_path / "run")}
    assert trained and all(final[i] == tokens for i, tokens in trained.items()), "nobody was sampled again"


def test_a_torn_last_record_is_cut_said_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=4, checkpoint=CHECKPOINT)
    train_until(capsys, 2, recipe)
    (path,) = (tmp_path / "run" / "journal").iterdir()
    content = path.read_bytes()
    torn = content[: content.rindex(b"RLVJ") + 33]
    path.write_bytes(torn)
    code, text = train(capsys, recipe, "--resume")
    assert (
        code == 0 and text.count(f"the journal {path} ends within record") == 1 and "last 33 bytes are cut" in text
    ), text
    check_whole(tmp_path / "run", 4)
    cut = [row.get("journal/cut_bytes") for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert cut == [0, 0, 33, 33]


def test_a_full_disk_ends_the_journal_until_the_next_checkpoint_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT | {"every_steps": 3})
    num = 0

    def write(fd: int, data: Any) -> int:
        nonlocal num
        num += 1
        if num == 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data)

    limited = types.SimpleNamespace(**{**vars(os), "write": write})
    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "os", limited)
        text = train_until(capsys, 5, recipe).text
    assert text.count("the journal cannot be written") == 1, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["journal/failed"] for row in rows] == [1] * 5
    assert rows[2]["journal/bytes"] < rows[4]["journal/bytes"], "it goes on after the checkpoint of step 3"
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "resumed from step-000003 and " in text and "(2 steps)" in text, text
    check_whole(tmp_path / "run", 6)


def test_an_earlier_checkpoint_is_gone_on_from_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT | {"every_steps": 2})
    train_until(capsys, 5, recipe)
    code, text = train(capsys, recipe, "--resume", "--checkpoint.resume_from", "step-000002")
    assert code == 0 and "resumed from step-000002: " in text, text
    check_whole(tmp_path / "run", 6)


def test_a_large_journal_brings_the_next_checkpoint_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=3, checkpoint=CHECKPOINT | {"every_steps": 0, "journal_max_gb": 1e-6})
    code, text = train(capsys, recipe)
    assert code == 0 and "checkpoint step-000001; " in text and "checkpoint step-000002; " in text, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(row["journal/bytes"] > 0 and row["journal/time_s"] > 0 for row in rows)

"""Unhappy ends and starts around the journal: between two writes of a restart, by a second Ctrl-C, and so on."""

from __future__ import annotations

import asyncio
import errno
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from endings import CHECKPOINT, look_at_start, train, train_until, train_until_called
from runs import check_whole

from rollover.checkpoint.journal import Journal
from rollover.checkpoint.mirror import Mirror
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.run.checkpointing import Checkpointing
from rollover.run.directory import RunDirectory
from rollover.run.event_log import EventLog
from rollover.types import Segment


def test_a_journal_that_is_switched_off_is_not_read_back_twice(tmp_path: Path, capsys) -> None:
    """Its steps are rolled back, and others are trained in their place: those of the journal never happened."""
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT)
    words = ["--resume", "--checkpoint.journal_s", "0", "--train.learning_rate", "2e-3"]
    train_until(capsys, 4, recipe)
    train_until(capsys, 2, recipe, *words)
    code, text = train(capsys, recipe, *words)
    assert code == 0 and "resumed from step-000000: " in text, text
    check_whole(tmp_path / "run", 6)
    assert not list((tmp_path / "run" / "journal").iterdir())


def test_where_a_runs_checkpoints_are_is_known_before_its_journal_goes(tmp_path: Path, capsys) -> None:
    recipe = runs.write(tmp_path, steps=4, checkpoint=CHECKPOINT | {"every_steps": 2})
    train_until_called(capsys, RunDirectory, "on_checkpoint", recipe)
    before = runs.rows(tmp_path)
    code, text = train(capsys, recipe, "--resume", "--checkpoint.dir", tmp_path / "elsewhere")
    assert code == 0 and "resumed from the start and " in text, text
    assert runs.rows(tmp_path)[: len(before)] == before
    check_whole(tmp_path / "run", 4, checkpoints=tmp_path / "elsewhere")


def test_rolled_back_steps_are_not_trained_by_older_settings(tmp_path: Path, capsys) -> None:
    """Killed when their rows were cut, and before the checkpoint."""
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT)
    assert train(capsys, recipe, "--train.num_steps", "2")[0] == 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = look_at_start(monkeypatch)
        train_until(capsys, 4, recipe, "--resume")
    ended = train_until_called(capsys, Checkpointing, "begin", recipe, "--resume", "--train.learning_rate", "2e-3")
    assert "are rolled back, since train.learning_rate changed: " in ended.text and len(runs.rows(tmp_path)) == 2
    with pytest.MonkeyPatch.context() as monkeypatch:
        again = look_at_start(monkeypatch)
        code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "2 steps after the checkpoint are rolled back" in text, text
    assert all(torch.equal(begun[n], again[n]) for n in begun)
    check_whole(tmp_path / "run", 6)


def test_rows_that_are_missing_are_said_of_the_step_that_the_run_goes_on_from(tmp_path: Path, capsys) -> None:
    recipe = runs.write(tmp_path, steps=5, checkpoint=CHECKPOINT)
    assert train(capsys, recipe, "--train.num_steps", "2")[0] == 0
    train_until(capsys, 4, recipe, "--resume")
    path = tmp_path / "run" / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:3]))
    code, text = train(capsys, recipe, "--resume")
    assert code == 2 and f"{path} has no row of step 4, from which this run continues" in text, text
    path.write_bytes(content)
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "(2 steps)" in text, text
    check_whole(tmp_path / "run", 5)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["in the journal", "in a checkpoint"])
def test_nobody_goes_on_after_another_prompt(tmp_path: Path, capsys, checkpointed: bool) -> None:
    """What a checkpoint holds has its prompt with it. The journal asks for it again, and knows it from another."""
    recipe = runs.write(tmp_path, steps=4, checkpoint=CHECKPOINT)
    if checkpointed:
        assert train(capsys, recipe, "--train.num_steps", "2")[0] == 0
    else:
        train_until(capsys, 2, recipe)
    code, text = train(capsys, recipe, "--resume", "--tasks.instruction", "Think hard")
    if not checkpointed:
        assert code == 2 and "and [tasks] now gives it with another prompt. Restore what makes them" in text, text
        assert train(capsys, recipe, "--resume")[0] == 0
    check_whole(tmp_path / "run", 4)
    kept = [r for r in runs.records(tmp_path / "run") if r["step"] > 2 and r["segments"][0]["policy_version"] < 2]
    assert kept and all("Think hard" not in str(r["messages"]) for r in kept)


def test_steps_are_not_trained_again_on_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint the weights before the first step come from model.path."""
    recipe = runs.write(tmp_path, steps=3, checkpoint=CHECKPOINT)
    train_until(capsys, 2, recipe)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    code, text = train(capsys, recipe, "--resume", "--model.path", tmp_path / "other")
    assert code == 0 and "2 steps after the checkpoint are rolled back, since model.path changed: " in text, text
    check_whole(tmp_path / "run", 3)


def train_until_second_ctrl_c(capsys: pytest.CaptureFixture[str], recipe: Path) -> dict[str, int]:
    """It ends the run in the middle of a decode step, once the journal has tokens of what runs: so many by rollout."""
    told: dict[str, int] = {}
    step, progress = EmbeddedEngine.step, EventLog.progress

    def step_or_end(engine: EmbeddedEngine) -> None:
        if told:
            raise KeyboardInterrupt
        step(engine)

    def telling(log: EventLog, found: dict[str, list[Segment]]) -> None:
        progress(log, found)
        told.update({i: sum(map(len, s)) for i, s in found.items() if sum(map(len, s))})

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EmbeddedEngine, "step", step_or_end)
        monkeypatch.setattr(EventLog, "progress", telling)
        assert train(capsys, recipe)[0] == 130
    return told


def test_a_second_ctrl_c_loses_no_more_than_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=2, checkpoint=CHECKPOINT | {"journal_s": 0.001})
    told = train_until_second_ctrl_c(capsys, recipe)
    code, text = train(capsys, recipe)
    assert code == 2 and "holds a run already: add --resume" in text, text
    begun: dict[str, int] = {}
    extend = EmbeddedEngine.extend

    async def looking(engine: EmbeddedEngine, request: ExtendRequest) -> list[Segment]:
        begun.setdefault(request.rollout_id, len(request.generated_ids))
        return await extend(engine, request)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EmbeddedEngine, "extend", looking)
        code, text = train(capsys, recipe, "--resume")
    assert code == 0, text
    assert told and told.items() <= begun.items()
    check_whole(tmp_path / "run", 2)


def test_what_was_trained_again_is_in_no_other_steps_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT)
    train_until(capsys, 5, recipe, before_row=True)
    assert train(capsys, recipe, "--resume")[0] == 0
    rows = runs.rows(tmp_path)
    for row in rows:
        assert (
            0
            < row["perf/train_flops"]
            < 3 * row["tokens/step_trained"] / rows[0]["tokens/step_trained"] * (rows[0]["perf/train_flops"])
        )
        assert row["time/train_s"] > 0 and row["perf/mfu_train"] > 0
    for before, row in zip(rows, rows[1:], strict=False):
        if row["step"] < 6:  # what the step after a kill is given was generated by two processes
            assert row["tokens/step_generated"] == row["tokens/generated"] - before["tokens/generated"]


@pytest.mark.parametrize("nonsense", [False, True])
def test_an_engine_that_does_not_say_how_far_it_is_ends_no_run(tmp_path, capsys, monkeypatch, nonsense: bool) -> None:
    async def answer(engine: EmbeddedEngine, rollout_ids: Iterable[str]) -> Any:
        if not nonsense:
            raise RuntimeError("I do not know")
        return dict.fromkeys(rollout_ids, [])

    monkeypatch.setattr(EmbeddedEngine, "progress", answer)
    recipe = runs.write(tmp_path, steps=3, checkpoint=CHECKPOINT | {"journal_s": 0.001})
    code, text = train(capsys, recipe)
    assert code == 0 and ("the engine fails at progress" in text) == (not nonsense), text
    check_whole(tmp_path / "run", 3)


def test_silent_engine_keeps_nothing_from_disk_and_mirror(tmp_path: Path, capsys, monkeypatch) -> None:
    async def hang(engine: EmbeddedEngine, rollout_ids: Iterable[str]) -> Any:
        await asyncio.Event().wait()

    beats: list[None] = []
    monkeypatch.setattr(EmbeddedEngine, "progress", hang)
    monkeypatch.setattr(Mirror, "beat", lambda mirror: beats.append(None))
    checkpoint = CHECKPOINT | {"journal_s": 0.001, "dir": f"memory://hang-{uuid.uuid4().hex}"}
    recipe = runs.write(tmp_path, steps=3, checkpoint=checkpoint, watchdog={"rollout_timeout_s": 0.0})
    code, text = train(capsys, recipe)
    assert code == 0 and "never retrieved" not in text, text
    assert len(beats) > 3
    check_whole(tmp_path / "run", 3, checkpoints=checkpoint["dir"])


def test_where_the_journal_cannot_be_ended_the_rest_is(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    close_journal, close_engine, close_mirror = Journal.close, EmbeddedEngine.close, Mirror.close

    def fails(self: Journal) -> None:
        close_journal(self)
        raise OSError(errno.EIO, "Input/output error")

    async def ends(self: EmbeddedEngine) -> None:
        await close_engine(self)
        ended.append("engine")

    def ends_mirror(self: Mirror) -> None:
        close_mirror(self)
        ended.append("mirror")

    monkeypatch.setattr(Journal, "close", fails)
    monkeypatch.setattr(EmbeddedEngine, "close", ends)
    monkeypatch.setattr(Mirror, "close", ends_mirror)
    elsewhere = CHECKPOINT | {"dir": f"memory://{uuid.uuid4().hex}"}
    code, text = train(capsys, runs.write(tmp_path, steps=1, checkpoint=elsewhere))
    assert code != 0 and "Input/output error" in text, text
    assert sorted(ended) == ["engine", "mirror"]

"""An error in the middle of a run leaves a checkpoint from which nothing is trained twice and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
from endings import train
from runs import check_whole

from rollover.trainer.local_backend import LocalBackend

OVERLAP = {"overlap": True, "interrupt": "on_weight_update"}
SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0}


@pytest.mark.parametrize("rollout", [{}, SYNC, OVERLAP], ids=["partial", "sync", "overlap"])
def test_a_failing_step_gives_its_groups_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any]
) -> None:
    recipe = runs.write(tmp_path, steps=4, rollout=rollout, checkpoint={"every_steps": 0})
    plain = LocalBackend.forward_backward

    def fails(self: LocalBackend, *args: Any, **options: Any) -> Any:
        if self.policy_version == 2:
            raise ValueError("no memory left on the device")
        return plain(self, *args, **options)

    monkeypatch.setattr(LocalBackend, "forward_backward", fails)
    code, text = train(capsys, recipe)
    assert code == 2 and "no memory left" in text and "writing a checkpoint before the run ends" in text, text
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.setattr(LocalBackend, "forward_backward", plain)
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "resumed from step-000002" in text, text
    check_whole(tmp_path / "run", 4)


def test_weights_that_cannot_be_handed_over_do_not_cost_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollover.engine.embedded.engine import EmbeddedEngine

    recipe = runs.write(tmp_path, steps=4, checkpoint={"every_steps": 0})
    plain = EmbeddedEngine.load_weights

    async def fails(self: EmbeddedEngine, version: int, tensors: Any) -> Any:
        if version == 2:
            raise ValueError("the engine is gone")
        return await plain(self, version, tensors)

    monkeypatch.setattr(EmbeddedEngine, "load_weights", fails)
    code, text = train(capsys, recipe)
    assert code == 2 and "the engine is gone" in text, text
    monkeypatch.setattr(EmbeddedEngine, "load_weights", plain)
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "resumed from step-000002" in text, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("rollout", [{}, OVERLAP], ids=["partial", "overlap"])
def test_an_engine_that_is_down_ends_the_run_with_a_checkpoint_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any]
) -> None:
    from rollover.engine.embedded.engine import EmbeddedEngine

    limits = {"max_failures": 3, "retry_s": 0.01}
    recipe = runs.write(tmp_path, steps=4, rollout=rollout, checkpoint={"every_steps": 0}, watchdog=limits)
    plain = EmbeddedEngine.step

    def fails(self: EmbeddedEngine) -> None:
        if self.oldest_version >= 2:  # not == 2: in a quick run the next weights may come before the third failure
            raise ConnectionError("connection refused")
        plain(self)

    monkeypatch.setattr(EmbeddedEngine, "step", fails)
    code, text = train(capsys, recipe)
    assert code == 2 and "the last error is: ConnectionError: connection refused. Go on with --resume" in text, text
    assert text.count("connection refused") == 2 and "Traceback" not in text, text
    monkeypatch.setattr(EmbeddedEngine, "step", plain)
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "resumed from step-00000" in text, text
    check_whole(tmp_path / "run", 4)
    assert runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["groups/dropped"] == 0


def test_weights_in_the_middle_of_a_step_are_not_saved_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = runs.write(tmp_path, steps=4, checkpoint={"every_steps": 1}, train={"minibatches_per_step": 3})
    plain = LocalBackend.optim_step

    def fails(self: LocalBackend, *args: Any, **options: Any) -> Any:
        updates = plain(self, *args, **options)
        if self.policy_version == 2 and not options["ends_step"]:
            raise ValueError("after the first of three updates")
        return updates

    monkeypatch.setattr(LocalBackend, "optim_step", fails)
    code, text = train(capsys, recipe)
    assert (
        code == 2
        and "the weights are in the middle of step 3): --resume goes on from step-000002 and its journal" in text
    ), text


def test_masks_that_leave_nothing_end_the_run_and_it_goes_on_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runs.write(tmp_path, steps=3, checkpoint={"every_steps": 0})
    assert train(capsys, recipe, "--train.num_steps", "1")[0] == 0
    masked = ["--filters.mask_overlong", "true", "--filters.overlong_tokens", "1"]
    code, text = train(capsys, recipe, "--resume", *masked)
    assert code == 2 and "each of the last 30 scored groups was dropped (in the whole run: all_masked " in text, text
    assert "filters.mask_overlong: false -> true" in text
    code, text = train(capsys, recipe, "--resume")
    assert code == 0, text
    check_whole(tmp_path / "run", 3)


def test_an_engine_process_that_is_killed_while_it_loads_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollover.engine.process.engine import EngineClient

    plain = EngineClient.hello

    def killed(self: EngineClient, *args: Any) -> Any:
        self.kill()  # as the kernel's OOM killer does
        return plain(self, *args)

    monkeypatch.setattr(EngineClient, "hello", killed)
    code, text = train(capsys, runs.write(tmp_path, engine={"kind": "process"}))
    assert code == 1 and "rollover: error: the engine process ended while it was loading the model" in text, text


@pytest.mark.parametrize("journal_s", [0, 5], ids=["without a journal", "with one"])
def test_what_was_recorded_for_a_checkpoint_that_failed_is_not_recorded_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, journal_s: int
) -> None:
    """Groups that were admitted and dropped since the checkpoint before come again, or are told by the journal."""
    from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError

    # Sync: at a checkpoint nothing is in flight, so that whatever is dropped after it was admitted after it.
    recipe = runs.write(tmp_path, steps=3, rollout=SYNC, checkpoint={"every_steps": 1, "journal_s": journal_s})
    filters = ["--filters.custom", f"{tmp_path / 'mine.py'}:odd"]
    (tmp_path / "mine.py").write_text('def odd(group): return "an odd one" if group.group_id % 2 else None')
    plain_step, plain_write = LocalBackend.forward_backward, CheckpointStore.write

    def fails(self: LocalBackend, *args: Any, **options: Any) -> Any:
        if self.policy_version == 2:
            raise ValueError("no memory left on the device")
        return plain_step(self, *args, **options)

    def full(self: CheckpointStore, name: str, *content: Any) -> Any:
        if name in self.list():
            raise CheckpointWriteError("the disk is full")
        return plain_write(self, name, *content)

    monkeypatch.setattr(LocalBackend, "forward_backward", fails)
    monkeypatch.setattr(CheckpointStore, "write", full)
    code, text = train(capsys, recipe, *filters)
    assert code == 2 and "could not be written (the disk is full): --resume goes on from step-000002" in text, text
    recorded = [r for r in runs.records(tmp_path / "run") if r["step"] == 2]
    monkeypatch.undo()
    code, text = train(capsys, recipe, *filters, "--resume")
    assert code == 0, text
    records = runs.records(tmp_path / "run")
    ids = [r["rollout_id"] for r in records]
    kept = [r for r in records if r["step"] == 2]
    assert len(kept) == len(recorded) if journal_s else len(kept) < len(recorded)
    assert len(ids) == len(set(ids))

"""What a run that failed or was killed leaves behind, and what goes on with it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import types
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import runs
import safetensors.torch
import torch
from endings import CHECKPOINT, before_step, end, look_at_start, train, train_until, weights
from reasoning_gym.arithmetic.chain_sum import ChainSumDataset
from runs import check_whole

import tiny
from rollover import cli
from rollover.checkpoint import journal as journal_module
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.run.loop import Run
from rollover.track.jsonl import JsonlSink
from rollover.track.trace import spans
from rollover.trainer.local_backend import LocalBackend

# A run that ended between two checkpoints: its steps are trained again bit by bit, or rolled back; damage is named


def test_steps_are_trained_again_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint, and before the row of the last one."""
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT)
    end = train_until(capsys, 4, recipe, before_row=True)
    rows = runs.rows(tmp_path)
    assert len(rows) == 3
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = look_at_start(monkeypatch)
        code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "(4 steps)" in text, text
    assert begun.keys() == end.weights.keys() and all(torch.equal(begun[n], end.weights[n]) for n in begun)
    assert runs.rows(tmp_path)[: len(rows)] == rows, "told rows are kept as they were"
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
    rows = runs.rows(tmp_path)
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
    cut = [row.get("journal/cut_bytes") for row in runs.rows(tmp_path)]
    assert cut == [0, 0, 33, 33]


def test_a_full_disk_ends_the_journal_until_the_next_checkpoint_and_not_the_run(tmp_path, capsys, monkeypatch) -> None:
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
    rows = runs.rows(tmp_path)
    assert [row["journal/failed"] for row in rows] == [1] * 5
    assert rows[2]["journal/bytes"] < rows[4]["journal/bytes"], "it goes on after the checkpoint of step 3"
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "resumed from step-000003 and " in text and "(2 steps)" in text, text
    check_whole(tmp_path / "run", 6)


def test_a_large_journal_brings_the_next_checkpoint_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=3, checkpoint=CHECKPOINT | {"every_steps": 0, "journal_max_gb": 1e-6})
    code, text = train(capsys, recipe)
    assert code == 0 and "checkpoint step-000001; " in text and "checkpoint step-000002; " in text, text
    rows = runs.rows(tmp_path)
    assert all(row["journal/bytes"] > 0 and row["journal/time_s"] > 0 for row in rows)


# What a resumed run says of the steps that it trained again, and of those that follow: their own figures, at the
# version that they had


def test_a_run_that_ended_while_it_handed_its_weights_over_has_told_that_they_are_live(tmp_path: Path, capsys) -> None:
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT)
    load_weights = EmbeddedEngine.load_weights

    async def load_or_end(engine: EmbeddedEngine, version: int, tensors: Any) -> Any:
        return end() if version == 4 else await load_weights(engine, version, tensors)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EmbeddedEngine, "load_weights", load_or_end)
        assert train(capsys, recipe)[0] == 130
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "(4 steps)" in text, text
    check_whole(tmp_path / "run", 6)


def test_an_age_is_counted_in_steps_of_the_trainer_whenever_its_weights_are_handed_over(tmp_path: Path, capsys) -> None:
    """Synchronous: what is generated for a step is trained in it, so it never waits in the queue."""
    rollout: dict[str, Any] = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 2, "max_new_tokens": 8}
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT, rollout=rollout, train={"publish_every": 3})
    train_until(capsys, 2, recipe)
    assert train(capsys, recipe, "--resume")[0] == 0
    rows = runs.rows(tmp_path)
    assert max(row["staleness/max"] for row in rows) > 0
    for row in rows:
        assert row["staleness/in_queue_mean"] == 0 and row["staleness/in_flight_mean"] == row["staleness/mean"]
    told = runs.trace(tmp_path / "run")
    assert [e.version for e in told if e.kind == "consume"] == [step for step in range(6) for _ in range(3)]


def test_which_task_is_given_again_is_not_decided_by_other_settings(tmp_path: Path, capsys) -> None:
    """With more steps re-rolls begin later; those that the journal has were given all the same."""
    reroll = {"max_groups": 2, "start_fraction": 0.25, "failed_at_most": 1.0}  # who is as good as its siblings
    recipe = runs.write(tmp_path, steps=8, checkpoint=CHECKPOINT, reroll=reroll, rollout={"max_new_tokens": 2})
    train_until(capsys, 6, recipe)
    given = [row["reroll/given"] for row in runs.rows(tmp_path)]
    assert given[-1] > 0
    code, text = train(capsys, recipe, "--resume", "--train.num_steps", "16")
    assert code == 0 and "(6 steps)" in text, text
    rows = runs.rows(tmp_path)
    assert len(rows) == 16 and [row["reroll/given"] for row in rows[:6]] == given


def test_a_task_that_failed_in_a_lost_step_is_given_again_once(tmp_path: Path, capsys) -> None:
    """Its group is trained twice, and its task was given again between the two already."""
    reroll = {"max_groups": 2, "start_fraction": 0.0, "failed_at_most": 1.0}
    rollout = {"max_new_tokens": 2, "max_staleness": 6, "in_flight_groups": 20}
    recipe = runs.write(tmp_path, steps=12, checkpoint=CHECKPOINT, reroll=reroll, rollout=rollout)
    train_until(capsys, 4, recipe)
    code, text = train(capsys, recipe, "--resume", "--checkpoint.lost_steps", "roll_back")
    assert code == 0 and "4 steps after the checkpoint are rolled back: " in text, text
    visits = {r["group_id"]: (r["task_id"], r["attempt"]) for r in runs.records(tmp_path / "run")}
    assert any(attempt for _, attempt in visits.values())
    assert len(set(visits.values())) == len(visits), "two groups have the same draws"


def test_what_the_journal_waits_for_is_in_its_time(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is on the disk before the journal says so."""
    sync = JsonlSink.sync

    def slow(sink: JsonlSink) -> None:
        time.sleep(0.05)
        sync(sink)

    monkeypatch.setattr(JsonlSink, "sync", slow)
    recipe = runs.write(tmp_path, steps=3, checkpoint=CHECKPOINT)
    assert train(capsys, recipe)[0] == 0
    rows = runs.rows(tmp_path)
    assert all(0.05 <= row["journal/time_s"] <= row["time/step_s"] for row in rows[1:])


def test_a_step_that_is_trained_again_has_no_length_in_the_trace(tmp_path: Path, capsys) -> None:
    """The clock stands while the journal is read: how long that training took is in the step's row alone."""
    recipe = runs.write(tmp_path, steps=4, checkpoint=CHECKPOINT)
    train_until(capsys, 2, recipe, before_row=True)
    assert train(capsys, recipe, "--resume")[0] == 0
    told = spans(runs.trace(tmp_path / "run"))
    assert all(span.end > span.start for span in told)
    assert [span.version for span in told if span.name == "train"] == [0, 2, 3]


# An error in the middle of a run leaves a checkpoint from which nothing is trained twice and nothing is lost


OVERLAP = {"overlap": True, "interrupt": "on_weight_update"}
SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0}


@pytest.mark.parametrize("rollout", [{}, OVERLAP], ids=["partial", "overlap"])
def test_a_failing_step_gives_its_groups_back(tmp_path: Path, capsys, monkeypatch, rollout: dict[str, Any]) -> None:
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


def test_weights_that_cannot_be_handed_over_do_not_cost_the_step(tmp_path: Path, capsys, monkeypatch) -> None:
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
    rows = runs.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_an_engine_that_is_down_ends_the_run_with_a_checkpoint_and_loses_nothing(tmp_path, capsys, monkeypatch) -> None:
    from rollover.engine.embedded.engine import EmbeddedEngine

    limits = {"max_failures": 3, "retry_s": 0.01}
    recipe = runs.write(tmp_path, steps=4, rollout=OVERLAP, checkpoint={"every_steps": 0}, watchdog=limits)
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
    assert runs.rows(tmp_path)[-1]["groups/dropped"] == 0


def test_weights_in_the_middle_of_a_step_are_not_saved_and_that_is_said(tmp_path: Path, capsys, monkeypatch) -> None:
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
        and "the weights are in the middle of step 3): --resume continues from step-000002 and its journal" in text
    ), text


def test_an_engine_process_that_is_killed_while_it_loads_is_told_in_one_line(tmp_path, capsys, monkeypatch) -> None:
    from rollover.engine.process.engine import EngineClient

    plain = EngineClient.hello

    def killed(self: EngineClient, *args: Any) -> Any:
        self.kill()  # as the kernel's OOM killer does
        return plain(self, *args)

    monkeypatch.setattr(EngineClient, "hello", killed)
    code, text = train(capsys, runs.write(tmp_path, engine={"kind": "process"}))
    assert code == 1 and "rollover: error: the engine process ended while it was loading the model" in text, text


@pytest.mark.parametrize("journal_s", [0, 5], ids=["without a journal", "with one"])
def test_records_of_a_failed_checkpoint_are_not_doubled(tmp_path: Path, capsys, monkeypatch, journal_s: int) -> None:
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
    assert code == 2 and "could not be written (the disk is full): --resume continues from step-000002" in text, text
    recorded = [r for r in runs.records(tmp_path / "run") if r["step"] == 2]
    monkeypatch.undo()
    code, text = train(capsys, recipe, *filters, "--resume")
    assert code == 0, text
    records = runs.records(tmp_path / "run")
    ids = [r["rollout_id"] for r in records]
    kept = [r for r in records if r["step"] == 2]
    assert len(kept) == len(recorded) if journal_s else len(kept) < len(recorded)
    assert len(ids) == len(set(ids))


def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = runs.write(tmp_path, steps=2, checkpoint={"every_steps": 1})
    assert train(capsys, recipe, "--train.num_steps", "1")[0] == 0
    plain = safetensors.torch.save_file

    def full(tensors: dict, path: str) -> None:
        if "trainer-exp_avg" in path:
            raise OSError(28, "No space left on device")
        plain(tensors, path)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", full)
        code, error = train(capsys, recipe, "--resume", "--train.num_steps", "3")
    assert code == 1 and "No space left" in error and "step-000002" in error
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step-000001"]
    code, error = train(capsys, recipe, "--resume", "--train.num_steps", "3")
    assert code == 0, error


# What a run directory allows: no run is overwritten, an early end begins again, another configuration is checked


EVAL = {"num_tasks": 4, "samples_per_task": 1}


def steps(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [row["step"] for row in runs.json_lines(folder / "run" / name)]


def test_resuming_where_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = train(capsys, runs.write(tmp_path), "--resume")
    assert code == 2 and "holds no run" in text and not (tmp_path / "run").exists()


def test_another_runs_checkpoints_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"dir": str(tmp_path / "shared"), "every_steps": 1}
    recipe = runs.write(tmp_path, steps=1, checkpoint=shared)
    assert train(capsys, recipe)[0] == 0
    code, text = train(capsys, recipe, "--run.dir", tmp_path / "second")
    assert code == 2 and "checkpoint.dir" in text and "step-000001" in text


def test_counters_and_summary_cover_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=6, eval=EVAL)
    assert train(capsys, recipe, "--train.num_steps", "3")[0] == 0
    code, text = train(capsys, recipe, "--resume")
    assert code == 0 and "6 steps" in text
    rows = runs.rows(tmp_path)
    decoded = [row["engine/decode_steps"] for row in rows]
    assert decoded == sorted(decoded) and decoded[3] > decoded[2]
    assert steps(tmp_path, "eval.jsonl") == [0, 3, 6]
    partial = sum(row["rollouts/partial_share"] for row in rows) / len(rows)
    assert f"{partial:.0%}" in text
    before = (tmp_path / "run" / "eval.jsonl").read_bytes()
    assert train(capsys, recipe, "--resume")[0] == 0, "a finished run"
    assert (tmp_path / "run" / "eval.jsonl").read_bytes() == before, "is not evaluated again"


def test_held_rollouts_must_suit_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=2, rollout={"max_new_tokens": 48})
    assert train(capsys, recipe)[0] == 0
    more = ["--resume", "--train.num_steps", "3"]
    code, text = train(capsys, recipe, *more, "--engine.kv_memory_gb", "0.00005")
    assert code == 2 and "(and engine.kv_memory_gb) back" in text, text
    code, text = train(capsys, recipe, *more)
    assert code == 0 and steps(tmp_path) == [1, 2, 3], "the refusal changed the run"


def test_stale_rollouts_are_dropped_after_a_restart_under_drop(tmp_path: Path, capsys) -> None:
    recipe = runs.write(tmp_path, steps=2, rollout={"in_flight_groups": 9})
    assert train(capsys, recipe)[0] == 0
    words = ["--rollout.on_stale", "drop", "--rollout.max_staleness", "1"]
    code, text = train(capsys, recipe, "--resume", "--train.num_steps", "5", *words)
    assert code == 0, text
    rows = runs.rows(tmp_path)
    assert all(row["staleness/max"] <= 1 for row in rows[2:])
    dropped = {r["group_id"] for r in runs.records(tmp_path / "run") if r["outcome"] == "dropped:stale"}
    assert len(dropped) == rows[-1].get("dropped/stale/groups", 0) == rows[-1]["groups/dropped"]


def test_an_evaluation_that_fails_after_training_does_not_lose_the_run(tmp_path: Path, capsys, monkeypatch) -> None:
    from rollover.run import evaluate

    recipe = runs.write(tmp_path, steps=2, eval=EVAL)
    plain, calls = evaluate.answer_tasks, 0

    async def second_fails(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("every reward of the evaluation failed")
        return await plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate, "answer_tasks", second_fails)
    code, text = train(capsys, recipe)
    assert code == 0 and "the evaluation after 2 steps failed" in text
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-000002").exists()


def test_replay_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constant = ["--train.schedule", "constant"]
    recipe = runs.write(tmp_path, steps=4)
    assert train(capsys, recipe, *constant)[0] == 0
    replay = ["--run.train_on_recorded", str(tmp_path / "run" / "rollouts"), "--run.dir", str(tmp_path / "cut")]
    for words in (["--train.num_steps", "2"], ["--train.num_steps", "9", "--resume"]):
        code, text = train(capsys, recipe, *constant, *replay, *words)
        assert code == 0, text
    assert "recorded rollouts are used up after 4 of 9" in text
    rows = [runs.json_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "cut")]
    assert [r["loss"] for r in rows[0]] == [r["loss"] for r in rows[1]]


def test_a_run_goes_on_where_a_generator_fails_now_and_then(tmp_path: Path, capsys, monkeypatch) -> None:
    recipe = runs.write(tmp_path, steps=2, checkpoint={"every_steps": 0})
    plain = ChainSumDataset.__getitem__

    def fails(self: ChainSumDataset, idx: int) -> dict:
        if idx % 2:
            raise RuntimeError("no sum found")
        return plain(self, idx)

    monkeypatch.setattr(ChainSumDataset, "__getitem__", fails)
    rows = recipe.read_text().partition("[[tasks.sources]]")[0]
    recipe.write_text(f'{rows}[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n')
    assert cli.main(["train", str(recipe), "--eval.num_tasks", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "problems beside these could not be made" in said
    assert "/1: the generator chain_sum with {} raised RuntimeError: no sum found: it is left out" in said
    failed = [row["tasks/failed"] for row in runs.rows(tmp_path)]
    assert 0 < failed[0] < failed[1]


# A run with remote checkpoints whose machine is lost: another goes on, with its steps, rows, tokens and journal


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
def test_another_machine_goes_on(tmp_path: Path, capsys, remote: str, first: int) -> None:
    """Nothing more reaches the store once step 3 is told, though the run goes on for a step."""
    recipe = runs.write(tmp_path, steps=6, checkpoint=RARELY | {"dir": remote})
    assert not first or train(capsys, recipe, "--train.num_steps", str(first))[0] == 0
    reached: dict[str, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:

        def cut_off(run: Run, version: int) -> None:
            if version == 3:
                assert run.directory.mirror is not None
                run.directory.mirror.copy()
                reached.update(weights(run))
                refuse(monkeypatch, "/run/")

        before_step(monkeypatch, cut_off)
        text = train_until(capsys, 4, recipe, *["--resume"] * bool(first)).text
    assert text.count("cannot be copied to ") == 1 and "no route to host" in text, text
    rows = runs.rows(tmp_path)
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


def test_a_run_whose_files_cannot_be_copied_goes_on(tmp_path: Path, capsys, remote: str, monkeypatch) -> None:
    refuse(monkeypatch, "/run/")
    code, text = train(capsys, runs.write(tmp_path, steps=3, checkpoint=RARELY | {"dir": remote, "every_steps": 1}))
    assert code == 0 and text.count("cannot be copied to ") == 1, text
    rows = runs.rows(tmp_path)
    assert rows[-1]["mirror/failed"] >= 2, "at least at the two checkpoints before"


# A run directory that an earlier version left, in the golden folder, goes on: its checkpoint, its files


GOLDEN = Path(__file__).parents[1] / "golden" / "run-format-1"
# What it was trained with, to step 2 of 4; then its checkpoint held 5 groups, and 2 were kept to be replayed.
SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
SETTINGS = dict(
    checkpoint={"every_steps": 2, "keep": 1, "save_final_model": False},
    algorithm={"correction": "token_truncate"},
    rollout={"max_new_tokens": 48},
    replay={"size": 2, "max_staleness": 4},
    reroll={"max_groups": 1, "start_fraction": 0.0, "failed_at_most": 0.0},
    eval={"num_tasks": 0},
)


def write(steps: int) -> Path:
    """The recipe, in the current folder, where it was trained, too: its paths are relative."""
    tiny.save(Path("model"), num_key_value_heads=1, **SMALL)
    return runs.write(Path(), steps=steps, **SETTINGS)


def test_it_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "run")
    state = json.loads((GOLDEN / "checkpoints" / "step-000002" / "state.json").read_text())
    held = {g["group_id"]: [r["state"] for r in g["rollouts"]] for g in state["cache"]["groups"]}
    assert any("parked" in states for states in held.values()) and state["reuse"]["buffer"]["groups"]
    code, text = train(capsys, write(steps=4), "--resume")
    assert code == 0 and "resumed from step-000002" in text, text
    check_whole(tmp_path / "run", 4)
    left = {r["group_id"] for r in runs.records(tmp_path / "run")}
    assert held.keys() <= left, "what it held was trained"

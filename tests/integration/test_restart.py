"""What a run directory allows: no run is overwritten, an early end begins again, another configuration is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs

from rollover import cli

EVAL = {"num_tasks": 4, "samples_per_task": 1}


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """(exit code, everything printed)."""
    code = cli.main([str(w) for w in words])
    out = capsys.readouterr()
    assert "Traceback" not in out.err, out.err
    return code, out.out + out.err


def steps(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [row["step"] for row in runs.json_lines(folder / "run" / name)]


def test_resuming_where_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "train", runs.write(tmp_path), "--resume")
    assert code == 2 and "holds no run" in text and not (tmp_path / "run").exists()


def test_another_runs_checkpoints_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"dir": str(tmp_path / "shared"), "every_steps": 1}
    recipe = runs.write(tmp_path, steps=1, checkpoint=shared)
    assert run(capsys, "train", recipe)[0] == 0
    code, text = run(capsys, "train", recipe, "--run.dir", tmp_path / "second")
    assert code == 2 and "checkpoint.dir" in text and "step-000001" in text


def test_counters_and_summary_cover_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=6, eval=EVAL)
    assert run(capsys, "train", recipe, "--train.num_steps", "3")[0] == 0
    code, text = run(capsys, "train", recipe, "--resume")
    assert code == 0 and "6 steps" in text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    decoded = [row["engine/decode_steps"] for row in rows]
    assert decoded == sorted(decoded) and decoded[3] > decoded[2]
    assert steps(tmp_path, "eval.jsonl") == [0, 3, 6]
    partial = sum(row["rollouts/partial_share"] for row in rows) / len(rows)
    assert f"{partial:.0%}" in text
    before = (tmp_path / "run" / "eval.jsonl").read_bytes()
    assert run(capsys, "train", recipe, "--resume")[0] == 0, "a finished run"
    assert (tmp_path / "run" / "eval.jsonl").read_bytes() == before, "is not evaluated again"


def test_held_rollouts_must_suit_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=2, rollout={"max_new_tokens": 48})
    assert run(capsys, "train", recipe)[0] == 0
    more = ["--resume", "--train.num_steps", "3"]
    code, text = run(capsys, "train", recipe, *more, "--engine.kv_memory_gb", "0.00005")
    assert code == 2 and "(and engine.kv_memory_gb) back" in text, text
    code, text = run(capsys, "train", recipe, *more)
    assert code == 0 and steps(tmp_path) == [1, 2, 3], "the refusal changed the run"


def test_stale_rollouts_are_dropped_after_a_restart_under_drop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runs.write(tmp_path, steps=2, rollout={"in_flight_groups": 9})
    assert run(capsys, "train", recipe)[0] == 0
    words = ["--rollout.on_stale", "drop", "--rollout.max_staleness", "1"]
    code, text = run(capsys, "train", recipe, "--resume", "--train.num_steps", "5", *words)
    assert code == 0, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(row["staleness/max"] <= 1 for row in rows[2:])
    dropped = {r["group_id"] for r in runs.records(tmp_path / "run") if r["outcome"] == "dropped:stale"}
    assert len(dropped) == rows[-1].get("dropped/stale/groups", 0) == rows[-1]["groups/dropped"]


def test_an_evaluation_that_fails_after_training_does_not_lose_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    code, text = run(capsys, "train", recipe)
    assert code == 0 and "the evaluation after 2 steps failed" in text
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-000002").exists()


def test_replay_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constant = ["--train.schedule", "constant"]
    recipe = runs.write(tmp_path, steps=4)
    assert run(capsys, "train", recipe, *constant)[0] == 0
    replay = ["--run.train_on_recorded", str(tmp_path / "run" / "rollouts"), "--run.dir", str(tmp_path / "cut")]
    for words in (["--train.num_steps", "2"], ["--train.num_steps", "9", "--resume"]):
        code, text = run(capsys, "train", recipe, *constant, *replay, *words)
        assert code == 0, text
    assert "recorded rollouts are used up after 4 of 9" in text
    rows = [runs.json_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "cut")]
    assert [r["loss"] for r in rows[0]] == [r["loss"] for r in rows[1]]

"""What a resumed run says of the steps that it trained again, and of those that follow: their own figures, at the
version that they had."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import runs
from endings import CHECKPOINT, end, train, train_until
from runs import check_whole

from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.track.jsonl import JsonlSink
from rollover.track.trace import spans


def test_a_run_that_ended_while_it_handed_its_weights_over_has_told_that_they_are_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize("ended", [False, True], ids=["in one go", "in two"])
def test_an_age_is_counted_in_steps_of_the_trainer_whenever_its_weights_are_handed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    """Synchronous: what is generated for a step is trained in it, so it never waits in the queue."""
    rollout: dict[str, Any] = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 2, "max_new_tokens": 8}
    recipe = runs.write(tmp_path, steps=6, checkpoint=CHECKPOINT, rollout=rollout, train={"publish_every": 3})
    if ended:
        train_until(capsys, 2, recipe)
    assert train(capsys, recipe, *(["--resume"] if ended else []))[0] == 0
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(row["staleness/max"] for row in rows) > 0
    for row in rows:
        assert row["staleness/in_queue_mean"] == 0 and row["staleness/in_flight_mean"] == row["staleness/mean"]
    told = runs.trace(tmp_path / "run")
    assert [e.version for e in told if e.kind == "consume"] == [step for step in range(6) for _ in range(3)]


def test_which_task_is_given_again_is_not_decided_by_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With more steps re-rolls begin later; those that the journal has were given all the same."""
    reroll = {"max_groups": 2, "start_fraction": 0.25, "failed_at_most": 1.0}  # who is as good as its siblings
    recipe = runs.write(tmp_path, steps=8, checkpoint=CHECKPOINT, reroll=reroll, rollout={"max_new_tokens": 2})
    train_until(capsys, 6, recipe)
    given = [row["reroll/given"] for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert given[-1] > 0
    code, text = train(capsys, recipe, "--resume", "--train.num_steps", "16")
    assert code == 0 and "(6 steps)" in text, text
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 16 and [row["reroll/given"] for row in rows[:6]] == given


def test_a_task_that_failed_in_a_lost_step_is_given_again_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_the_journal_waits_for_is_in_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is on the disk before the journal says so."""
    sync = JsonlSink.sync

    def slow(sink: JsonlSink) -> None:
        time.sleep(0.05)
        sync(sink)

    monkeypatch.setattr(JsonlSink, "sync", slow)
    recipe = runs.write(tmp_path, steps=3, checkpoint=CHECKPOINT)
    assert train(capsys, recipe)[0] == 0
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(0.05 <= row["journal/time_s"] <= row["time/step_s"] for row in rows[1:])


def test_a_step_that_is_trained_again_has_no_length_in_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock stands while the journal is read: how long that training took is in the step's row alone."""
    recipe = runs.write(tmp_path, steps=4, checkpoint=CHECKPOINT)
    train_until(capsys, 2, recipe, before_row=True)
    assert train(capsys, recipe, "--resume")[0] == 0
    told = spans(runs.trace(tmp_path / "run"))
    assert all(span.end > span.start for span in told)
    assert [span.version for span in told if span.name == "train"] == [0, 2, 3]

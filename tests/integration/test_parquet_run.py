"""A run that writes both formats is ended and goes on: the tables say what the lines say, and nothing twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import runs
from endings import CHECKPOINT, train, train_until

from rollover.track.records import read_records

parquet = pytest.importorskip("pyarrow.parquet")


def test_tables_say_what_lines_say_also_after_lost_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=5, checkpoint=CHECKPOINT, track={"format": ["jsonl", "parquet"]})
    train_until(capsys, 3, recipe)
    run = tmp_path / "run"
    code, text = train(capsys, recipe, "--resume", "--checkpoint.lost_steps", "roll_back")
    assert code == 0 and "are rolled back: " in text, text
    lines = runs.json_lines(run / "metrics.jsonl")
    table = parquet.read_table(run / "metrics.parquet").to_pylist()
    assert [row["step"] for row in table] == [row["step"] for row in lines]
    for row, of_table in zip(lines, table, strict=True):
        assert {k: v for k, v in row.items() if v is not None} == {k: v for k, v in of_table.items() if v is not None}
    tables = list(read_records(run / "rollouts"))
    assert [r["rollout_id"] for r in tables] == [r["rollout_id"] for r in runs.records(run)]
    assert max(Counter(r["rollout_id"] for r in tables).values()) == 1

"""verl's data.reward_fn_key: another column than data_source chooses the reward of a task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

from rollover import cli

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 100, "of_sums": float(data_source == "sums")}
"""
SCRIPT = """python3 -m verl.trainer.main_ppo data.train_files={folder}/rows.jsonl data.reward_fn_key=kind \\
    data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=2 \\
    data.max_response_length=8 actor_rollout_ref.model.path={folder}/model \\
    custom_reward_function.path={folder}/mine.py trainer.total_training_steps=2 trainer.save_freq=-1 \\
    trainer.test_freq=-1 trainer.val_before_train=False
"""


def test_a_converted_script_with_another_column_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(tmp_path)  # the toy model
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + 1"}], "kind": "sums" if i % 2 else "others",
         "reward_model": {"ground_truth": str(i + 1)}}
        for i in range(16)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(folder=tmp_path))
    assert cli.main(["convert", str(script)]) == 0, capsys.readouterr().err
    converted = tmp_path / "mine.toml"
    converted.write_text(capsys.readouterr().out)
    assert 'data_source_column = "kind"' in converted.read_text()
    assert cli.main(["train", str(converted), "--run.dir", str(tmp_path / "run")]) == 0
    records = runs.records(tmp_path / "run")
    assert len(records) == 16
    for record in records:
        is_sum = int(record["task_id"].rsplit("/", 1)[1]) % 2
        assert record["extras"]["of_sums"] == float(is_sum)


def test_a_column_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path)
    assert cli.main(["train", str(recipe), "--tasks.sources.0.data_source_column", "kind"]) == 2
    assert "has no data_source column 'kind'; its columns are prompt, answer" in capsys.readouterr().err


def test_a_row_without_a_value_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, rows=0)
    rows = [{"prompt": f"count to {i}", "answer": str(i), "kind": None if i == 3 else "sums"} for i in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["train", str(recipe), "--tasks.sources.0.data_source_column", "kind"]) == 2
    said = capsys.readouterr().err
    assert "column 'kind' is empty, and chooses the reward: fill it" in said and "tasks.jsonl" in said

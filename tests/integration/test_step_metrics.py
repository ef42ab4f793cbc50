"""Metrics of a step that verl's users look for: times of its parts, prompts, advantages, batches drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import runs

from rollover import cli

PARTS = ("time/logprobs_s", "time/reference_s", "time/values_s", "time/update_s")


def rows_of(folder: Path, **tables: object) -> list[dict[str, float]]:
    recipe = runs.write(folder, steps=3, **tables)  # type: ignore[arg-type]
    assert cli.main(["train", str(recipe)]) == 0
    return runs.json_lines(folder / "run" / "metrics.jsonl")


def test_the_parts_of_a_ppo_step_are_timed(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        algorithm={"advantage": "gae", "kl_coef": 0.01, "kl_in": "loss"},
        train={"epochs_per_step": 2},
    )
    for row in rows:
        assert all(row[part] > 0 for part in PARTS)
        assert sum(row[part] for part in PARTS) <= row["time/train_s"]
        assert 0 < row["time/critic_s"] < row["time/update_s"]
        assert "time/teacher_s" not in row


def test_the_passes_of_a_kl_in_the_reward_are_timed(tmp_path: Path) -> None:
    for row in rows_of(tmp_path, algorithm={"kl_coef": 0.01, "kl_in": "reward"}):
        parts = ("time/logprobs_s", "time/reference_s", "time/update_s")
        assert all(row[part] > 0 for part in parts)
        assert sum(row[part] for part in parts) <= row["time/train_s"]


def test_prompts_answers_advantages_and_batches(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, filters={"zero_variance": True})
    records = runs.records(tmp_path / "run")
    for row in rows:
        assert row["time/update_s"] > 0, "what a step does not do has no time"
        assert not {"time/reference_s", "time/values_s", "time/critic_s"} & row.keys()
        trained = [r for r in records if r["step"] == row["step"] and r["outcome"] == "trained"]
        prompts = [len(r["prompt_ids"]) for r in trained if r["prompt_ids"]]  # the first of a group has it
        assert [row[f"length/prompt_{name}"] for name in ("min", "max")] == [min(prompts), max(prompts)]
        assert np.isclose(row["length/prompt_mean"], np.mean(prompts))
        assert row["length/min"] <= row["length/mean"] <= row["length/max"]
        assert row["advantage/min"] < 0 < row["advantage/max"] and row["advantage/std"] > 0
        assert row["advantage/min"] <= row["advantage/mean"] <= row["advantage/max"]
    drawn = sum(row["groups/batches_drawn"] for row in rows) * 3  # groups a step
    assert np.isclose(drawn, rows[-1]["groups/admitted"])

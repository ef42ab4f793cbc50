"""Each preset trains over the quickstart recipe; what only some of them need is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

import tiny
from rollover.cli import main
from rollover.config.presets import PRESETS

QUICKSTART = runs.REPOSITORY / "configs" / "quickstart.toml"
TWO_REWARDS = """
def reward(prompts, completions, **columns):
    out = []
    for text in completions:
        out.append({"score": sum(c.isdigit() for c in text) / 16, "short": 1.0 - len(text) / 16})
    return out
"""
SMALL = {
    "model.dtype": "float32", "run.threads": "1", "train.num_steps": "3", "train.learning_rate": "1e-3",
    "rollout.groups_per_step": "3", "rollout.group_size": "3", "rollout.in_flight_groups": "6",
    "rollout.max_new_tokens": "16", "rewards.overlong_buffer_tokens": "0", "filters.mask_truncated": "false",
    "eval.num_tasks": "0",
    "engine.kv_memory_gb": "0.1", "track.live": "plain",
    "tasks.answer_rule": "full_text", "checkpoint.save_final_model": "false",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


def train(folder: Path, model: Path, **options: str) -> list[dict[str, float]]:
    """The rows of `rollover train configs/quickstart.toml --option value ...`."""
    reward = folder / "reward.py"
    reward.write_text(TWO_REWARDS)
    values = SMALL | {"model.path": str(model), "run.dir": str(folder / "run"), "rewards.function": f"{reward}:reward"}
    words = [w for key, value in (values | options).items() for w in (f"--{key}", value)]
    assert main(["train", str(QUICKSTART), *words]) == 0
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "sft"])  # of examples: test_sft_run.py
def test_every_preset_trains_over_the_quickstart_recipe(tmp_path: Path, model: Path, preset: str) -> None:
    options = {"algorithm.preset": preset}
    if preset == "gdpo":
        options["algorithm.reward_weights"] = "{ score = 1.0, short = 0.5 }"
    rows = train(tmp_path, model, **options)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert any(row["grad_norm"] > 0 for row in rows) and not any(row["train/skipped_steps"] for row in rows)
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert ("critic/loss" in row) == (preset == "ppo")
    # A greedy rollout of each task is generated, compared with and not trained.
    assert (rows[-1]["dropped/baseline/tokens"] > 0) == (preset == "remax")


@pytest.mark.parametrize("advantage", ["optimal_token_baseline", "reinforce_plus_plus_tokens"])
def test_estimators_over_tokens_train_with_weights_of_tokens(tmp_path: Path, model: Path, advantage: str) -> None:
    options = {"algorithm.advantage": advantage, "algorithm.top_entropy_share": "0.5"}
    rows = train(tmp_path, model, **options, **{"algorithm.correction_normalize": "true"})
    assert [row["step"] for row in rows] == [1, 2, 3] and any(row["grad_norm"] > 0 for row in rows)
    assert all(0.5 < row["importance/normalizer"] < 2 for row in rows)

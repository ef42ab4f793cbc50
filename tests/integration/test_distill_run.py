"""Distillation through the configuration: without a usable reward, and over a refused resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs

import tiny
from rollover import cli
from rollover.track.metrics import validate

# No reward that could teach: half are missing, the others equal.
OWN = """
def reward(prompts, completions, **columns):
    return [0.0 if i % 2 else None for i in range(len(completions))]

def told(task, messages):
    return [{"role": "system", "content": "The answer is " + "0123456789" * 3}, *messages]
"""
SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0, "max_new_tokens": 12}
REFRESHED = {"teacher": "policy", "refresh_steps": 3, "discount": 0.5}


def write(folder: Path, rollout: dict[str, Any], distill: dict[str, Any], steps: int = 7, **tables: Any) -> Path:
    recipe = runs.write(folder, steps=steps, rollout=rollout, distill=distill, rewards={"num_workers": 1}, **tables)
    (folder / "reward.py").write_text(OWN)
    return recipe


def told(folder: Path) -> str:
    return f"{folder / 'reward.py'}:told"


def rows(folder: Path) -> list[dict[str, Any]]:
    return runs.json_lines(folder / "run" / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert cli.main(["train", str(write(folder, SYNC, REFRESHED | {"privileged": told(folder)}))]) == 0
    return folder


def test_groups_without_a_reward_that_teaches_are_trained(whole: Path) -> None:
    assert [row["step"] for row in rows(whole)] == list(range(1, 8))
    for row in rows(whole):
        validate(row)
        assert row["groups/dropped"] == 0 and row["tokens/step_trained"] == row["tokens/step_generated"]
        assert row["reward/missing"] == 6 and row["grad_norm"] > 0 and row["train/zero_advantage_tokens"] == 0
        assert 0 < row["time/teacher_s"] < row["time/train_s"]
    kl = [row["distill/kl"] for row in rows(whole)]
    assert kl[0] > 0.01 and kl[-1] < kl[0], "the policy comes near its teacher"


@pytest.mark.parametrize(
    "mode",
    [
        {"train": {"streaming_min_groups": 1}},
        {"rollout": {"overlap": True, "in_flight_groups": 6, "interrupt": "on_weight_update", "max_staleness": 2}},
        {"algorithm": {"rejection": {"token_k3": 0.1}, "loss": "gspo"}, "train": {"minibatches_per_step": 3}},
        {"rollout": {"max_staleness": 0, "on_stale": "mask"}, "model": {"lora": {"rank": 2}}},
    ],
    ids=["streaming", "overlap", "rejection", "masked, LoRA"],
)
def test_another_model_teaches_in_every_mode(mode: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Partial rollouts, stale tokens and all: and the reports are of what was trained."""
    tiny.save(tmp_path / "teacher", seed=3)
    lora = mode.get("model", {}).pop("lora", None)
    words = [f"--model.lora.rank={lora['rank']}"] if lora else []
    tables = {name: values for name, values in mode.items() if name != "rollout"}
    recipe = write(tmp_path, mode.get("rollout", {}), {"teacher": str(tmp_path / "teacher")}, steps=4, **tables)
    assert cli.main(["train", str(recipe), *words]) == 0
    for row in rows(tmp_path):
        validate(row)
        # An estimate over sampled tokens, some of them of older weights: it may be a little below 0.
        assert row["grad_norm"] > 0 and row["distill/kl"] != 0


def test_a_checkpoint_without_the_weights_of_a_teacher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tmp_path, SYNC, {"teacher": "policy", "privileged": told(tmp_path)}, steps=2)
    assert cli.main(["train", str(recipe)]) == 0
    capsys.readouterr()
    more = ["--resume", "--train.num_steps", "3"]
    assert cli.main(["train", str(recipe), *more, "--distill.refresh_steps", "4"]) == 2
    assert "distill.refresh_steps > 1: the checkpoint holds no such weights" in capsys.readouterr().err
    assert cli.main(["train", str(recipe), *more, "--distill.coef", "0.5"]) == 0
    resolved = json.loads((tmp_path / "run" / "config.resolved.json").read_text())
    assert resolved["distill"]["coef"] == 0.5 and len(rows(tmp_path)) == 3

"""SIGKILL between two checkpoints in every mode with a state of its own: nothing of it is lost, or counted twice."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from test_journal_run import check_whole
from test_replay import BOTH, SYNC, same_weights, weights, write

from rollover import cli

KILLED_AT = Path(__file__).with_name("killed_at.py")
RARELY: dict[str, Any] = {"checkpoint": {"every_steps": 50, "journal_s": 0.05}}
EACH = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float("7" in solution_str)
"""
ALWAYS_BUSY = {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 9, "max_staleness": 2}
LORA = {"model.lora": {"rank": 4}}
STREAMING = {"train": {"streaming_min_groups": 1}}
PROCESS = {"engine": {"kind": "process"}}


def recipe(folder: Path, rollout: dict[str, Any], **tables: Any) -> Path:
    if "train" in tables:  # streaming: a rollout is scored as it stops
        tables |= {"rewards": {"function": f"{folder / 'each.py'}:compute_score"}}
    file = write(folder, rollout, steps=8, **RARELY, **tables)
    (folder / "each.py").write_text(EACH)
    return file


def kill(file: Path, place: str, count: int, *words: str) -> None:
    """SIGKILL before the call number `count` of a method."""
    killed = runs.rollover(place, count, "train", file, *words, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.parametrize(
    "tables",
    [BOTH, LORA, PROCESS],
    ids=["reroll and replay", "lora", "engine in a process"],
)
def test_killed_before_a_step_a_synchronous_run_trains_the_same_model(tmp_path: Path, tables: dict[str, Any]) -> None:
    assert cli.main(["train", str(recipe(tmp_path / "whole", SYNC, **tables))]) == 0
    file = recipe(tmp_path / "killed", SYNC, **tables)
    kill(file, "rollover.trainer.trainer:Trainer.train_step", 6)
    assert cli.main(["train", str(file), "--resume"]) == 0
    check_whole(tmp_path / "killed" / "run", 8, tasks_once="reroll" not in tables)
    ours, theirs = (runs.json_lines(tmp_path / name / "run" / "metrics.jsonl") for name in ("killed", "whole"))
    counters = ("generated", "trained", "dropped", "held")
    of_state = (
        *(f"tokens/{name}" for name in counters),
        "replay/",
        "reroll/",
        "groups/",
        "reward/mean",
        "loss",
        "grad_norm",
    )
    for one, other in zip(ours, theirs, strict=True):
        mine, same = ({k: v for k, v in row.items() if k.startswith(of_state)} for row in (one, other))
        assert mine == pytest.approx(same, rel=1e-4, abs=1e-6)
    if "replay" in tables:
        assert ours[-1]["replay/replaced"] > 0 and ours[-1]["reroll/given"] > 0
    if "engine" not in tables:
        assert same_weights(tmp_path / "killed", tmp_path / "whole")
    else:  # which calls are batched together depends on when they come: not even two runs in one go are the same
        trained = [weights(tmp_path / name) for name in ("killed", "whole")]
        assert all(torch.allclose(trained[0][name], trained[1][name], atol=1e-6) for name in trained[1])


@pytest.mark.parametrize(
    ("rollout", "tables"),
    [
        ({}, STREAMING),
        (ALWAYS_BUSY, PROCESS),
        (ALWAYS_BUSY, STREAMING | LORA | BOTH),
    ],
    ids=["streaming", "overlap, process", "overlap, streaming, lora, reroll, replay"],
)
def test_killed_twice_in_the_middle_of_generation_it_goes_on(
    tmp_path: Path, rollout: dict[str, Any], tables: dict[str, Any]
) -> None:
    file = recipe(tmp_path, rollout, **tables)
    kill(file, "rollover.checkpoint.journal:Journal.append", 151)
    told = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    kill(file, "rollover.checkpoint.journal:Journal.append", 131, "--resume")
    assert told and runs.json_lines(tmp_path / "run" / "metrics.jsonl")[: len(told)] == told, "told steps are gone"
    assert cli.main(["train", str(file), "--resume"]) == 0
    check_whole(tmp_path / "run", 8, tasks_once="reroll" not in tables)

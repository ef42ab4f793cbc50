"""Curricula in whole runs: the tasks given follow the pass rates, and a stop changes no bit.

Twelve rows come again and again; a third of them is always passed, a third never, a third now and then.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import runs
from test_replay import SYNC, rows, same_weights

from rollover import cli
from rollover.track.metrics import validate

REWARD = '''
def reward(prompts, completions, answer, **columns):
    """1, 0, or whether there is a 7 in the answer."""
    kind = {0: lambda text: 1.0, 1: lambda text: 0.0, 2: lambda text: float("7" in text or "3" in text)}
    return [kind[int(a) % 3](text) for a, text in zip(answer, completions)]
'''
BUCKETS = {"kind": "buckets", "easy_weight": 0.05, "hard_weight": 0.2}
VARIANCE = {"kind": "variance", "decay": 0.5, "min_weight": 0.1}
PARTIAL = {"interrupt": "when_enough", "in_flight_groups": 6, "max_staleness": 2}
# What rolls over is counted in tokens, and so the same in each run: with "when_enough" it depends on the clock.
BUDGET = {"interrupt": "token_budget", "token_budget": 5, "in_flight_groups": 6, "max_staleness": 3}


def write(folder: Path, rollout: dict[str, Any], curriculum: dict[str, Any], steps: int = 10, **tables: Any) -> Path:
    small = {"max_new_tokens": 12, "stop": ["x", "q"]}
    tables = {"tasks": {"eval_fraction": 0.001}, **tables, "tasks.curriculum": curriculum}
    file = runs.write(folder, steps=steps, rows=12, rollout=small | rollout, **tables)
    (folder / "reward.py").write_text(REWARD)
    return file


def train(*words: object) -> None:
    assert cli.main(["train", *map(str, words)]) == 0


def curricula(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if k.startswith(("curriculum/", "tasks/", "reward/"))} for row in rows(folder)
    ]


def given(folder: Path) -> list[tuple[str, int]]:
    """(task, attempt) of each group that was scored, in order of its step."""
    return [(r["task_id"], r["attempt"]) for r in runs.records(folder / "run") if r["sibling"] == 0]


def test_tasks_that_are_always_or_never_passed_are_given_less_often(tmp_path: Path) -> None:
    train(write(tmp_path, PARTIAL, BUCKETS, steps=24))
    for row in rows(tmp_path):
        validate(row)
    last = rows(tmp_path)[-1]
    assert last["curriculum/known"] == 12 and last["curriculum/easy"] >= 4 and last["curriculum/hard"] >= 4
    assert last["curriculum/passed_over"] > 0
    counts = Counter(int(task.rpartition("/")[2]) % 3 for task, _ in given(tmp_path))
    assert counts[2] > max(counts[0], counts[1]), counts


def test_a_run_stopped_while_rollouts_roll_over_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """The scores of rollouts in flight at the stop count as they would have."""
    train(write(tmp_path / "whole", BUDGET, VARIANCE))
    file = write(tmp_path / "stopped", BUDGET, VARIANCE)
    train(file, "--train.num_steps", 3)
    train(file, "--train.num_steps", 7, "--resume")
    train(file, "--resume")
    assert curricula(tmp_path / "stopped") == curricula(tmp_path / "whole")
    assert given(tmp_path / "stopped") == given(tmp_path / "whole")
    assert same_weights(tmp_path / "stopped", tmp_path / "whole")
    last = rows(tmp_path / "whole")[-1]
    assert last["curriculum/passed_over"] > 0 and last["rollouts/resumed"] > 20


@pytest.mark.slow
def test_it_goes_on_with_ranks(tmp_path: Path) -> None:
    ranks = {"backend": {"type": "ranks", "num_ranks": 2}}
    train(write(tmp_path / "whole", SYNC, BUCKETS, steps=5, **ranks))
    file = write(tmp_path / "stopped", SYNC, BUCKETS, steps=5, **ranks)
    train(file, "--train.num_steps", 3)
    train(file, "--resume")
    assert curricula(tmp_path / "stopped") == curricula(tmp_path / "whole")
    assert given(tmp_path / "stopped") == given(tmp_path / "whole")
    assert rows(tmp_path / "stopped")[-1]["curriculum/passed_over"] > 0


def test_it_may_begin_and_end_in_the_middle_of_a_run(tmp_path: Path) -> None:
    without = write(tmp_path, SYNC, {}, steps=9)
    train(without, "--train.num_steps", 3)
    train(without, "--train.num_steps", 6, "--resume", "--tasks.curriculum.kind", "variance")
    assert rows(tmp_path)[-1]["curriculum/known"] > 0
    train(without, "--resume")
    assert "curriculum/known" not in rows(tmp_path)[-1]

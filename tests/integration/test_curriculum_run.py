"""Curricula in whole runs: what is given follows the pass rates, and stopping changes no bit, in any mode.

Twelve rows come again and again; a third of them is always passed, a third never, a third now and then.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from test_journal_modes import ALWAYS_BUSY, RARELY, kill
from test_replay import SYNC, rows, same_weights, weights

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
FILTERS = {"filters": {"zero_variance": True, "give_up_after_steps": 200}}
BOTH: dict[str, Any] = {"replay": {"size": 4, "max_staleness": 4}, "reroll": {"max_groups": 1, "start_fraction": 0.0}}


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


@pytest.mark.parametrize(
    ("mode", "curriculum", "tables"),
    [(SYNC, BUCKETS, BOTH), (SYNC, VARIANCE, FILTERS), (BUDGET, VARIANCE, {})],
    ids=["sync, replay, reroll", "sync, filters", "rolling over"],
)
def test_a_run_stopped_in_the_middle_ends_as_one_that_was_not(
    tmp_path: Path, mode: dict[str, Any], curriculum: dict[str, Any], tables: dict[str, Any]
) -> None:
    """With rollouts in flight that roll over, too: what they are scored after the stop counts as it would have."""
    train(write(tmp_path / "whole", mode, curriculum, **tables))
    file = write(tmp_path / "stopped", mode, curriculum, **tables)
    train(file, "--train.num_steps", 3)
    train(file, "--train.num_steps", 7, "--resume")
    train(file, "--resume")
    assert curricula(tmp_path / "stopped") == curricula(tmp_path / "whole")
    assert given(tmp_path / "stopped") == given(tmp_path / "whole")
    if tables == FILTERS:  # which groups are generated together depends on when a score is there: log-probs in 1e-7
        trained = [weights(tmp_path / name) for name in ("stopped", "whole")]
        assert all(torch.allclose(trained[0][name], trained[1][name], atol=1e-5) for name in trained[1])
    else:
        assert same_weights(tmp_path / "stopped", tmp_path / "whole")
    last = rows(tmp_path / "whole")[-1]
    assert last["curriculum/passed_over"] > 0 and (mode is SYNC or last["rollouts/resumed"] > 20)


def test_killed_between_two_checkpoints_it_is_given_the_same_tasks(tmp_path: Path) -> None:
    """The journal tells of the groups; the pass rates are made again of them."""
    train(write(tmp_path / "whole", SYNC, BUCKETS, steps=8, **RARELY))
    file = write(tmp_path / "killed", SYNC, BUCKETS, steps=8, **RARELY)
    kill(file, "rollover.trainer.trainer:Trainer.train_step", 6)
    train(file, "--resume")
    assert curricula(tmp_path / "killed") == curricula(tmp_path / "whole")
    assert given(tmp_path / "killed") == given(tmp_path / "whole")
    assert same_weights(tmp_path / "killed", tmp_path / "whole")


def test_steps_that_are_rolled_back_are_visits_once(tmp_path: Path) -> None:
    """Their tasks were given by the pass rates of the lost steps, so that these stay; and each group counts once."""
    lost = {"checkpoint": {"every_steps": 3, "journal_s": 0.05, "lost_steps": "roll_back"}}
    file = write(tmp_path, PARTIAL, VARIANCE, steps=8, **lost)
    kill(file, "rollover.trainer.trainer:Trainer.train_step", 6)
    train(file, "--resume")
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    ids = [r["rollout_id"] for r in runs.records(tmp_path / "run")]
    assert len(ids) == len(set(ids))


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


def test_fully_asynchronous_a_kill_costs_no_visit(tmp_path: Path) -> None:
    file = write(tmp_path, ALWAYS_BUSY, VARIANCE, steps=8, **RARELY, **FILTERS)
    kill(file, "rollover.trainer.trainer:Trainer.train_step", 4)
    train(file, "--resume")
    table = rows(tmp_path)
    assert [row["step"] for row in table] == list(range(1, 9))
    seen = {task for task, _ in given(tmp_path)}
    assert table[-1]["curriculum/known"] == len(seen) == 12

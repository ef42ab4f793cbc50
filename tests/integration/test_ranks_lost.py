"""A run on ranks of which one is killed at random, again and again."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
from test_backend_lost import SYNC, answers, trained
from test_journal_run import check_whole

PATIENCE_S = 300


def write(folder: Path) -> Path:
    return runs.write(
        folder,
        steps=12,
        run={"threads": 2},
        rollout={**SYNC, "max_new_tokens": 24},
        backend={"type": "ranks", "num_ranks": 2},
        checkpoint={"every_steps": 4, "save_final_model": False},
    )


def children(run: runs.Run, what: str) -> list[psutil.Process]:
    """Processes of the run with `what` in their command line."""
    found = []
    for child in psutil.Process(run.pid).children(recursive=True):
        try:
            if any(what in word for word in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def wait_for(run: runs.Run, what: str, value: Any) -> None:
    """Until `value()`."""
    deadline = time.monotonic() + PATIENCE_S
    while not value():
        assert run.poll() is None, f"it ended before {what}: {run.out}{run.err}"
        assert time.monotonic() < deadline, f"not {what}: {run.out}{run.err}"
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_that_are_killed_cost_time_alone(tmp_path: Path) -> None:
    rng = random.Random(20)
    undisturbed = runs.rollover("train", write(tmp_path / "undisturbed"))
    assert undisturbed.returncode == 0, undisturbed.stderr
    folder = tmp_path / "killed"
    run = runs.start("train", write(folder))
    metrics, dead, workers = folder / "run" / "metrics.jsonl", set[int](), set[frozenset[int]]()
    try:
        for at in (1, 4, 7):
            wait_for(run, f"at step {at}", lambda at=at: metrics.exists() and len(runs.json_lines(metrics)) >= at)
            time.sleep(rng.random() * 0.3)
            ranks: list[psutil.Process] = []
            while len(ranks) < 2:
                ranks = [child for child in children(run, "trainer.ranks.process") if child.pid not in dead]
                wait_for(run, "with ranks", lambda: True)
            workers.add(frozenset(child.pid for child in children(run, "rewards")))
            rng.choice(ranks).kill()
            dead |= {rank.pid for rank in ranks}
            wait_for(run, "notices", lambda at=at: run.out.count("the trainer's backend is lost: rank ") > at // 3)
        assert run.wait(PATIENCE_S) == 0, run.err
    finally:
        run.kill()
    assert "was killed by SIGKILL" in run.out
    check_whole(folder / "run", 12)
    assert runs.json_lines(metrics)[-1]["train/restarts"] == 3
    assert trained(folder) == trained(tmp_path / "undisturbed")
    assert answers(folder) == answers(tmp_path / "undisturbed")
    assert len(workers) == 1 and all(workers), "the reward workers stay"

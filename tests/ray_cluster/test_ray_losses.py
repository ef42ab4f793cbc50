"""A run on Ray trains what the same run trains without, also where a rank of it dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
from runs import check_whole
from test_backend_lost import SYNC, answers, trained

pytestmark = pytest.mark.ray

STEPS = 8
PATIENCE_S = 300


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


def write(folder: Path, **tables: dict[str, object]) -> Path:
    return runs.write(
        folder,
        steps=STEPS,
        run={"threads": 2},
        rollout={**SYNC, "max_new_tokens": 24},
        backend={"type": "ranks", "num_ranks": 2},
        checkpoint={"every_steps": 3, "save_final_model": False},
        **tables,
    )


def test_a_rank_that_dies_on_ray_costs_time_alone(tmp_path: Path) -> None:
    undisturbed = runs.rollover("train", write(tmp_path / "undisturbed"))
    assert undisturbed.returncode == 0, undisturbed.stderr
    folder = tmp_path / "killed"
    run = runs.start("train", write(folder, cluster={"type": "ray"}))
    metrics = folder / "run" / "metrics.jsonl"
    try:
        wait_for(run, "between two checkpoints", lambda: metrics.exists() and len(runs.json_lines(metrics)) >= 4)
        children(run, "trainer.ranks.process")[0].kill()
        assert run.wait(PATIENCE_S) == 0, run.err
    finally:
        run.kill()
    check_whole(folder / "run", STEPS)
    assert runs.json_lines(metrics)[-1]["train/restarts"] == 1
    assert trained(folder) == trained(tmp_path / "undisturbed")
    assert answers(folder) == answers(tmp_path / "undisturbed")

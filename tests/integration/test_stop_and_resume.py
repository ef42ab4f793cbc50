"""Whole processes: SIGTERM while a reward function sleeps, and a second run in the directory of a living one.

No limit here is one that a slow machine could reach: what must be quick is so beside a sleep of an hour.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs

from rollover.checkpoint.store import CheckpointStore

PATIENCE_S = 300
REWARD = """
import json, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open({folder!r} + "/calls.jsonl", "a") as file:
        file.write(json.dumps({{"answer": ground_truth, "completion": solution_str}}) + "\\n")
    if os.path.exists({folder!r} + "/sleep"):
        with open({folder!r} + "/slept.jsonl", "a") as file:
            file.write(json.dumps({{"answer": ground_truth, "completion": solution_str}}) + "\\n")
        time.sleep(3600)
    return sum(c.isdigit() for c in solution_str) / 48
"""


def wait_until(condition: Callable[[], object], process: runs.Run) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def started(log: Path, *words: str | Path) -> Iterator[runs.Run]:
    """A run with its output in `log`; killed at the end if it is still there. None of its children outlives it."""
    process = runs.start(*words, log=log)
    children: list[psutil.Process] = []
    try:
        yield process
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1], "a child process outlived the run"


@dataclass
class Stopped:
    """A run that got SIGTERM while a reward function slept."""

    recipe: Path
    code: int | None
    said: str
    slept: list[dict[str, Any]]  # answer and completion of the calls that never returned
    steps: int

    @property
    def run_dir(self) -> Path:
        return self.recipe.parent / "run"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "mine.py").write_text(REWARD.format(folder=str(folder)))
    recipe = runs.write(
        folder,
        steps=10_000,
        rows=2_000,
        checkpoint={"every_steps": 0},
        rewards={"function": f"{folder / 'mine.py'}:compute_score", "num_workers": 2, "timeout_s": 7200.0},
        watchdog={"reward_timeout_s": 7200.0},
    )
    rows, slept = folder / "run" / "metrics.jsonl", folder / "slept.jsonl"
    with started(folder / "log", "train", recipe) as process:
        wait_until(lambda: runs.json_lines(rows), process)
        (folder / "sleep").touch()
        wait_until(lambda: len(runs.json_lines(slept)) == 2, process)  # each worker has one
    (folder / "sleep").unlink()
    said = (folder / "log").read_text()
    return Stopped(recipe, process.returncode, said, runs.json_lines(slept), len(runs.json_lines(rows)))


def test_sigterm_waits_for_no_reward_and_leaves_a_checkpoint(stopped: Stopped) -> None:
    assert stopped.code == 130 and "Traceback" not in stopped.said, stopped.said
    assert f"stopped after step {stopped.steps}; continue with:" in stopped.said
    (name,) = CheckpointStore(str(stopped.run_dir / "checkpoints"), keep=2).list()
    assert name == f"step-{stopped.steps:06d}"


def test_a_resumed_run_asks_for_the_rewards_again_and_lets_no_other_in(stopped: Stopped) -> None:
    folder, rows = stopped.recipe.parent, stopped.run_dir / "metrics.jsonl"
    calls = folder / "calls.jsonl"
    before = len(runs.json_lines(calls))

    def num_rows() -> int:
        return len(runs.json_lines(rows))

    with started(folder / "log", "train", stopped.recipe, "--resume") as first:
        wait_until(lambda: num_rows() > stopped.steps, first)
        asked = runs.json_lines(calls)[before:]
        assert all(call in asked for call in stopped.slept), "the same answers are scored"
        second = runs.rollover("train", stopped.recipe, "--resume", timeout=PATIENCE_S)
        reached = num_rows()
        wait_until(lambda: num_rows() > reached + 1, first)
    assert second.returncode == 2 and "Traceback" not in second.stderr, second.stderr
    assert re.fullmatch(
        rf"rollover: error: run\.dir = '{stopped.run_dir}' is in use by process {first.pid} on \S+ \(since [-\d]+"
        r" [:\d]+\): wait until that run has ended, stop it \(Ctrl-C\), or give another run\.dir\n",
        second.stderr,
    )
    assert first.returncode == 130, (folder / "log").read_text()
    assert [row["step"] for row in runs.json_lines(rows)] == list(range(1, num_rows() + 1)), "no step twice"
    ids = [record["rollout_id"] for record in runs.records(stopped.run_dir)]
    assert len(ids) == len(set(ids)), "no rollout was trained twice"

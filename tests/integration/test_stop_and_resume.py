"""Ends of a run that somebody or the watchdog asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
from endings import train

import virtual_time
from rollover.checkpoint.store import CheckpointStore
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.rewards.worker import RewardWorker
from rollover.run import blocked_warning
from rollover.track.metrics import validate
from rollover.trainer.trainer import Trainer

# Whole processes: SIGTERM while a reward function sleeps, and a second run in the directory of a living one


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


# `rollover train` with a rollout, a reward, training, a weight hand-over, an engine step, an evaluation that hang


# Warnings come soon: one too many does no harm. What is ended for taking too long has all the time that it needs.
OVER_LOOP = blocked_warning.over_loop
SOON_S = 0.2
LIMITS = {
    "rollout_timeout_s": 100.0,
    "grace_s": 100.0,
    "reward_timeout_s": 100.0,
    "weights_timeout_s": SOON_S,
    "train_timeout_s": SOON_S,
}


def hold_up_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nobody spoke up"
        time.sleep(0.01)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings about what blocks a run, which come soon of an event loop that stands still, too."""
    lines: list[str] = []
    collector = logging.Handler()
    collector.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("rollover.run.blocked_warning")
    logger.addHandler(collector)

    def over_loop_soon(text: Any, limit_s: float, call_later: Any) -> AbstractContextManager[None]:
        return OVER_LOOP(text, min(limit_s, SOON_S), call_later)

    monkeypatch.setattr(blocked_warning, "over_loop", over_loop_soon)
    yield lines
    logger.removeHandler(collector)


def hang(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> list[str]:
    """Everything hangs once. Returns what did."""
    hung: list[str] = []
    at_work: set[object] = set()  # extensions and scorings that do not hang
    extend, step, load, score = (
        EmbeddedEngine.extend,
        EmbeddedEngine.step,
        EmbeddedEngine.load_weights,
        RewardWorker.score,
    )
    train = Trainer.train_step
    monkeypatch.setattr(asyncio.events, "new_event_loop", virtual_time.SkippingLoop)

    async def for_ever() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.SkippingLoop)
        while True:
            await asyncio.sleep(0.005)
            if not at_work:
                loop.skip(10)  # in small steps: the watchdog forgives what takes the event loop long

    def until_said(what: str) -> None:
        before = len(said)
        hold_up_until(lambda: any(what in line for line in said[before:]))

    async def extend_(self, request):
        if request.rollout_id in ("1-0", "eval-2-0") and request.rollout_id not in hung:
            if request.rollout_id == "1-0" or "weights" in hung:  # not the evaluation before the first step
                hung.append(request.rollout_id)
                await for_ever()
        at_work.add(request)
        try:
            return await extend(self, request)
        finally:
            at_work.remove(request)

    def step_(self) -> None:
        if "weights" in hung and "step" not in hung:
            hung.append("step")
            until_said("stood still")
        step(self)

    async def load_(self, version, tensors):
        if "weights" not in hung:
            hung.append("weights")
            until_said("the weights of")
        return await load(self, version, tensors)

    def train_(self, batch):
        if "train" not in hung:
            hung.append("train")
            until_said("the training of")
        return train(self, batch)

    async def score_(self, requests):
        if "step" in hung and "score" not in hung and len(requests) == 3:
            hung.append("score")
            await for_ever()
        at_work.add(call := object())
        try:
            return await score(self, requests)
        finally:
            at_work.remove(call)

    monkeypatch.setattr(EmbeddedEngine, "extend", extend_)
    monkeypatch.setattr(EmbeddedEngine, "step", step_)
    monkeypatch.setattr(EmbeddedEngine, "load_weights", load_)
    monkeypatch.setattr(RewardWorker, "score", score_)
    monkeypatch.setattr(Trainer, "train_step", train_)
    return hung


def test_what_hangs_is_named_and_the_run_goes_on(tmp_path: Path, capsys, monkeypatch, said: list[str]) -> None:
    recipe = runs.write(
        tmp_path,
        steps=4,
        rollout={"in_flight_groups": None, "interrupt": None, "max_staleness": None},
        watchdog=LIMITS,
        eval={"num_tasks": 4, "samples_per_task": 1, "every_steps": 3},
    )
    hung = hang(monkeypatch, said)
    code, text = train(capsys, recipe)
    assert code == 0, text
    assert sorted(hung) == ["1-0", "eval-2-0", "score", "step", "train", "weights"]
    lines = [line for line in text.splitlines() if "watchdog: " in line]
    for pattern in (
        r"watchdog: rollout 1-0 \(running, begun \S+ s ago, 0 tokens, none for \S+ s\): it is interrupted and .*",
        r"watchdog: rollout 1-0 \(interrupted, begun .*\): it does not come back, so it is cancelled and continued .*",
        r"watchdog: the training of step 1 \(begun \S+ s ago\): .* the run waits",
        r"watchdog: the weights of policy version 1 \(being handed to the engine, begun \S+ s ago\): .* the run waits",
        r"watchdog: the event loop has stood still for \S+ s while generating: rollout \d+-\d .*the run waits",
        r"watchdog: the rewards of group \d+ \(scoring, begun \S+ s ago\): it is cancelled and scored again",
        r"the evaluation after 3 steps failed: watchdog: rollout eval-2-0 \(running, .*the evaluation is given up",
    ):
        assert any(re.fullmatch(pattern, line) for line in lines), "\n".join([pattern, *lines])

    rows = runs.rows(tmp_path)
    for row in rows:
        validate(row)
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
    last = rows[-1]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["watchdog/stalled_rollouts"] == 1
    counts = [last[f"watchdog/{name}"] for name in ("stalled_rollouts", "stalled_rewards", "redispatched")]
    assert counts == [1, 1, 2] and last["dropped/stalled/groups"] == 0

    monkeypatch.setattr(blocked_warning, "over_loop", OVER_LOOP)
    words = ["--watchdog.weights_timeout_s", "1000", "--watchdog.train_timeout_s", "1000"]
    code, text = train(capsys, recipe, "--resume", "--train.num_steps", "5", *words)
    assert code == 0 and "watchdog: " not in text
    row = runs.rows(tmp_path)[-1]
    assert row["step"] == 5 and row["watchdog/redispatched"] == 2, "counters go on where they were"


def test_engine_that_holds_up_the_loop_is_named(tmp_path: Path, capsys, monkeypatch, said: list[str]) -> None:
    training, slept = threading.Event(), threading.Event()
    train_step, step = Trainer.train_step, EmbeddedEngine.step

    def train_step_(self, batch):
        training.set()
        assert slept.wait(120), "nothing was generated while the trainer trained"
        return train_step(self, batch)

    def step_(self) -> None:
        if training.is_set() and not slept.is_set():
            before = len(said)
            hold_up_until(lambda: any("stood still" in line for line in said[before:]))
            slept.set()
        step(self)

    monkeypatch.setattr(Trainer, "train_step", train_step_)
    monkeypatch.setattr(EmbeddedEngine, "step", step_)
    recipe = runs.write(
        tmp_path, steps=2, watchdog=LIMITS,
        rollout={"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 6, "max_staleness": 1},
    )  # fmt: skip
    code, text = train(capsys, recipe)
    assert code == 0, text
    assert re.search(r"watchdog: the event loop has stood still for \S+ s while generating: rollout", text), text

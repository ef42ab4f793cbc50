"""`rollover train` with a rollout, a reward, training, a weight hand-over, an engine step, an evaluation that hang.

No limit here is one that a slow machine could reach: where a rollout or a reward hangs, its time is skipped, and what
holds up the event loop does so until somebody speaks up.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import runs

import virtual_time
from rollover import cli
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.rewards.worker import RewardWorker
from rollover.run import blocked_warning
from rollover.track.metrics import validate
from rollover.trainer.trainer import Trainer

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


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """(exit code, everything printed)."""
    code = cli.main([str(w) for w in words])
    out = capsys.readouterr()
    assert "Traceback" not in out.err, out.err
    return code, out.out + out.err


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


def test_what_hangs_is_named_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    recipe = runs.write(
        tmp_path,
        steps=4,
        rollout={"in_flight_groups": None, "interrupt": None, "max_staleness": None},
        watchdog=LIMITS,
        eval={"num_tasks": 4, "samples_per_task": 1, "every_steps": 3},
    )
    hung = hang(monkeypatch, said)
    code, text = run(capsys, "train", recipe)
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

    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
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
    code, text = run(capsys, "train", recipe, "--resume", "--train.num_steps", "5", *words)
    assert code == 0 and "watchdog: " not in text
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["step"] == 5 and row["watchdog/redispatched"] == 2, "counters go on where they were"


def test_an_engine_that_holds_up_the_loop_while_the_trainer_trains_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
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
    code, text = run(capsys, "train", recipe)
    assert code == 0, text
    assert re.search(r"watchdog: the event loop has stood still for \S+ s while generating: rollout", text), text

"""`rollover train` with a rollout, a reward, training, a weight hand-over, an engine step, an evaluation that hang."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path

import pytest
import runs

from rollover import cli
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.rewards.client import RewardWorker
from rollover.track.metrics import validate
from rollover.train.trainer import Trainer

LIMITS = {
    "rollout_timeout_s": 0.4,
    "grace_s": 0.1,
    "reward_timeout_s": 0.2,
    "weights_timeout_s": 0.2,
    "train_timeout_s": 0.3,
}


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """(exit code, everything printed)."""
    code = cli.main([str(w) for w in words])
    out = capsys.readouterr()
    assert "Traceback" not in out.err, out.err
    return code, out.out + out.err


def hang(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything hangs once. Returns what did."""
    hung: list[str] = []
    extend, step, load, score = (
        EmbeddedEngine.extend,
        EmbeddedEngine.step,
        EmbeddedEngine.load_weights,
        RewardWorker.score,
    )
    train = Trainer.train_step

    async def extend_(self, request):
        if request.rollout_id in ("1-0", "eval-2-0") and request.rollout_id not in hung:
            if request.rollout_id == "1-0" or "weights" in hung:  # not the evaluation before the first step
                hung.append(request.rollout_id)
                await asyncio.get_running_loop().create_future()
        return await extend(self, request)

    def step_(self) -> None:
        if "weights" in hung and "step" not in hung:
            hung.append("step")
            time.sleep(1)
        step(self)

    def load_(self, version, tensors):
        if "weights" not in hung:
            hung.append("weights")
            time.sleep(0.5)
        return load(self, version, tensors)

    def train_(self, batch):
        if "train" not in hung:
            hung.append("train")
            time.sleep(0.6)
        return train(self, batch)

    async def score_(self, requests):
        if "step" in hung and "score" not in hung and len(requests) == 3:
            hung.append("score")
            await asyncio.get_running_loop().create_future()
        return await score(self, requests)

    monkeypatch.setattr(EmbeddedEngine, "extend", extend_)
    monkeypatch.setattr(EmbeddedEngine, "step", step_)
    monkeypatch.setattr(EmbeddedEngine, "load_weights", load_)
    monkeypatch.setattr(RewardWorker, "score", score_)
    monkeypatch.setattr(Trainer, "train_step", train_)
    return hung


def test_what_hangs_is_named_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = runs.write(
        tmp_path,
        steps=4,
        rollout={"in_flight_groups": None, "interrupt": None, "max_staleness": None},
        watchdog=LIMITS,
        rewards={"timeout_s": 0.5, "startup_timeout_s": 4},
        eval={"num_tasks": 4, "samples_per_task": 1, "every_steps": 3},
    )
    hung = hang(monkeypatch)
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

    code, text = run(capsys, "train", recipe, "--resume", "--train.num_steps", "5")
    assert code == 0 and "watchdog: " not in text
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["step"] == 5 and row["watchdog/redispatched"] == 2, "counters go on where they were"


def test_an_engine_that_holds_up_the_loop_while_the_trainer_trains_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, slept = threading.Event(), threading.Event()
    train_step, step = Trainer.train_step, EmbeddedEngine.step

    def train_step_(self, batch):
        training.set()
        assert slept.wait(60), "nothing was generated while the trainer trained"
        return train_step(self, batch)

    def step_(self) -> None:
        if training.is_set() and not slept.is_set():
            time.sleep(1)
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

"""Streaming in the real loop: rollouts scored as they stop, gradients of groups as they get ready, one update."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import safetensors.numpy

from rollover.cli import main
from rollover.config.load import ConfigError, load_config
from rollover.trainer.trainer import Trainer

SLOW = '''
import hashlib, os, time

HERE = os.path.dirname(__file__)

def note(name):
    """How many times this was called."""
    file = os.open(f"{HERE}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"x")
    size = os.fstat(file).st_size
    os.close(file)
    return size

def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Share of digits, after a time that differs from rollout to rollout."""
    time.sleep(0.002 + 0.03 * (hashlib.md5(solution_str.encode()).digest()[0] % 2))
    call = note("calls")
    if os.path.exists(f"{HERE}/parts") and call > 1 and (call - 1) % 9 == 0:
        # The last of the nine rollouts of a step, after the probe's: what is ready is trained while this one takes.
        before = os.path.getsize(f"{HERE}/parts")
        wait_for(lambda: os.path.getsize(f"{HERE}/parts") > before, 3)
    if os.path.exists(f"{HERE}/hold") and call > 14:
        note("held")  # in the middle of the second step
        wait_for(lambda: not os.path.exists(f"{HERE}/hold"), 120)
    return sum(c.isdigit() for c in solution_str) / 48
'''
SYNC = {"in_flight_groups": None, "interrupt": "never", "max_staleness": None}
FULLY_ASYNC = {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 6, "max_staleness": 1}


def recipe(folder: Path, **tables: Any) -> Path:
    tables = {"rewards": {"function": f"{folder / 'slow.py'}:compute_score", "num_workers": 2}} | tables
    path = runs.write(folder, **tables)
    (folder / "slow.py").write_text(SLOW)
    return path


def train(folder: Path, **tables: Any) -> list[dict[str, float]]:
    assert main(["train", str(recipe(folder, **tables))]) == 0
    rows = runs.json_lines(folder / "run" / "metrics.jsonl")
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["staleness/max"] <= row["staleness/bound"]
    return rows


def weights(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(next((folder / "run" / "model").glob("*.safetensors")))


def assert_close(ours: Path, theirs: Path) -> None:
    before, after = weights(ours), weights(theirs)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(value, after[name], atol=2e-5)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[set[int]]:
    """Ids of the groups of every part that was accumulated before its step."""
    seen: list[set[int]] = []
    plain = Trainer.accumulate

    def spy(self: Trainer, samples: list) -> None:
        seen.append({s.group_id for s in samples})
        if (tmp_path / "streaming" / "parts").exists():
            with (tmp_path / "streaming" / "parts").open("a") as file:
                file.write("x")
        plain(self, samples)

    monkeypatch.setattr(Trainer, "accumulate", spy)
    return seen


def test_a_synchronous_run_learns_the_same(tmp_path: Path, parts: list[set[int]]) -> None:
    plain = train(tmp_path / "plain", rollout=SYNC, train={"adam_eps": 1e-3})
    assert not parts
    (tmp_path / "streaming").mkdir()
    (tmp_path / "streaming" / "parts").touch()
    streaming = train(tmp_path / "streaming", rollout=SYNC, train={"adam_eps": 1e-3, "streaming_min_groups": 1})
    assert len(parts) >= 4, "a step of three groups has parts"
    for one, other in zip(plain, streaming, strict=True):
        for key in ("reward/mean", "tokens/generated", "tokens/step_trained", "length/mean", "staleness/max"):
            assert one[key] == other[key]
        for key in ("loss", "grad_norm", "entropy", "ratio/mean", "train/zero_advantage_tokens"):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5)
    assert_close(tmp_path / "plain", tmp_path / "streaming")


@pytest.mark.parametrize("mode", ["partial", "fully async"])
def test_with_replay_in_every_mode(tmp_path: Path, parts: list[set[int]], mode: str) -> None:
    """A group without a signal waits for the end of its step: it may be replaced."""
    tables: dict[str, Any] = {"train": {"streaming_min_groups": 1}, "replay": {"size": 6, "max_staleness": 6}}
    rows = train(tmp_path, steps=8, rollout=FULLY_ASYNC if mode == "fully async" else {}, **tables)
    assert len(rows) == 8 and len(parts) > 8
    trained = [group_id for part in parts for group_id in part]
    assert len(trained) == len(set(trained))


def test_a_stop_in_the_middle_of_a_step_loses_nothing(tmp_path: Path) -> None:
    """The gradient of the groups that were ready is forgotten, and they are trained after the restart."""
    tables = {"rollout": SYNC, "train": {"adam_eps": 1e-3, "streaming_min_groups": 1}, "steps": 6}
    train(tmp_path / "whole", **tables)
    file = recipe(tmp_path / "stopped", **tables)
    (tmp_path / "stopped" / "hold").touch()
    process = runs.start("train", file)
    deadline = time.monotonic() + 600
    while not (tmp_path / "stopped" / "held").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    (tmp_path / "stopped" / "hold").unlink()
    assert process.wait(timeout=600) == 130
    assert len(runs.json_lines(tmp_path / "stopped" / "run" / "metrics.jsonl")) < 6
    assert main(["train", str(file), "--resume"]) == 0
    assert_close(tmp_path / "whole", tmp_path / "stopped")


REFUSED = {
    "minibatches_per_step": {"train": {"minibatches_per_step": 3}},
    "algorithm.advantage": {"algorithm": {"advantage": "reinforce_plus_plus"}},
    "advantage_std": {"algorithm": {"advantage_std": "batch"}},
    "after_scoring": {"algorithm": {"after_scoring": "hooks.py:look"}},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_needs_the_whole_step_is_refused(tmp_path: Path, word: str) -> None:
    tables = {table: dict(values) for table, values in REFUSED[word].items()}
    tables.setdefault("train", {})["streaming_min_groups"] = 1
    with pytest.raises(ConfigError, match=word):
        load_config([recipe(tmp_path, **tables)])

"""What a run on a CPU will take, said before its first step: by hand, and when nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs

import tiny
from rollover.cli import main
from rollover.config import Config
from rollover.models import flops
from rollover.models.flops import ModelFlops
from rollover.run.device_use import estimate, estimate_of, seconds

FLOPS = ModelFlops(90e6, 90e6, 10e6, 10e6, {})


def config(**tables: dict[str, Any]) -> Config:
    rollout = {"groups_per_step": 8, "group_size": 8, "max_new_tokens": 128}
    of = {"rollout": rollout | tables.pop("rollout", {}), "eval": {"num_tasks": 64, "samples_per_task": 4}} | tables
    return Config.model_validate({"model": {"dtype": "float32"}, "engine": {"max_running": 64}} | of)


def test_seconds_by_hand() -> None:
    """64 answers of 64 tokens, 2e8 FLOPs each: decoded once, and three passes more; half of the peak is reached."""
    step_s, eval_s = seconds(config(), FLOPS, 100e9)
    assert step_s == pytest.approx(64 * 64 * 2e8 * 4 / 50e9)
    assert eval_s == pytest.approx(256 * 64 * 2e8 / 50e9)
    few, _ = seconds(config(rollout={"groups_per_step": 1, "group_size": 2}), FLOPS, 100e9)
    assert few == pytest.approx(2 * 64 * 2e8 * (8 + 3) / 50e9), "a decode step of two costs as much as one of 16"


def test_a_long_run_gets_settings_for_a_trial() -> None:
    line, trial = estimate(config(), FLOPS, 20e9, 22).splitlines()
    assert line.startswith("about 5:28 a step and ") or "a step and" in line
    assert "20 GFLOP/s in float32" in line and "64 tokens on average" in line
    assert trial == "for a quick trial: --rollout.group_size 4 --rollout.max_new_tokens 64"
    short = estimate(config(rollout={"group_size": 4, "max_new_tokens": 128}), FLOPS, 20e9, 2000)
    assert short.splitlines()[1] == "for a quick trial: --rollout.max_new_tokens 64"
    assert len(estimate(config(), FLOPS, 400e9, 22).splitlines()) == 1, "some minutes are said, and no more"
    assert estimate(config(), FLOPS, 1e15, 22) == "", "nobody waits"


def test_of_others_nothing_is_known() -> None:
    model = tiny.model()
    for tables in ({"engine": {"kind": "remote", "num_servers": 1}}, {"backend": {"type": "ranks"}}):
        assert estimate_of(config(**tables), model, 22) == ""
    assert estimate_of(config(), model, 0) == ""


def test_a_run_says_it_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flops, "measured_peak", lambda dtype, device: 1e5)
    assert main(["train", str(runs.write(tmp_path, steps=1))]) == 0
    out = capsys.readouterr().out
    assert out.index(" in all on this CPU (0 GFLOP/s in float32)") < out.index("step 1/1")
    assert "for a quick trial: " not in out or "--rollout." in out

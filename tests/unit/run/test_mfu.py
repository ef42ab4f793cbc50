"""The utilization of a step, by hand; a run's rows hold it (tests/integration/test_train.py)."""

from __future__ import annotations

import pytest
import torch

from rollover.config import Config, RolloutConfig
from rollover.run.device_use import Utilization


def config(**track: float) -> Config:
    return Config.model_validate({"model": {"device": "cpu"}, "track": track})


ROW = {"time/train_s": 4.0, "time/generate_s": 2.0, "time/step_s": 8.0}


def test_flops_by_the_peak_in_the_time() -> None:
    metrics = Utilization(config(peak_tflops=0.5)).of_step(ROW, 1e12, 3e11)
    assert metrics == {
        "perf/peak_tflops": 0.5,
        "perf/train_flops": 1e12,
        "perf/mfu_train": pytest.approx(0.5),
        "perf/generate_flops": 3e11,
        "perf/mfu_generate": pytest.approx(0.3),
    }
    ahead = config(peak_tflops=0.5).model_copy(update={"rollout": RolloutConfig(overlap=True)})
    beside = Utilization(ahead).of_step(ROW, 1e12, 3e11)
    assert beside["perf/mfu_generate"] == pytest.approx(0.3 / 4), "it had the whole step"


def test_without_generation_there_is_no_rate() -> None:
    metrics = Utilization(config(peak_tflops=1.0)).of_step(ROW, 1e12, 0.0)
    assert metrics.keys() == {"perf/peak_tflops", "perf/train_flops", "perf/mfu_train"}


def test_without_a_given_peak_it_is_measured() -> None:
    assert Utilization(config()).of_step(ROW, 1e12, 0.0)["perf/peak_tflops"] > 0


def test_each_rank_has_a_gpu_and_all_share_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"backend": {"type": "ranks", "num_ranks": 4}, "track": {"peak_tflops": 0.5}}
    on_cpu = Config.model_validate(ranks | {"model": {"device": "cpu"}})
    assert Utilization(on_cpu).of_step(ROW, 1e12, 0.0)["perf/mfu_train"] == pytest.approx(0.5)
    for name in ("pick_device", "engine_device"):
        monkeypatch.setattr(f"rollover.run.device_use.{name}", lambda _: torch.device("cuda"))
    metrics = Utilization(on_cpu).of_step(ROW, 1e12, 3e11)
    assert metrics["perf/mfu_train"] == pytest.approx(0.125)
    assert metrics["perf/mfu_generate"] == pytest.approx(0.3), "one device generates"

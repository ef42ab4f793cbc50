"""CPU and GPU utilization of a step, by role."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from types import SimpleNamespace

import pytest
import torch

from rollover.config import Config, RolloutConfig
from rollover.run.device_use import DeviceUse, Utilization
from rollover.system import cores

BUSY = "import sys; print('on', flush=True)\nwhile True: pass"


def test_device_use_counts_cpu_time_of_children_by_role() -> None:
    use = DeviceUse()
    with subprocess.Popen([sys.executable, "-c", BUSY, "rollover.rewards.worker"], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            use.of_step(1.0)
            before, child_began = time.process_time(), time.perf_counter()
            time.sleep(1.0)
            seconds = time.perf_counter() - child_began
            found = use.of_step(seconds)
        finally:
            child.kill()
    own = (time.process_time() - before) / (seconds * cores())
    assert 0.02 < found["perf/cpu/rewards"] <= 1.1 / cores()
    assert found["perf/cpu/controller"] == pytest.approx(own, abs=0.05)
    roles = [value for name, value in found.items() if name.startswith("perf/cpu/")]
    assert found["perf/cpu_utilization"] == pytest.approx(sum(roles))


def test_device_use_averages_gpu_samples_since_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {0: [(1, 50)], 1: [(1, 100)]}

    def samples(handle: int, kind: int, since: int) -> tuple[int, list[SimpleNamespace]]:
        new = [
            SimpleNamespace(timeStamp=t, sampleValue=SimpleNamespace(uiVal=v)) for t, v in taken[handle] if t > since
        ]
        if not new:
            raise RuntimeError("no sample")
        return 3, new

    nvml = types.ModuleType("pynvml")
    nvml.__dict__.update(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=int,
        NVML_GPU_UTILIZATION_SAMPLES=1, nvmlDeviceGetSamples=samples,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    use = DeviceUse()  # has seen the first samples
    taken[0] += [(2, 20), (3, 40)]
    taken[1] += [(2, 90)]
    assert use.of_step(1.0)["perf/gpu_utilization"] == pytest.approx((0.3 + 0.9) / 2)
    assert "perf/gpu_utilization" not in use.of_step(1.0), "no new sample"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    taken[1] += [(3, 10)]
    only = DeviceUse()
    taken[1] += [(4, 70)]
    assert only.of_step(1.0)["perf/gpu_utilization"] == pytest.approx(0.7)


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

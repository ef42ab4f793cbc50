"""Utilization of the CPUs and GPUs of this machine during a step, and model FLOPs utilization (MFU).

CPU time is that of this process and its descendants, by role. GPU utilization is the mean of the samples that
the NVIDIA driver took since the step before (NVML, `pip install nvidia-ml-py`). Missing readings are left out. MFU is
the FLOPs of the model (models/flops.py) divided by the peak FLOP/s of the devices and the time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from rollover.config import Config
from rollover.config.backend import is_tinker
from rollover.config.cluster import num_ranks
from rollover.models.devices import dtype_of, engine_device, pick_device
from rollover.models.flops import peak_flops
from rollover.process_tree import descendants
from rollover.system import cores

# A word of a child's command line -> its role.
_ROLES = (
    ("rollover.rewards", "rewards"), ("rollover.trainer", "ranks"), ("rollover.engine.vllm_worker", "servers"),
    ("serve", "servers"), ("rollover.engine", "engine"), ("rollover.workflows", "agents"),
)  # fmt: skip


class DeviceUse:
    """CPU and GPU utilization since the last call."""

    def __init__(self) -> None:
        self._before = _cpu_by_process()
        self._gpus = _Gpus()
        self._gpus.mean()

    def of_step(self, seconds: float) -> dict[str, float]:
        """Return shares of the machine's cores, and of the GPUs' time, in the `seconds` since the last call."""
        before, self._before = self._before, _cpu_by_process()
        if seconds <= 0:
            return {}
        shares: dict[str, float] = {}
        for pid, (role, used) in self._before.items():
            grown = used - before.get(pid, (role, 0.0))[1]
            shares[role] = shares.get(role, 0.0) + grown / (seconds * cores())
        metrics = {f"perf/cpu/{role}": share for role, share in shares.items()}
        metrics["perf/cpu_utilization"] = sum(shares.values())
        if (gpu := self._gpus.mean()) is not None:
            metrics["perf/gpu_utilization"] = gpu
        return metrics


def _cpu_by_process() -> dict[int, tuple[str, float]]:
    """pid -> (role, seconds of CPU time) of this process and its descendants that run."""
    found = {os.getpid(): ("controller", sum(os.times()[:2]))}
    for process in descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):
            found[process.pid] = _role(process.cmdline()), sum(process.cpu_times()[:2])
    return found


def _role(words: list[str]) -> str:
    for beginning, role in _ROLES:
        if any(word.startswith(beginning) for word in words):
            return role
    return "others"


class _Gpus:
    """The visible NVIDIA GPUs; none without NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._seen: dict[int, int] = {}
        try:
            nvml = self._nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = range(nvml.nvmlDeviceGetCount()) if visible is None else filter(None, visible.split(","))
            self._handles = [self._handle(str(name)) for name in names]
        except Exception:  # boundary: an optional library and driver
            self._handles = []

    def mean(self) -> float | None:
        """Mean utilization of all GPUs since the last call, a share; None where there is no sample."""
        nvml, shares = self._nvml, list[float]()
        for number, handle in enumerate(self._handles):
            try:
                kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
                _, samples = nvml.nvmlDeviceGetSamples(handle, kind, self._seen.get(number, 0))
            except Exception:  # boundary: NVML raises where there is no new sample, too
                continue
            if samples:
                self._seen[number] = samples[-1].timeStamp
                shares.append(sum(s.sampleValue.uiVal for s in samples) / len(samples) / 100)
        return sum(shares) / len(shares) if shares else None

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


class Utilization:
    """MFU of one run, by step. `overlaps`: whether generation continues during training."""

    def __init__(self, config: Config, overlaps: bool) -> None:
        self.is_remote = is_tinker(config)  # on unknown devices
        if self.is_remote:
            return
        dtype = dtype_of(config)
        trains_on, generates_on = pick_device(config.model.device), engine_device(config)
        self.overlaps = overlaps
        self.train_peak = self.generate_peak = peak_flops(trains_on, dtype, config.track.peak_tflops)
        if generates_on != trains_on:
            self.generate_peak = peak_flops(generates_on, dtype, config.track.peak_tflops)
        if trains_on.type != "cpu":  # all processes of a machine share its cores
            self.train_peak *= max(1, num_ranks(config))

    def of_step(self, row: Mapping[str, float], train_flops: float, generate_flops: float) -> dict[str, float]:
        """Return the FLOPs and MFU of the step of this row. With overlap, generation has the time of the whole step."""
        if self.is_remote:
            return {"perf/train_flops": train_flops}
        metrics = {"perf/peak_tflops": self.train_peak / 1e12, "perf/train_flops": train_flops}
        if row["time/train_s"]:
            metrics["perf/mfu_train"] = train_flops / (row["time/train_s"] * self.train_peak)
        seconds = row["time/step_s"] if self.overlaps else row["time/generate_s"]
        if generate_flops and seconds:
            metrics["perf/generate_flops"] = generate_flops
            metrics["perf/mfu_generate"] = generate_flops / (seconds * self.generate_peak)
        return metrics


def peak_rss_bytes() -> float:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)

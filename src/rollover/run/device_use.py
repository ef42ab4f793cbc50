"""How busy the CPUs and GPUs of this machine are during a step.

CPU time is that of this process and its descendants, by role. GPU utilization is the mean of the samples that
the NVIDIA driver took since the step before (NVML, `pip install nvidia-ml-py`). What cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import psutil

from rollover.process_tree import descendants
from rollover.system import cores

# A word of a child's command line -> its role.
_ROLES = (
    ("rollover.rewards", "rewards"), ("rollover.trainer", "ranks"), ("rollover.engine.vllm_worker", "servers"),
    ("serve", "servers"), ("rollover.engine", "engine"), ("rollover.workflows", "agents"),
)  # fmt: skip


class DeviceUse:
    """Owns the CPU times and GPU samples read last."""

    def __init__(self) -> None:
        self._before = _cpu_by_process()
        self._gpus = _Gpus()
        self._gpus.mean()

    def of_step(self, seconds: float) -> dict[str, float]:
        """Shares of the machine's cores, and of the GPUs' time, in the `seconds` since the last call."""
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
    """The visible NVIDIA GPUs; none where NVML cannot be loaded."""

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
        except Exception:  # boundary: a library and a driver that may not be there; training does not need them
            self._handles = []

    def mean(self) -> float | None:
        """Mean utilization of all GPUs since the last call, a share; None where there is no sample."""
        nvml, shares = self._nvml, list[float]()
        for number, handle in enumerate(self._handles):
            try:
                kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
                _, samples = nvml.nvmlDeviceGetSamples(handle, kind, self._seen.get(number, 0))
            except Exception:  # boundary: no sample since the last call is an error there, too
                continue
            if samples:
                self._seen[number] = samples[-1].timeStamp
                shares.append(sum(s.sampleValue.uiVal for s in samples) / len(samples) / 100)
        return sum(shares) / len(shares) if shares else None

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

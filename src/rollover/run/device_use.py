"""Utilization of the CPUs and GPUs of this machine during a step, and model FLOPs utilization (MFU).

CPU time is that of this process and its descendants, by role. GPU utilization is the mean of the samples that
the NVIDIA driver took since the step before (NVML, `pip install nvidia-ml-py`). Missing readings are left out. MFU is
the FLOPs of the model (models/flops.py) divided by the peak FLOP/s of the devices and the time.

`estimate_of` is a rough duration of a run on a CPU, from the same numbers. It assumes answers of half of
rollout.max_new_tokens, and half of the peak (docs/performance.md has measurements).
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
from rollover.models.flops import ModelFlops, peak_flops
from rollover.process_tree import descendants
from rollover.system import cores
from rollover.track.figures import duration

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
    """Return pid -> (role, seconds of CPU time) of this process and its descendants that run."""
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
    """MFU of one run, by step."""

    def __init__(self, config: Config) -> None:
        self.is_remote = is_tinker(config)  # on unknown devices
        if self.is_remote:
            return
        dtype = dtype_of(config)
        trains_on, generates_on = pick_device(config.model.device), engine_device(config)
        self.overlaps = config.rollout.overlap
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


# Estimate of a run

_REACHED = 0.5  # of the peak, in decoding and in training alike
_FIXED_ROWS = 16  # minimum cost of a decode step in rows: reading the weights from memory
_SHORT_S, _LONG_S = 60.0, 30 * 60.0
_TRIAL = {"rollout.group_size": 4, "rollout.max_new_tokens": 64}


def estimate_of(config: Config, model: Any, steps_left: int) -> str:
    """Return `estimate` for a run on this CPU alone; "" for others."""
    here = (
        config.backend.type == "local"
        and not config.algorithm.supervised
        and config.engine.kind in ("embedded", "process")
    )
    if not here or not steps_left or {pick_device(config.model.device).type, engine_device(config).type} != {"cpu"}:
        return ""
    peak = peak_flops(engine_device(config), dtype_of(config), config.track.peak_tflops)
    return estimate(config, ModelFlops.from_model(model), peak, steps_left)


def seconds(config: Config, flops: ModelFlops, peak: float) -> tuple[float, float]:
    """Return the seconds of (a training step, an evaluation) on a device with this peak (FLOP/s)."""
    rollout, held_out = config.rollout, config.eval
    passes = 3 + config.algorithm.kl_in_loss + config.algorithm.kl_in_reward  # forward, backward for inputs and weights
    tokens = rollout.groups_per_step * rollout.group_size * rollout.max_new_tokens / 2
    step = _decoded(config, flops, tokens) + passes * _forward(flops, tokens)
    tokens = held_out.num_tasks * held_out.samples_per_task * (held_out.max_new_tokens or rollout.max_new_tokens) / 2
    return step / (_REACHED * peak), _decoded(config, flops, tokens) / (_REACHED * peak)


def estimate(config: Config, flops: ModelFlops, peak: float, steps_left: int) -> str:
    """Return a line, for a long run with settings for a trial; "" for a short run."""
    step_s, eval_s = seconds(config, flops, peak)
    every = config.eval.every_steps
    evaluations = (config.eval.at_start + 1 + (steps_left // every if every else 0)) * bool(config.eval.num_tasks)
    total_s = steps_left * step_s + evaluations * eval_s
    if total_s < _SHORT_S:
        return ""
    line = (
        f"about {duration(step_s)} a step and {duration(total_s)} in all on this CPU ({peak / 1e9:,.0f} GFLOP/s in"
        f" {config.model.dtype}), if answers have {config.rollout.max_new_tokens // 2} tokens on average"
    )
    options = {key: value for key, value in _TRIAL.items() if getattr(config.rollout, key.split(".")[1]) > value}
    if total_s <= _LONG_S or not options:
        return line
    return f"{line}\nfor a quick trial: " + " ".join(f"--{key} {value}" for key, value in options.items())


def _forward(flops: ModelFlops, tokens: float) -> float:
    return 2 * (flops.linear + flops.head) * tokens


def _decoded(config: Config, flops: ModelFlops, tokens: float) -> float:
    rows = max(1, min(config.engine.max_running, config.rollout.groups_per_step * config.rollout.group_size))
    return _forward(flops, tokens) * max(rows, _FIXED_ROWS) / rows

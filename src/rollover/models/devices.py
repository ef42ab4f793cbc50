"""Devices: selection, compute dtype, and the differences of CUDA and Apple's GPUs (MPS).

Owns no tensor. Other modules check a device's type only where they compute in another way there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from rollover.config import Config
from rollover.config.resume import change_in_run
from rollover.config.train import why_float32


def pick_device(device: str, key: str = "model.device") -> torch.device:
    """Return the torch device that `key` names; "auto" is CUDA if available. ValueError if it is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'{key} = "{device}" is not a device: use "auto", "cpu", "cuda", "cuda:1" or "mps"') from error
    missing = ""
    if found.type == "cuda":
        num = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= num:
            missing = f"only {num} CUDA devices" if num else "no CUDA device"
    elif found.type == "mps" and not torch.backends.mps.is_available():
        missing = "no Apple GPU"
    if missing:
        raise ValueError(f'{key} = "{device}", but torch sees {missing}: set {key} = "cpu" or "auto"')
    return found


def engine_device(config: Config) -> torch.device:
    """Return the device of the engine: engine.device, else model.device."""
    if config.engine.device:
        return pick_device(config.engine.device, "engine.device")
    return pick_device(config.model.device)


_FASTER = 1.3  # required speedup of bfloat16, to be worth its rounding


def dtype_of(config: Config) -> torch.dtype:
    """Return the compute dtype of trainer and engine, after deciding model.dtype = "auto"."""
    decide_dtype(config)
    return getattr(torch, config.model.dtype)


def decide_dtype(
    config: Config, decided: str = "", seconds: Callable[[torch.device, torch.dtype], float] | None = None
) -> str:
    """Replace model.dtype = "auto" in `config`, for all holders of it.

    Returns a line with the decision and its reason; "" if the dtype is given. `decided`: by an earlier start of the
    run. `seconds`: time of a matrix product of that dtype on that device; None: measured. A processor without bfloat16
    instructions reports support for it, and is up to fifty times slower.
    """
    if config.model.dtype != "auto":
        return ""
    chosen, why = decided, "as this run began"
    if reason := why_float32(config):
        chosen, why = "float32", reason
    elif not chosen:
        device, timed = pick_device(config.model.device), seconds or product_seconds
        ratio = timed(device, torch.float32) / timed(device, torch.bfloat16)
        chosen = "bfloat16" if ratio >= _FASTER else "float32"
        why = f"this device multiplies bfloat16 {ratio:.2g} times as fast as float32"
    change_in_run(config, "model.dtype", chosen)
    return f'model.dtype = "auto" is {chosen}: {why}'


def product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Return the median of five products after a warm-up, of a size that suits the device."""
    rows, size = (128, 1024) if device.type == "cpu" else (2048, 4096)
    # No random numbers: a run's come from the same generator.
    left = torch.linspace(-1, 1, rows * size, device=device).view(rows, size).to(dtype)
    right = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
    times = []
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        torch.nn.functional.linear(left, right)
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, which Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the device's random state by its name in a checkpoint; empty for a CPU."""
    if device.type == "cuda":
        return {"random/cuda": torch.cuda.get_rng_state(device)}
    return {"random/mps": torch.mps.get_rng_state()} if device.type == "mps" else {}


def set_random_state(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore a `random_state` of a device of this type."""
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
    if device.type == "mps" and "random/mps" in tensors:
        torch.mps.set_rng_state(tensors["random/mps"])

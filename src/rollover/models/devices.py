"""Devices: the one that a key names, what is computed in there, and what CUDA and Apple's GPUs (MPS) do in their own
ways.

Owns no tensor. Everything else asks a device's type only where it computes in another way there.
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
    """The torch device that `key` names: "auto" is CUDA if there is one. ValueError where there is none such."""
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
    """Where it generates: engine.device, else model.device."""
    if config.engine.device:
        return pick_device(config.engine.device, "engine.device")
    return pick_device(config.model.device)


_FASTER = 1.3  # how many times bfloat16 must be, to be worth its rounding


def dtype_of(config: Config) -> torch.dtype:
    """What trainer and engine compute in: model.dtype, which is decided first where it is "auto"."""
    decide_dtype(config)
    return getattr(torch, config.model.dtype)


def decide_dtype(
    config: Config, decided: str = "", seconds: Callable[[torch.device, torch.dtype], float] | None = None
) -> str:
    """Put a dtype in the place of model.dtype = "auto", for all who hold `config`.

    Returns a line that says what was decided and why; "" where the dtype is given.

    `decided`: by an earlier start of the run. `seconds`: of a matrix product of that dtype on that device; None: timed.
    A processor without instructions for bfloat16 says that it supports it, and is up to fifty times slower.
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
    """Median of five products after a warm-up: of a small model's layer, and on a GPU large enough to fill it."""
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
    """The dtype in which sums are kept: float64, which Apple's GPUs have not."""
    return torch.float32 if device.type == "mps" else torch.float64


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has computed what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the device's own random numbers, by the name that a checkpoint has for it; none for a CPU."""
    if device.type == "cuda":
        return {"random/cuda": torch.cuda.get_rng_state(device)}
    return {"random/mps": torch.mps.get_rng_state()} if device.type == "mps" else {}


def set_random_state(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> None:
    """Go on with what `random_state` gave, if that was on a device of this type."""
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
    if device.type == "mps" and "random/mps" in tensors:
        torch.mps.set_rng_state(tensors["random/mps"])

"""What a device can compute at best, in FLOP/s: the denominator of MFU. Given, known by its name, or measured.

Owns the table of names. Knows no model.
"""

from __future__ import annotations

import functools
import re
import time

import torch

from rollover.models.devices import synchronize

# Dense bfloat16 with float32 sums, TFLOP/s, without sparsity, as the vendors' data sheets have it. The first one that
# occurs in the device's name counts.
_BF16_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200 NVL", 835.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H800", 989.4),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.4),
)
_SECONDS = 0.02  # of one measurement, about
_TRIES = 5


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a device of this name; None: not in the table."""
    if dtype != torch.bfloat16:
        return None
    words = ((re.escape(device), tflops) for device, tflops in _BF16_TFLOPS)
    return next((tflops * 1e12 for words, tflops in words if re.search(rf"(?<!\w){words}(?!\w)", name)), None)


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of a few square matrix products, measured once in a process with so many threads. On a busy
    machine less than it can do alone."""
    return _measured(dtype, device, torch.get_num_threads())


@functools.cache
def _measured(dtype: torch.dtype, device: torch.device, num_threads: int) -> float:
    size = 1024 if device.type == "cpu" else 8192
    # No random numbers: a run's come from the same generator.
    left = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)

    def seconds(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(left, left)
        synchronize(device)
        return time.perf_counter() - started

    seconds(1)
    times = max(1, round(_SECONDS / seconds(1)))
    return 2 * size**3 * times / min(seconds(times) for _ in range(_TRIES))


def peak_flops(device: torch.device, dtype: torch.dtype, given_tflops: float = 0.0) -> float:
    """FLOP/s that the device computes at best in this dtype: as given, else of its name, else measured here."""
    if given_tflops:
        return given_tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return known_peak(name, dtype) or measured_peak(dtype, device)

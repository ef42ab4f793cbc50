"""What the machine can do: measured matmul rates, and the time of a model's linear layers alone: a benchmark's bound.

Shapes: n rows (sequences or tokens).
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Processor, threads and the versions that matter."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu)
    except OSError:
        pass
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def seconds(work: Callable[[], Any], runs: int) -> list[float]:
    """Wall seconds of each of `runs` calls after one warm-up call."""
    work()
    out = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        out.append(time.perf_counter() - started)
    return out


def rate(num_tokens: float, times: list[float]) -> tuple[float, list[float]]:
    """(median tokens per second, [lowest, highest])."""
    rates = [num_tokens / t for t in times]
    return statistics.median(rates), [min(rates), max(rates)]


def matmul_gflops(dtype: torch.dtype, size: int = 2048) -> float:
    """GFLOP/s of a square matrix product."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, 5)) / 1e9


@torch.no_grad()
def linear_decode_s(model: Any, rows: int, dtype: torch.dtype, runs: int) -> float:
    """Median seconds of the model's linear layers alone, in sequence, each with its own (cold) weights."""
    layers = [m.weight.detach().to(dtype) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(dtype) for w in layers}

    def once() -> None:
        for weight in layers:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return statistics.median(seconds(once, runs))


def linear_train_s(model: Any, rows: int, head_rows: int, dtype: torch.dtype, runs: int) -> float:
    """Median seconds of the three matmuls (forward, input and weight gradient) of every linear layer."""
    head = model.get_output_embeddings()
    work = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            n = head_rows if module is head else rows
            out, size = module.weight.shape
            work.append(
                (module.weight.detach().to(dtype), torch.randn(n, size).to(dtype), torch.randn(n, out).to(dtype))
            )

    def once() -> None:
        for weight, x, grad in work:
            torch.nn.functional.linear(x, weight)
            torch.matmul(grad, weight)
            torch.matmul(grad.T, x)

    return statistics.median(seconds(once, runs))

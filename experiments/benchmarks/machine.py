"""What the machine can do: measured matmul rates, and the time of a model's linear layers alone: a benchmark's bound.

Shapes: n rows (sequences or tokens).
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from rollover.models.packed import PackedWeight


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, threads and the versions that matter."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def progress(text: str) -> None:
    """A line on stderr: a benchmark takes minutes, and says where it is."""
    print(f"rollover: bench: {text}", file=sys.stderr, flush=True)


def alternate(works: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    """Wall seconds of `runs` calls of each, in turn after a warm-up call each, so that a slow minute hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(runs + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - started)
    return times


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


def matmul_gflops(dtype: torch.dtype, device: torch.device) -> float:
    """GFLOP/s of a square matrix product of 2,048 rows, or of the largest that takes no longer than 0.2 s: a processor
    without instructions of this type may be fifty times slower."""
    size = 256
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        took_s = statistics.median(seconds(lambda a=a, b=b: a @ b, 3))
        if size == 2048 or 8 * took_s > 0.2:
            return 2 * size**3 / took_s / 1e9
        size *= 2


def linear_layers(model: Any, rows: int, dtype: torch.dtype, *, packed: bool) -> Callable[[int], None]:
    """A function that runs the model's linear layers alone, in sequence, each with its own (cold) weights, n times."""
    weights = [m.weight.detach().to(dtype) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    device = weights[0].device
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], device=device).to(dtype) for w in weights}
    layers: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = [
        (w.shape[1], PackedWeight(w, None, rows) if packed else partial(torch.nn.functional.linear, weight=w))
        for w in weights
    ]

    @torch.no_grad()
    def run(times: int) -> None:
        for _ in range(times):
            for size, layer in layers:
                layer(inputs[size])

    return run


def linear_training(model: Any, rows: int, head_rows: int, dtype: torch.dtype) -> Callable[[], None]:
    """A function that runs the three matmuls (forward, input and weight gradient) of every linear layer."""
    head = model.get_output_embeddings()
    work = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            n = head_rows if module is head else rows
            weight = module.weight.detach().to(dtype)
            out, size = weight.shape
            x = torch.randn(n, size, device=weight.device).to(dtype)
            work.append((weight, x, torch.randn(n, out, device=weight.device).to(dtype)))

    @torch.no_grad()
    def run() -> None:
        for weight, x, grad in work:
            torch.nn.functional.linear(x, weight)
            torch.matmul(grad, weight)
            torch.matmul(grad.T, x)

    return run

"""Microseconds of the compiled kernels alone, on a CPU: attention of one layer to its cache, prefill, and draws.

    python scripts/kernel_times.py                             all cases, median of 7
    python scripts/kernel_times.py --cases draw --repeat 21    some, more often

One JSON object a case. The sizes are those of SmolLM2-135M in bfloat16. Repetitions take turns over several layers'
caches, so that rows come from memory, as in a decode step. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from rollover.models import kernels  # noqa: E402
from rollover.types import SamplingParams  # noqa: E402

HEADS, KV_HEADS, SIZE, VOCAB = 9, 3, 64, 49_152
CACHED = ((1, 4096), (4, 4096), (16, 2048), (64, 100), (64, 512), (256, 100))  # sequences, tokens of each in the cache
PROMPTS = ((64, 32), (16, 128), (4, 512), (1, 2048))  # sequences, new tokens of each
DRAWS = {
    "not truncated": SamplingParams(),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_p 0.99": SamplingParams(top_p=0.99),
    "top_k 50": SamplingParams(top_k=50),
    "min_p 0.05": SamplingParams(min_p=0.05),
}
ROWS_DRAWN = 64
Case = tuple[str, str, Callable[[int], object]]


def cases(loaded: kernels.Kernels, names: list[str], layers: int) -> Iterator[Case]:
    """(kind, sizes, what to time with the number of the repetition)."""
    if "attention" in names:
        for sequences, tokens in CACHED:
            yield "attention", f"{sequences} x {tokens} cached", attention(loaded, sequences, tokens - 1, 1, layers)
    if "prefill" in names:
        for sequences, tokens in PROMPTS:
            yield "prefill", f"{sequences} x {tokens} new", attention(loaded, sequences, 0, tokens, layers)
    if "draw" in names:
        # As steep as a language model's: the probability falls with the square of the rank.
        by_rank = -2 * torch.arange(1, VOCAB + 1).log()
        logits_NV = torch.stack([by_rank[torch.randperm(VOCAB)] for _ in range(ROWS_DRAWN)]).bfloat16()
        for name, params in DRAWS.items():
            yield "draw", f"{ROWS_DRAWN} rows, {name}", draw(loaded, logits_NV, params)


def attention(
    loaded: kernels.Kernels, sequences: int, cached: int, new: int, layers: int
) -> Callable[[int], torch.Tensor]:
    """`new` tokens of each sequence attend to the `cached` ones before them, and to each other, in one layer."""
    shape = (sequences, KV_HEADS, cached + new, SIZE)
    keys = [torch.randn(shape).bfloat16() for _ in range(layers)]
    values = [torch.randn(shape).bfloat16() for _ in range(layers)]
    rows_N = torch.arange(sequences).repeat_interleave(new)
    positions_N = torch.arange(cached, cached + new).repeat(sequences)
    where = kernels.CachedRows([(keys, values)], torch.zeros_like(rows_N), rows_N, positions_N)
    query_NHD = torch.randn(len(rows_N), HEADS, SIZE).bfloat16()
    key_NKD, value_NKD = (torch.randn(len(rows_N), KV_HEADS, SIZE).bfloat16() for _ in range(2))
    return lambda i: loaded.cached_attention(
        query_NHD, key_NKD, value_NKD, where, i % layers, scale=SIZE**-0.5, window=None
    )


def draw(loaded: kernels.Kernels, logits_NV: torch.Tensor, params: SamplingParams) -> Callable[[int], object]:
    """A token of each row."""
    num = len(logits_NV)
    uniforms_N = torch.rand(num, dtype=torch.float64)
    return lambda _: loaded.draw(logits_NV, [params] * num, uniforms_N)


def microseconds(work: Callable[[int], object], repeat: int) -> float:
    """Median of so many calls, after two that are not counted."""
    times = []
    for i in range(repeat + 2):
        started = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=("attention", "prefill", "draw"))
    parser.add_argument("--repeat", type=int, default=7, help="calls of each case (default: 7)")
    parser.add_argument("--layers", type=int, default=8, help="caches that the calls take in turns (default: 8)")
    args = parser.parse_args()
    torch.manual_seed(0)
    loaded = kernels.load()
    for kind, sizes, work in cases(loaded, args.cases or ["attention", "prefill", "draw"], args.layers):
        row = {"case": kind, "sizes": sizes, "microseconds": round(microseconds(work, args.repeat), 1)}
        print(json.dumps(row | {"threads": torch.get_num_threads()}), flush=True)


if __name__ == "__main__":
    main()

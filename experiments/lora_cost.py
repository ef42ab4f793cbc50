"""What adapters cost an engine: the time of a decode step with them beside the weights, and merged. Writes nothing.

    .venv/bin/python experiments/lora_cost.py        SmolLM2 in bfloat16, rank 16, about 2 minutes on two cores

The two engines take turns, so that a machine that gets slower slows both. Printed for each number of sequences at once:
the median milliseconds of a decode step of either, and their quotient. What the adapters hold is of no matter.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time

from rollover.config import LoraConfig
from rollover.config.load import load_config
from rollover.engine.build import embedded_engine
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.load import load_model
from rollover.models.threads import prepare_process
from rollover.trainer.lora import adapter_weights, add_lora, base_weights, merged_weights
from rollover.types import Prompt, SamplingParams

PROMPT_TOKENS = 32


async def seconds(engine: EmbeddedEngine, num: int, num_tokens: int) -> float:
    """Mean seconds of a decode step of `num` sequences; the prefill is not counted."""
    prompts = [tuple(range(100 + i, 100 + i + PROMPT_TOKENS)) for i in range(num)]

    async def run(num_new: int) -> float:
        requests = [ExtendRequest(str(i), Prompt(p), (), num_new, i, SamplingParams()) for i, p in enumerate(prompts)]
        started = time.perf_counter()
        await asyncio.gather(*map(engine.extend, requests))
        engine.release([r.rollout_id for r in requests])
        return time.perf_counter() - started

    return (await run(num_tokens + 1) - await run(1)) / num_tokens


async def compare(engines: dict[str, EmbeddedEngine], args: argparse.Namespace) -> None:
    for num in args.sequences:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(args.repeats + 1):
            for name, engine in engines.items():
                step_s = await seconds(engine, num, args.tokens)
                if turn:  # the first one warms up
                    times[name].append(step_s)
        middle = {name: 1000 * statistics.median(of) for name, of in times.items()}
        print(
            f"{num:4} sequences: {middle['adapters']:7.2f} ms a step with adapters of rank {args.rank},"
            f" {middle['merged']:7.2f} ms merged: {middle['adapters'] / middle['merged']:.2f} times",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="decode steps of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 64])
    args = parser.parse_args()
    config = load_config([], [("engine.max_running", str(max(args.sequences)))], require_sources=False).config
    prepare_process(config)
    loaded = load_model(config.model)
    engines = {name: embedded_engine(loaded, config) for name in ("adapters", "merged")}
    adapted = add_lora(copy.deepcopy(loaded.model), LoraConfig(rank=args.rank)).get_base_model()

    async def go() -> None:
        await engines["adapters"].load_weights(1, [*base_weights(adapted), *adapter_weights(adapted)])
        await engines["merged"].load_weights(1, merged_weights(adapted))
        await compare(engines, args)

    asyncio.run(go())


if __name__ == "__main__":
    main()

"""`rollover bench engine`: the embedded engine's decode rate beside transformers' generate and its linear layers."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import torch

from rollover.bench import machine
from rollover.config import Config, EngineConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.load import load_model, pick_device
from rollover.train.setup import dtype_of, prepare_process
from rollover.types import SamplingParams, rollout_seed

PROMPT_TOKENS = 32
NEW_TOKENS = 128
CASES = (1, 32, 64)


def _prompt(vocab: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, vocab - 10, (PROMPT_TOKENS,), generator=generator).tolist())


def _ours(engine: EmbeddedEngine, vocab: int, num: int) -> None:
    async def go() -> None:
        await asyncio.gather(
            *[
                engine.extend(
                    ExtendRequest(
                        f"{i}", _prompt(vocab, i), (), NEW_TOKENS, rollout_seed(0, "bench", 0, i), SamplingParams()
                    )
                )
                for i in range(num)
            ]
        )

    asyncio.run(go())


@torch.no_grad()
def _generate(model: Any, vocab: int, num: int) -> None:
    ids = torch.tensor([_prompt(vocab, i) for i in range(num)], device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )


def run(config: Config, runs: int) -> dict[str, Any]:
    """Engine and `generate` in turn, case by case; every sequence generates exactly NEW_TOKENS tokens."""
    prepare_process(config)
    dtype, device = dtype_of(config), pick_device(config.model.device)
    loaded = load_model(config.model, dtype=dtype, device=device)
    vocab = loaded.model.config.get_text_config().vocab_size
    ours = copy.deepcopy(loaded.model)
    peer = loaded.model
    peer.set_attn_implementation("sdpa")
    engine = EmbeddedEngine(ours, EngineConfig(max_running=max(CASES), kv_memory_gb=config.engine.kv_memory_gb))
    results: list[dict[str, Any]] = []
    rates: dict[tuple[str, int], float] = {}
    versions = machine.describe()
    for num in CASES:
        shape = f"{num} sequences, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {config.model.dtype}"
        systems = [("rollover", "0", lambda n=num: _ours(engine, vocab, n), f"embedded engine, {shape}")]
        if num <= 32:
            systems.append(
                (
                    "transformers generate",
                    versions["transformers"],
                    lambda n=num: _generate(peer, vocab, n),
                    f"sdpa, {shape}",
                )
            )
        for system, release, work, setting in systems:
            median, spread = machine.rate(num * NEW_TOKENS, machine.seconds(work, runs))
            rates[system, num] = median
            results.append(
                {"case": f"decode_{num}", "system": system, "version": release, "setting": setting,
                 "tokens_per_s": median, "spread": spread}
            )  # fmt: skip
        bound = num / machine.linear_decode_s(ours, num, dtype, 10)
        rates["bound", num] = bound
        results.append(
            {"case": f"decode_{num}", "system": "linear layers alone", "version": versions["torch"],
             "setting": "in sequence, cold weights", "tokens_per_s": bound, "spread": [bound, bound]}
        )  # fmt: skip
    return {
        "benchmark": "engine",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype)},
        "results": results,
        "ratios": {
            "engine_1_vs_generate": rates["rollover", 1] / rates["transformers generate", 1],
            "engine_32_vs_generate": rates["rollover", 32] / rates["transformers generate", 32],
            "engine_32_vs_linear_bound": rates["rollover", 32] / rates["bound", 32],
            "engine_64_vs_linear_bound": rates["rollover", 64] / rates["bound", 64],
        },
    }

"""`rollover bench engine`: the embedded engine's decode rate beside transformers' generate and its linear layers."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import Any

import torch

import rollover
from rollover.bench import machine
from rollover.config import Config, EngineConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.load import load_model, pick_device
from rollover.models.packed import PackedWeight
from rollover.train.setup import dtype_of, prepare_process
from rollover.types import SamplingParams, rollout_seed

PROMPT_TOKENS = 32
NEW_TOKENS = 128
CASES = (1, 32, 64, 256)
GENERATE_CASES = (1, 32)
CONTINUOUS_CASE = 32
LINEAR_STEPS = 16  # of which the rate of NEW_TOKENS is extrapolated: they are all alike


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


def _continuous(model: Any, vocab: int, num: int) -> None:
    """transformers' own continuous batching (paged cache)."""
    from transformers import GenerationConfig

    generation = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    out = model.generate_batch([list(_prompt(vocab, i)) for i in range(num)], generation_config=generation)
    assert sum(len(o.generated_tokens) for o in out.values()) == num * NEW_TOKENS


def run(config: Config, runs: int) -> dict[str, Any]:
    """The systems in turn, case by case; every sequence generates exactly NEW_TOKENS tokens."""
    prepare_process(config)
    dtype, device = dtype_of(config), pick_device(config.model.device)
    peer = load_model(config.model, dtype=dtype, device=device).model
    vocab = peer.config.get_text_config().vocab_size
    engine = EmbeddedEngine(
        copy.deepcopy(peer), EngineConfig(max_running=max(CASES), kv_memory_gb=config.engine.kv_memory_gb)
    )
    peer.set_attn_implementation("sdpa")
    versions = machine.describe(device)
    results: list[dict[str, Any]] = []
    rates: dict[tuple[str, int], float] = {}
    for num in CASES:
        works = {
            "rollover": partial(_ours, engine, vocab, num),
            "linear layers alone": partial(machine.linear_layers(peer, num, dtype, packed=False), LINEAR_STEPS),
        }
        settings = {"rollover": "embedded engine", "linear layers alone": "in sequence, cold weights, as they are"}
        if PackedWeight.supported(device, dtype):
            works["packed"] = partial(machine.linear_layers(peer, num, dtype, packed=True), LINEAR_STEPS)
            settings["packed"] = "linear layers alone, in oneDNN's blocked layout"
        if num in GENERATE_CASES:
            works["generate"] = partial(_generate, peer, vocab, num)
            settings["generate"] = "transformers generate, sdpa, dynamic cache"
        for system, times in machine.alternate(works, runs if num < 256 else 1).items():
            if system in ("linear layers alone", "packed"):
                times = [t * NEW_TOKENS / LINEAR_STEPS for t in times]
            results.append(_result(num, system, settings[system], times, versions, config))
            rates[system, num] = results[-1]["tokens_per_s"]
    num = CONTINUOUS_CASE
    times = machine.alternate({"continuous": partial(_continuous, peer, vocab, num)}, 1)["continuous"]
    results.append(
        _result(num, "continuous", "transformers generate_batch, paged sdpa, one run", times, versions, config)
    )
    rates["continuous", num] = results[-1]["tokens_per_s"]
    ratios = {f"engine_{n}_vs_linear_bound": rates["rollover", n] / rates["linear layers alone", n] for n in CASES}
    ratios |= {
        f"engine_{n}_vs_packed_linear_bound": rates["rollover", n] / rates["packed", n]
        for n in CASES
        if ("packed", n) in rates
    }
    ratios |= {f"engine_{n}_vs_generate": rates["rollover", n] / rates["generate", n] for n in GENERATE_CASES}
    ratios["engine_32_vs_continuous_batching"] = rates["rollover", num] / rates["continuous", num]
    return {
        "benchmark": "engine",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype, device)},
        "results": results,
        "ratios": ratios,
    }


def _result(
    num: int, system: str, setting: str, times: list[float], versions: dict[str, Any], config: Config
) -> dict[str, Any]:
    median, spread = machine.rate(num * NEW_TOKENS, times)
    version = {
        "rollover": rollover.__version__, "linear layers alone": versions["torch"], "packed": versions["torch"]
    }  # fmt: skip
    return {
        "case": f"decode_{num}",
        "system": system,
        "version": version.get(system, versions["transformers"]),
        "setting": f"{setting}; {num} sequences, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {config.model.dtype}",
        "tokens_per_s": median,
        "spread": spread,
    }

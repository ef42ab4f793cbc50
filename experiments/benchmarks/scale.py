"""`rollover bench scale`: how decoding grows with sequences and context, training with samples, memory with both."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import rollover
from benchmarks import machine, workload
from local_trainer import local_trainer
from rollover.config import Config, EngineConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.models.devices import dtype_of, pick_device
from rollover.models.load import load_model
from rollover.models.threads import prepare_process
from rollover.trainer.batch import Batch

SEQUENCES = (1, 4, 16, 64, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096)
NEW_TOKENS = 16
KV_GB = 4.0
SAMPLES = (16, 32, 64, 128, 256)
SIBLINGS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 48, 64


def _peak_memory_gb(*, reset: bool = False) -> float | None:
    """The process's peak resident memory since the last reset; None where the system does not tell."""
    try:
        if reset:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


def _decode(config: Config, device: torch.device) -> Iterator[dict[str, Any]]:
    model = load_model(config.model, dtype=dtype_of(config), device=device).model
    vocab = model.config.get_text_config().vocab_size
    engine = EmbeddedEngine(model, EngineConfig(max_running=max(SEQUENCES), kv_memory_gb=KV_GB))
    for context in CONTEXTS:
        num_tokens = context + workload.TOKENS_BEFORE + NEW_TOKENS
        if num_tokens > engine.max_tokens:
            continue
        for num in SEQUENCES:
            if num * num_tokens * engine.kv_bytes_per_token * 1.5 > KV_GB * 1e9:
                continue  # rows are up to a half longer than what they hold
            _peak_memory_gb(reset=True)
            seconds = workload.decode_seconds(engine, [workload.prompt(vocab, context, 0)] * num, NEW_TOKENS)
            yield {
                "case": f"decode_{num}_at_{context}",
                "setting": f"{num} sequences, context {context}, {seconds / NEW_TOKENS * 1e3:.1f} ms a step",
                "tokens_per_s": num * NEW_TOKENS / seconds,
                "peak_memory_gb": _peak_memory_gb(),
            }


def _batch(vocab: int, num: int) -> Batch:
    return Batch(workload.samples(vocab, PROMPT_TOKENS, [ANSWER_TOKENS] * num, SIBLINGS))


def _train(config: Config, device: torch.device) -> Iterator[dict[str, Any]]:
    loaded = load_model(config.model, device=device)
    vocab = loaded.model.config.get_text_config().vocab_size
    trainer = local_trainer(
        loaded, config.train, config.algorithm, dtype=dtype_of(config), max_new_tokens=ANSWER_TOKENS
    )
    trainer.train_step(_batch(vocab, min(SAMPLES)))
    for num in SAMPLES:
        _peak_memory_gb(reset=True)
        started = time.perf_counter()
        trainer.train_step(_batch(vocab, num))
        seconds = time.perf_counter() - started
        yield {
            "case": f"train_{num}",
            "setting": f"{num} samples of {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens, {seconds:.1f} s a step,"
            f" micro-batches of {config.train.micro_batch_tokens} tokens",
            "tokens_per_s": num * ANSWER_TOKENS / seconds,
            "peak_memory_gb": _peak_memory_gb(),
        }


def run(config: Config, runs: int) -> dict[str, Any]:
    """One measurement of each size: `runs` is not used, the trend over sizes is the result."""
    prepare_process(config)
    device = pick_device(config.model.device)
    versions = machine.describe(device)
    results = []
    for result in chain(_decode(config, device), _train(config, device)):
        machine.progress(f"{result['case']}: {result['tokens_per_s']:.0f} tokens/s")
        spread = [result["tokens_per_s"]] * 2
        results.append(result | {"system": "rollover", "version": rollover.__version__, "spread": spread})
    versions["matmul_gflops"] = machine.matmul_gflops(dtype_of(config), device)
    return {"benchmark": "scale", "machine": versions, "results": results, "ratios": {}}

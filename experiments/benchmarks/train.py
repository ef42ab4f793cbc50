"""`rollover bench train`: the rate of training steps beside their matmuls alone and transformers' loss."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

import rollover
from benchmarks import machine, workload
from local_trainer import local_trainer
from rollover.config import Config
from rollover.models.devices import dtype_of, pick_device
from rollover.models.flops import peak_flops
from rollover.models.load import load_model
from rollover.models.threads import prepare_process
from rollover.trainer.batch import Batch
from rollover.types import Sample

MICRO_BATCH_TOKENS = 4096
PROMPT_TOKENS, SIBLINGS, GROUPS = 48, 8, 12
SHARED_PROMPT, SHARED_ANSWER, SHARED_GROUPS = 256, 128, 2


def _answer_lengths(num: int) -> list[int]:
    """Log-normal, median 32, at most 128."""
    drawn = np.random.default_rng(0).lognormal(np.log(32), 0.8, num)
    return np.clip(drawn, 4, 128).astype(int).tolist()


def _padded_loss(model: Any, samples: list[Sample], rows: int) -> None:
    """The plain way: padded micro-batches of `rows` samples through transformers' own forward and loss."""
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        width = max(len(s.prompt_ids) + len(s.token_ids) for s in part)
        ids = torch.zeros(len(part), width, dtype=torch.long, device=model.device)
        mask = torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for i, s in enumerate(part):
            row = torch.from_numpy(np.concatenate([s.prompt_ids, s.token_ids]).astype(np.int64))
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
            labels[i, len(s.prompt_ids) : len(row)] = row[len(s.prompt_ids) :]
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    model.zero_grad(set_to_none=True)


def run(config: Config, runs: int) -> dict[str, Any]:
    """Whole training steps (forward, backward, optimizer) on packed micro-batches, beside the padded way."""
    prepare_process(config)
    dtype, device = dtype_of(config), pick_device(config.model.device)
    peer = load_model(config.model, dtype=dtype, device=device).model
    peer.set_attn_implementation("sdpa")
    loaded = load_model(config.model, device=device)
    vocab = loaded.model.config.get_text_config().vocab_size
    samples = workload.samples(vocab, PROMPT_TOKENS, _answer_lengths(GROUPS * SIBLINGS), SIBLINGS)
    answers = sum(len(s.token_ids) for s in samples)
    tokens = GROUPS * PROMPT_TOKENS + answers  # those that a pass with shared prompts computes
    options = config.train.model_copy(update={"micro_batch_tokens": MICRO_BATCH_TOKENS})
    trainer = local_trainer(loaded, options, config.algorithm, dtype=dtype, max_new_tokens=128)
    fixed = [SHARED_ANSWER] * (SHARED_GROUPS * SIBLINGS)
    long = {s: workload.samples(vocab, SHARED_PROMPT, fixed, SIBLINGS, shared=s) for s in (True, False)}
    linear = machine.linear_training(peer, tokens, answers, dtype)
    flops = 0.0

    def step() -> None:
        nonlocal flops
        before = trainer.backend.flops
        trainer.train_step(Batch(samples))
        flops = trainer.backend.flops - before

    times = machine.alternate(
        {
            "rollover": step,
            "transformers": lambda: _padded_loss(peer, samples, 8),
            "linear layers alone": linear,
            "shared": lambda: trainer.train_step(Batch(long[True])),
            "unshared": lambda: trainer.train_step(Batch(long[False])),
        },
        runs,
    )
    peak = peak_flops(device, dtype, config.track.peak_tflops)
    versions = machine.describe(device) | {"peak_tflops": peak / 1e12}
    shape = (
        f"{len(samples)} samples of {SIBLINGS} siblings, {tokens} tokens, {answers} in the loss, {config.model.dtype}"
    )
    long_shape = f"{len(fixed)} samples, prompt {SHARED_PROMPT}, answer {SHARED_ANSWER}"
    packed = f"packed, {MICRO_BATCH_TOKENS} tokens a micro-batch, with AdamW"
    rows = {
        "rollover": ("step", "rollover", f"{packed}; {shape}", tokens),
        "transformers": ("step", "transformers", f"padded, 8 rows, sdpa, no optimizer; {shape}", tokens),
        "linear layers alone": ("step", "linear layers alone", "forward and both gradients, one batch", tokens),
        "shared": ("shared_prompt", "rollover", f"{packed}; {long_shape}", len(fixed) * SHARED_ANSWER),
        "unshared": ("shared_prompt", "rollover, prompt for each sample", f"{packed}; {long_shape}",
                     len(fixed) * SHARED_ANSWER),
    }  # fmt: skip
    results, rates = [], {}
    for name, (case, system, setting, count) in rows.items():
        rates[name], spread = machine.rate(count, times[name])
        results.append(
            {"case": case, "system": system, "version": versions.get(system, rollover.__version__),
             "setting": setting, "tokens_per_s": rates[name], "spread": spread}
        )  # fmt: skip
    results[0]["mfu"] = flops / statistics.median(times["rollover"]) / peak
    return {
        "benchmark": "train",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype, device)},
        "results": results,
        "ratios": {
            "train_vs_linear_bound": rates["rollover"] / rates["linear layers alone"],
            "train_vs_transformers_padded": rates["rollover"] / rates["transformers"],
            "train_shared_prompt_speedup": rates["shared"] / rates["unshared"],
        },
    }

"""`rollover bench train`: the rate of training steps beside their matmuls alone and transformers' loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollover.bench import machine
from rollover.config import Config
from rollover.models.load import load_model, pick_device
from rollover.train.batch import Batch
from rollover.train.setup import dtype_of, prepare_process
from rollover.train.trainer import Trainer
from rollover.types import Sample

NUM_SAMPLES = 48
PROMPT_TOKENS = 48


def _samples(vocab: int) -> list[Sample]:
    """Log-normal answer lengths (median 32, at most 128), groups of 8 with one prompt each."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(NUM_SAMPLES):
        n = int(np.clip(rng.lognormal(np.log(32), 0.8), 4, 128))
        prompt = np.random.default_rng(i // 8).integers(10, vocab - 10, PROMPT_TOKENS)
        out.append(
            Sample(
                rollout_id=f"{i // 8}-{i % 8}",
                group_id=i // 8,
                prompt_ids=prompt.astype(np.int32),
                token_ids=rng.integers(10, vocab - 10, n).astype(np.int32),
                mask=np.ones(n, dtype=bool),
                behavior_logprobs=np.full(n, -10.0, dtype=np.float32),
                versions=np.zeros(n, dtype=np.int32),
                advantages=np.full(n, (-1.0) ** i, dtype=np.float32),
                temperature=1.0,
            )
        )
    return out


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
    """Whole training steps (forward, backward, optimizer) on packed micro-batches."""
    prepare_process(config)
    dtype, device = dtype_of(config), pick_device(config.model.device)
    peer = load_model(config.model, dtype=dtype, device=device).model
    peer.set_attn_implementation("sdpa")
    loaded = load_model(config.model, device=device)
    vocab = loaded.model.config.get_text_config().vocab_size
    samples = _samples(vocab)
    tokens = sum(len(s.prompt_ids) + len(s.token_ids) for s in samples)
    loss_tokens = sum(len(s.token_ids) for s in samples)
    trainer = Trainer(loaded, config.train, config.algorithm, dtype=dtype, max_new_tokens=128)
    ours, ours_spread = machine.rate(tokens, machine.seconds(lambda: trainer.train_step(Batch(samples)), runs))
    theirs, theirs_spread = machine.rate(tokens, machine.seconds(lambda: _padded_loss(peer, samples, 8), runs))
    bound = tokens / machine.linear_train_s(peer, tokens, loss_tokens, dtype, runs)
    versions = machine.describe()
    setting = f"{NUM_SAMPLES} samples, {tokens} tokens, {loss_tokens} in the loss, {config.model.dtype}"
    rows = [
        (
            "rollover",
            "0",
            f"packed, {config.train.micro_batch_tokens} tokens a micro-batch, with AdamW; {setting}",
            ours,
            ours_spread,
        ),
        (
            "transformers",
            versions["transformers"],
            f"padded, 8 rows, sdpa, no optimizer; {setting}",
            theirs,
            theirs_spread,
        ),
        ("linear layers alone", versions["torch"], "forward and both gradients, one batch", bound, [bound, bound]),
    ]
    return {
        "benchmark": "train",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype)},
        "results": [
            {"case": "step", "system": s, "version": v, "setting": text, "tokens_per_s": r, "spread": spread}
            for s, v, text, r, spread in rows
        ],
        "ratios": {"train_vs_linear_bound": ours / bound, "train_vs_transformers_padded": ours / theirs},
    }

"""LoRA: only adapters train, and what is saved is the merged plain model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import random_samples
from transformers import AutoModelForCausalLM

import tiny
from rollover.config import AlgorithmConfig, LoraConfig, TrainConfig
from rollover.train.batch import Batch
from rollover.train.lora import add_lora
from rollover.train.objective import Counts
from rollover.train.trainer import Trainer

SAMPLES = random_samples(1)
TARGETS = ["q_proj", "down_proj"]


def trainer(dtype: torch.dtype = torch.float32, dropout: float = 0.0, **train: Any) -> Trainer:
    torch.manual_seed(3)
    return Trainer(
        tiny.loaded(),
        TrainConfig.model_validate({"learning_rate": 1e-2, "num_steps": 10, **train}),
        AlgorithmConfig(),
        dtype=dtype,
        max_new_tokens=16,
        lora=LoraConfig(rank=4, alpha=8.0, dropout=dropout, target_modules=TARGETS),
    )


def test_only_adapters_have_masters_and_change() -> None:
    t = trainer(torch.bfloat16)
    assert len(t.optimizer.names) == 2 * 2 * len(TARGETS) and all(".lora_" in n for n in t.optimizer.names)
    frozen = {n: p.detach().clone() for n, p in t.model.named_parameters() if not p.requires_grad}
    t.train_step(Batch(SAMPLES))
    assert all(torch.equal(p, frozen[n]) for n, p in t.model.named_parameters() if n in frozen)
    tensors, _ = t.save_state()
    assert sum(k.startswith("master/") for k in tensors) == len(t.optimizer.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_saved_model_is_the_merge(dtype: torch.dtype, tmp_path: Path) -> None:
    """In float32, rounded once; peft's own merge rounds the product before the sum."""
    t = trainer(dtype)
    for _ in range(3):
        t.train_step(Batch(SAMPLES))
    t.save_model(tmp_path / "merged")
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    in_float32 = copy.deepcopy(t.model).float()
    merged = dict(in_float32.merge_and_unload().named_parameters())
    start = dict(tiny.model().named_parameters())
    assert saved.keys() == merged.keys() == start.keys()
    for name, parameter in saved.items():
        assert parameter.dtype == dtype
        torch.testing.assert_close(parameter.float(), merged[name].to(dtype).float(), atol=1e-6, rtol=0)
        assert torch.equal(parameter, start[name].to(dtype)) != any(f".{x}." in name for x in TARGETS)

    reference = Trainer(tiny.loaded(), TrainConfig(), AlgorithmConfig(), dtype=dtype, max_new_tokens=16)
    reference.model.load_state_dict(saved, strict=False)
    expected, got = reference.compute_logprobs(SAMPLES), t.compute_logprobs(SAMPLES)
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, atol=2e-5 if dtype == torch.float32 else 0.15)


def test_layers_with_the_weight_the_other_way_round_are_merged(tmp_path: Path) -> None:
    t = Trainer(
        tiny.loaded("gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=256),
        TrainConfig(learning_rate=1e-2, num_steps=10),
        AlgorithmConfig(),
        dtype=torch.float32,
        max_new_tokens=16,
        lora=LoraConfig(rank=4, alpha=8.0, target_modules=["c_attn"]),
    )
    for _ in range(3):
        t.train_step(Batch(SAMPLES))
    t.save_model(tmp_path / "merged")
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    for name, parameter in copy.deepcopy(t.model).merge_and_unload().named_parameters():
        torch.testing.assert_close(saved[name], parameter, atol=1e-6, rtol=0)


def test_resumed_adapters_publish_everything_again() -> None:
    t = trainer()
    t.train_step(Batch(SAMPLES))
    tensors, meta = t.save_state()
    resumed = trainer()
    resumed.load_state({k: v.clone() for k, v in tensors.items()}, meta)
    expected, got = dict(t.publish()), dict(resumed.publish())
    assert got.keys() == expected.keys() > dict(tiny.model().named_parameters()).keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)
    assert resumed.train_step(Batch(SAMPLES)) == t.train_step(Batch(SAMPLES))


def test_dropout_acts_in_training_only() -> None:
    t = trainer(dropout=0.5, micro_batch_tokens=40)
    for _ in range(3):
        t.train_step(Batch(SAMPLES))  # adapters start at zero, where dropout has no effect
    assert all(np.array_equal(a, b) for a, b in zip(*(t.compute_logprobs(SAMPLES).values() for _ in "ab"), strict=True))
    clean = t.compute_logprobs(SAMPLES)
    t.forward_backward(SAMPLES, Counts.of(SAMPLES))
    assert all(np.array_equal(v, clean[k]) for k, v in t.compute_logprobs(SAMPLES).items()), "after a training pass too"
    losses = [
        float(t.forward_backward(SAMPLES, Counts.of(SAMPLES), {"proximal": t.compute_logprobs(SAMPLES)})["max/ratio"])
        for _ in range(2)
    ]
    assert losses[0] != losses[1] and losses[0] > 1.0


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["nothing"], "no layer 'nothing'"),
        (["q_proj", "typo"], "no layer 'typo'"),
        (["lm_head"], "'lm_head' is an embedding"),
        (["embed_tokens"], "'embed_tokens' is an embedding"),
    ],
)
def test_bad_targets_are_errors(targets: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"model.lora.target_modules: .*{message}"):
        add_lora(tiny.model(), LoraConfig(rank=4, target_modules=targets))

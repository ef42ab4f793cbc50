"""LoRA: only adapters train, and what is saved is the merged plain model with the adapters beside it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, LoraConfig, ModelConfig, TrainConfig
from rollover.models.load import LoadedModel, load_model
from rollover.trainer.batch import Batch
from rollover.trainer.lora import ADAPTER, add_lora, read_adapter
from rollover.trainer.objective import Counts
from rollover.trainer.streams import with_stream
from rollover.trainer.trainer import Trainer
from samples import random_samples
from virtual_time import at_once

SAMPLES = random_samples(1)
TARGETS = ["q_proj", "down_proj"]


def trainer(dtype: torch.dtype = torch.float32, dropout: float = 0.0, **train: Any) -> Trainer:
    torch.manual_seed(3)
    return local_trainer(
        tiny.loaded(),
        TrainConfig.model_validate({"learning_rate": 1e-2, "num_steps": 10, **train}),
        AlgorithmConfig(),
        dtype=dtype,
        max_new_tokens=16,
        lora=LoraConfig(rank=4, alpha=8.0, dropout=dropout, target_modules=TARGETS),
    )


def test_only_adapters_have_masters_and_change() -> None:
    t = trainer(torch.bfloat16)
    assert len(tiny.local(t).optimizer.names) == 2 * 2 * len(TARGETS) and all(
        ".lora_" in n for n in tiny.local(t).optimizer.names
    )
    frozen = {n: p.detach().clone() for n, p in tiny.local(t).model.named_parameters() if not p.requires_grad}
    t.train_step(Batch(SAMPLES))
    assert all(torch.equal(p, frozen[n]) for n, p in tiny.local(t).model.named_parameters() if n in frozen)
    tensors, _ = t.backend.save_state()
    assert sum(k.startswith("master/") for k in tensors) == len(tiny.local(t).optimizer.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_saved_model_is_the_merge(dtype: torch.dtype, tmp_path: Path) -> None:
    """In float32, rounded once; peft's own merge rounds the product before the sum."""
    t = trainer(dtype)
    for _ in range(3):
        t.train_step(Batch(SAMPLES))
    t.backend.save_model(tmp_path / "merged")
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    in_float32 = copy.deepcopy(tiny.local(t).model).float()
    merged = dict(in_float32.merge_and_unload().named_parameters())
    start = dict(tiny.model().named_parameters())
    assert saved.keys() == merged.keys() == start.keys()
    for name, parameter in saved.items():
        assert parameter.dtype == dtype
        torch.testing.assert_close(parameter.float(), merged[name].to(dtype).float(), atol=1e-6, rtol=0)
        assert torch.equal(parameter, start[name].to(dtype)) != any(f".{x}." in name for x in TARGETS)

    reference = local_trainer(tiny.loaded(), TrainConfig(), AlgorithmConfig(), dtype=dtype, max_new_tokens=16)
    tiny.local(reference).model.load_state_dict(saved, strict=False)
    expected, got = reference.backend.compute_logprobs(SAMPLES), t.backend.compute_logprobs(SAMPLES)
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, atol=2e-5 if dtype == torch.float32 else 0.15)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_the_saved_adapters_over_the_base_model(family: str, tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256} if family == "gpt2" else {}
    tiny.save(tmp_path / "base", family, **sizes)
    torch.manual_seed(3)
    t = local_trainer(
        LoadedModel(tiny.model(family, **sizes), tiny.tokenizer(), str(tmp_path / "base")),
        TrainConfig(learning_rate=1e-2, num_steps=10),
        AlgorithmConfig(),
        dtype=torch.float32,
        max_new_tokens=16,
        lora=LoraConfig(rank=4, alpha=5.3, target_modules=TARGETS if family == "llama" else ["c_attn"]),
    )
    for _ in range(3):
        t.train_step(Batch(SAMPLES))
    t.backend.save_model(tmp_path / "merged")
    for folder in (tmp_path / "merged", tmp_path / "merged" / "adapter"):
        assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.glob("*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    from peft import PeftModel  # which takes seconds to import

    model = PeftModel.from_pretrained(base, tmp_path / "merged" / "adapter").eval()
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    ours = t.backend.compute_logprobs(SAMPLES)
    for s in SAMPLES:
        ids = torch.tensor([[*s.prompt_ids, *s.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(s.prompt_ids) - 1 : -1] / s.temperature
        theirs = logits.log_softmax(-1).gather(-1, ids[0, len(s.prompt_ids) :, None])[:, 0].numpy()
        np.testing.assert_allclose(ours[s.rollout_id], theirs[s.mask], atol=1e-5)


def test_saved_model_keeps_stored_buffers(tmp_path: Path) -> None:
    start = load_model(ModelConfig(path=str(tiny.save_routed(tmp_path / "base"))))
    lora = LoraConfig(rank=4, target_modules=["q_proj"])
    t = local_trainer(start, TrainConfig(), AlgorithmConfig(), dtype=torch.bfloat16, max_new_tokens=16, lora=lora)
    t.backend.save_model(tmp_path / "merged")
    base, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "merged"))
    assert merged.keys() == base.keys()
    (name,) = (name for name in base if "e_score_correction_bias" in name)
    assert torch.equal(merged[name], base[name]) and base[name].any()
    load_model(ModelConfig(path=str(tmp_path / "merged")))


def test_adapters_are_saved_in_float32(tmp_path: Path) -> None:
    t = trainer(torch.bfloat16)
    t.train_step(Batch(SAMPLES))
    t.backend.save_model(tmp_path)
    base, parts = read_adapter(tmp_path / ADAPTER, "it")
    saved = {name: tensor for name, tensor in parts if not name.endswith("lora_scale")}
    assert base == "tiny-llama" and len(saved) == len(tiny.local(t).optimizer.names)
    masters = {
        n.removeprefix("base_model.model.").replace(".default", ""): m
        for n, m in tiny.local(t).optimizer.weights().items()
    }
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, masters[name]) for name, tensor in saved.items())
    handed = dict(at_once(t.backend.publish()))
    assert handed.keys() >= {name for name, _ in parts}
    assert all(float(scale) == float(handed[name]) == 2.0 for name, scale in parts if name.endswith("lora_scale"))


def test_layers_with_the_weight_the_other_way_round_are_merged(tmp_path: Path) -> None:
    t = local_trainer(
        tiny.loaded("gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=256),
        TrainConfig(learning_rate=1e-2, num_steps=10),
        AlgorithmConfig(),
        dtype=torch.float32,
        max_new_tokens=16,
        lora=LoraConfig(rank=4, alpha=8.0, target_modules=["c_attn"]),
    )
    for _ in range(3):
        t.train_step(Batch(SAMPLES))
    t.backend.save_model(tmp_path / "merged")
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    for name, parameter in copy.deepcopy(tiny.local(t).model).merge_and_unload().named_parameters():
        torch.testing.assert_close(saved[name], parameter, atol=1e-6, rtol=0)


def test_resumed_adapters_publish_everything_again() -> None:
    t = trainer()
    t.train_step(Batch(SAMPLES))
    tensors, meta = t.backend.save_state()
    resumed = trainer()
    resumed.backend.load_state({k: v.clone() for k, v in tensors.items()}, meta)
    expected, got = dict(at_once(t.backend.publish())), dict(at_once(resumed.backend.publish()))
    assert got.keys() == expected.keys() > dict(tiny.model().named_parameters()).keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)
    assert resumed.train_step(Batch(SAMPLES)) == t.train_step(Batch(SAMPLES))


def test_dropout_acts_in_training_only() -> None:
    t = trainer(dropout=0.5, micro_batch_tokens=40)
    for _ in range(3):
        t.train_step(Batch(SAMPLES))  # adapters start at zero, where dropout has no effect
    assert all(
        np.array_equal(a, b) for a, b in zip(*(t.backend.compute_logprobs(SAMPLES).values() for _ in "ab"), strict=True)
    )
    clean = t.backend.compute_logprobs(SAMPLES)
    t.backend.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
    assert all(np.array_equal(v, clean[k]) for k, v in t.backend.compute_logprobs(SAMPLES).items()), (
        "after a training pass too"
    )
    proximal = with_stream(SAMPLES, "proximal_logprobs", t.backend.compute_logprobs(SAMPLES))
    losses = [
        t.backend.forward_backward(proximal, Counts.from_samples(proximal)).totals()["max/ratio"] for _ in range(2)
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

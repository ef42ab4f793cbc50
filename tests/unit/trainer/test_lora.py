"""LoRA: only adapters train, and what is saved is the merged plain model with the adapters beside it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import tiny_trainer
import torch
from safetensors.torch import load_file
from tiny_trainer import restored, sample
from transformers import AutoModelForCausalLM

import tiny
from rollover.config import Config, EngineConfig, LoraConfig, ModelConfig, RunConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.adapters import names
from rollover.models.load import cast_parameters, load_model
from rollover.run.setup import EvalComponents
from rollover.trainer.batch import Batch
from rollover.trainer.lora import ADAPTER, add_lora, read_adapter
from rollover.trainer.objective import Counts
from rollover.trainer.streams import with_stream
from rollover.trainer.trainer import Trainer
from rollover.types import Prompt, Sample, SamplingParams, Segment
from samples import random_samples
from virtual_time import at_once

SAMPLES = random_samples(1)
TARGETS = ["q_proj", "down_proj"]


def trainer(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Trainer:
    torch.manual_seed(3)
    lora = LoraConfig(rank=4, alpha=8.0, dropout=dropout, target_modules=TARGETS)
    return tiny_trainer.trainer(dtype=dtype, adam_eps=1e-8, lora=lora)


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

    reference = tiny_trainer.trainer(dtype=dtype)
    tiny.local(reference).model.load_state_dict(saved, strict=False)
    expected, got = reference.backend.compute_logprobs(SAMPLES), t.backend.compute_logprobs(SAMPLES)
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, atol=2e-5 if dtype == torch.float32 else 0.15)


def test_saved_model_keeps_stored_buffers(tmp_path: Path) -> None:
    start = load_model(ModelConfig(path=str(tiny.save_routed(tmp_path / "base"))))
    lora = LoraConfig(rank=4, target_modules=["q_proj"])
    t = tiny_trainer.trainer(loaded=start, dtype=torch.bfloat16, lora=lora)
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


def test_resumed_adapters_publish_everything_again() -> None:
    t = trainer()
    t.train_step(Batch(SAMPLES))
    resumed = restored(t, trainer())
    expected, got = dict(at_once(t.backend.publish())), dict(at_once(resumed.backend.publish()))
    assert got.keys() == expected.keys() > dict(tiny.model().named_parameters()).keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)
    assert resumed.train_step(Batch(SAMPLES)) == t.train_step(Batch(SAMPLES))


def test_dropout_acts_in_training_only() -> None:
    t = trainer(dropout=0.5)
    for _ in range(3):
        t.train_step(Batch(SAMPLES))  # adapters start at zero, where dropout has no effect
    clean = t.backend.compute_logprobs(SAMPLES)
    t.backend.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
    assert all(np.array_equal(v, clean[k]) for k, v in t.backend.compute_logprobs(SAMPLES).items())
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


# Of these, query_key_value has an adapter in two of its three parts, and gate_up in one of two.
ENGINE_TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
# Packed weights; weights as the modules have them (biases too); the modules themselves.
FAMILIES = ("llama", "qwen2", "gemma3_text")


def trained(family: str, dtype: torch.dtype, *, steps: int = 20, base: Path | None = None) -> Trainer:
    torch.manual_seed(3)
    made = tiny_trainer.trainer(
        loaded=tiny.loaded(family) if base is None else load_model(ModelConfig(path=str(base))),
        learning_rate=1e-5,
        adam_eps=1e-8,
        dtype=dtype,
        lora=LoraConfig(rank=4, alpha=10.6, target_modules=ENGINE_TARGETS),  # a scale that bfloat16 has not
    )
    for _ in range(steps):
        made.train_step(Batch(random_samples(1)))
    return made


def make_engine(family: str, dtype: torch.dtype) -> EmbeddedEngine:
    model = tiny.model(family)
    cast_parameters(model, dtype)
    return EmbeddedEngine(model.requires_grad_(False), EngineConfig(kv_memory_gb=0.1))


def sampled(engine: EmbeddedEngine) -> list[Sample]:
    """16 rollouts of 24 tokens."""
    requests = [
        ExtendRequest(str(i), Prompt.of(range(3 + i, 20 + i)), (), 24, i, SamplingParams(temperature=1.0))
        for i in range(16)
    ]

    async def all_of_them() -> list[list[Segment]]:
        return await asyncio.gather(*(engine.extend(r) for r in requests))

    made = zip(requests, asyncio.run(all_of_them()), strict=True)
    return [
        sample(r.rollout_id, r.prompt.ids, segment.token_ids, behavior_logprobs=segment.logprobs)
        for r, (segment,) in made
    ]


def apart(trainer: Trainer, engine: EmbeddedEngine) -> float:
    """Mean difference between the log-probs of the engine, of what it samples, and the trainer's."""
    samples = sampled(engine)
    ours = trainer.backend.compute_logprobs(samples)
    return float(np.mean([np.abs(ours[s.rollout_id] - s.behavior_logprobs).mean() for s in samples]))


def difference(trainer: Trainer, family: str, dtype: torch.dtype, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
    engine = make_engine(family, dtype)
    at_once(engine.load_weights(1, tensors))
    return apart(trainer, engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_trainer_agree_after_training(family: str, dtype: torch.dtype) -> None:
    """In bfloat16 as well as before any update. Weights merged and rounded to bfloat16 are 0.001 nats off."""
    trainer = trained(family, dtype)
    before = difference(trained(family, dtype, steps=0), family, dtype, [])
    tensors = dict(at_once(trainer.backend.publish()))
    assert difference(trainer, family, dtype, tensors.items()) < max(1.2 * before, 1e-4)
    moved = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    assert difference(trainer, family, dtype, moved.items()) > 2e-4, "the training is not to be seen"


def test_what_a_run_saved_is_evaluated_as_it_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapters beside the base model's weights; where that is gone, the merged weights, and it is said."""
    base, saved = tiny.save(tmp_path / "base"), tmp_path / "run" / "model"
    trainer = trained("llama", torch.bfloat16, base=base)
    trainer.backend.save_model(saved)
    config = Config(
        model=ModelConfig(dtype="bfloat16"),
        engine=EngineConfig(kv_memory_gb=0.1),
        run=RunConfig(threads=torch.get_num_threads()),
    )

    def evaluated() -> float:
        return apart(trainer, at_once(EvalComponents.build(config, str(saved), with_rewards=False)).engine)

    assert evaluated() < 1e-4
    assert f"{saved}: its adapters are used over {base}: merged, small updates" in capsys.readouterr().err
    base.rename(tmp_path / "elsewhere")
    assert evaluated() > 2e-4
    assert "the merged weights are used, in which small updates are rounded away" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_later_hand_overs_hold_adapters_alone_and_suffice(family: str) -> None:
    trainer = trained(family, torch.bfloat16, steps=1)
    engine = make_engine(family, torch.bfloat16)
    first = list(at_once(trainer.backend.publish()))
    at_once(engine.load_weights(1, first))
    for _ in range(3):
        trainer.train_step(Batch(random_samples(1)))
    second = {name: tensor.clone() for name, tensor in at_once(trainer.backend.publish())}
    layers = {name.removesuffix(".weight") for name, _ in first if any(f".{t}.weight" in name for t in ENGINE_TARGETS)}
    assert second.keys() == {part for layer in layers for part in names(layer)}
    cost = at_once(engine.load_weights(2, second.items()))
    assert cost.num_bytes == sum(t.numel() * t.element_size() for t in second.values())
    whole = make_engine(family, torch.bfloat16)
    at_once(whole.load_weights(2, [*first, *second.items()]))
    for a, b in zip(sampled(engine), sampled(whole), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.behavior_logprobs, b.behavior_logprobs)


def test_the_engine_keeps_a_copy() -> None:
    """What is handed over are views of what is trained on."""
    trainer = trained("llama", torch.float32, steps=1)
    engine = make_engine("llama", torch.float32)
    at_once(engine.load_weights(1, at_once(trainer.backend.publish())))
    before = sampled(engine)
    for _ in range(5):
        trainer.train_step(Batch(random_samples(1)))
    for a, b in zip(before, sampled(engine), strict=True):
        assert np.array_equal(a.behavior_logprobs, b.behavior_logprobs)
